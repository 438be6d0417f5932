"""The configuration of a worker, as one JSON text. The controller fills it in; nothing changes it later."""

from dataclasses import dataclass, field

from kv_store.frame import MAC_KEY_BYTES
from wire.errors import ConfigError
from wire.kv_policy import parse_kv_policy
from wire.layout import KV_DTYPES
from wire.pools import Role
from wire.tier import ColdSettings
from wire.trust.identity import Identity

FINGERPRINT_BYTES = 32
PROPOSERS = ("off", "ngram")
MAX_DRAFT_LEN = 15
MAX_SILENCE_S = 120.0
"""Enough for a step of 2048 tokens of a small model on two busy cores."""
MIN_SILENCE_S = 3.0
"""An engine without work is silent for a second at a time."""


@dataclass(frozen=True)
class CheckpointSettings:
    """The model's folder and device. kernels: a CPU's; see `select_backend`. kv_dtype: of wire.layout.KV_DTYPES.

    kv_policy: of wire.kv_policy. weight_cache_bytes: of files of packed weights on the node; 0 for none.
    """

    folder: str
    fingerprint_hex: str
    dtype: str | None = None
    device: str = "cpu"
    kernels: str = "auto"
    kv_dtype: str = "auto"
    kv_policy: str = "full"
    weight_cache_bytes: int = 0

    def __post_init__(self) -> None:
        _require(self.folder, "model.folder", "must not be empty")
        _require(self.kv_dtype in KV_DTYPES, "model.kv_dtype", f"must be one of {', '.join(KV_DTYPES)}")
        parse_kv_policy(self.kv_policy, self.kv_dtype)
        _require(len(self.fingerprint) == FINGERPRINT_BYTES, "model.fingerprint_hex", "must be 32 bytes")

    @property
    def fingerprint(self) -> bytes:
        return _from_hex(self.fingerprint_hex, "model.fingerprint_hex")


@dataclass(frozen=True)
class PageSettings:
    """The worker's own pages."""

    num_blocks: int
    block_size: int = 16

    def __post_init__(self) -> None:
        _require(self.num_blocks > 0, "pool.num_blocks", "must be positive")
        _require(self.block_size > 0, "pool.block_size", "must be positive")


@dataclass(frozen=True)
class StoreSettings:
    """The socket of the node's directory, which knows the arena; the cold tiers, nearest first, and their MAC key.

    block_address: of the node's block port, by which other nodes read its arena; none where there is one node.
    """

    directory_path: str
    mac_key_hex: str
    cold: tuple[ColdSettings, ...] = ()
    node_id: str = ""
    block_address: str = ""

    def __post_init__(self) -> None:
        _require(len(self.mac_key) == MAC_KEY_BYTES, "store.mac_key_hex", f"must be {MAC_KEY_BYTES} bytes")
        _require(all(one.timeout_s > 0 for one in self.cold), "store.cold", "each timeout_s must be positive")

    @property
    def mac_key(self) -> bytes:
        return _from_hex(self.mac_key_hex, "store.mac_key_hex")


@dataclass(frozen=True)
class ServerSettings:
    """The port of the worker, a free port for 0; `token` is the cluster's.

    identity: the worker's, towards routers and block ports of other nodes; without it none of them speaks TLS.
    """

    token: str
    host: str = "127.0.0.1"
    port: int = 0
    identity: Identity | None = None

    def __post_init__(self) -> None:
        _require(self.token, "server.token", "must not be empty")
        _require(0 <= self.port < 1 << 16, "server.port", "must be from 0 to 65535")


@dataclass(frozen=True)
class BatchSettings:
    """Bounds of a step; see PrefillBatcher and DecodeBatcher."""

    max_step_tokens: int = 2048
    max_running: int = 128
    max_chunk_tokens: int = 256
    patience_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("max_running", "max_chunk_tokens", "patience_tokens"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"batch.{name} must be positive")
        if self.max_step_tokens < self.max_running + self.max_chunk_tokens:
            raise ConfigError("batch.max_step_tokens must be at least batch.max_running + batch.max_chunk_tokens")

    def num_open(self, block_size: int) -> int:
        """Counts the blocks that running sequences and a step's chunks may write at once."""
        return self.max_running + self.max_step_tokens // block_size


@dataclass(frozen=True)
class SpeculationSettings:
    """Guesses of next tokens. proposer: of PROPOSERS. max_draft_len: guesses of one choice in one step.

    draft: the folder of a draft model, which guesses in place of one. Text that grammars force is guessed always.
    """

    proposer: str = "off"
    max_draft_len: int = 7
    draft: str | None = None

    def __post_init__(self) -> None:
        if self.proposer not in PROPOSERS:
            raise ConfigError(f"speculation.proposer must be one of {', '.join(PROPOSERS)}")
        if not 1 <= self.max_draft_len <= MAX_DRAFT_LEN:
            raise ConfigError(f"speculation.max_draft_len must be between 1 and {MAX_DRAFT_LEN}")
        if self.draft is not None and self.proposer != "off":
            raise ConfigError("speculation.proposer must be off where speculation.draft names a model that guesses")


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """The configuration of one worker.

    num_threads: that compute, in each process. max_silence_s: the longest that a step of the engine may take.
    """

    worker_id: str
    role: str
    model: CheckpointSettings
    pool: PageSettings
    store: StoreSettings
    server: ServerSettings
    batch: BatchSettings = field(default_factory=BatchSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    num_threads: int = 1
    max_silence_s: float = MAX_SILENCE_S

    def __post_init__(self) -> None:
        _require(self.num_threads > 0, "num_threads", "must be positive")
        _require(self.max_silence_s >= MIN_SILENCE_S, "max_silence_s", f"must be at least {MIN_SILENCE_S}")
        _require(self.worker_id, "worker_id", "must not be empty")
        _require(self.role in {one.value for one in Role}, "role", "must be prefill or decode")


def _from_hex(digits: str, name: str) -> bytes:
    try:
        return bytes.fromhex(digits)
    except ValueError as error:
        raise ConfigError(f"worker.{name}: must be hex digits") from error


def _require(holds: object, name: str, what: str) -> None:
    if not holds:
        raise ConfigError(f"worker.{name}: {what}")
