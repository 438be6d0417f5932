"""The configuration of a worker, as one JSON text. The controller fills it in; nothing changes it later."""

from dataclasses import dataclass, field
from typing import Annotated

from engine.schedule.batcher import FIRST_CHUNK_TOKENS
from kv_store.frame import MAC_KEY_BYTES
from wire.errors import require_setting
from wire.kv_policy import parse_kv_policy
from wire.layout import KV_DTYPES
from wire.pools import Role
from wire.served_model import ServedModel
from wire.tier import ColdSettings
from wire.trust.identity import Identity
from wire.typed_reader import Between, HexOf, not_empty

MAX_BLOCKS, MAX_THREADS, MAX_STEP_S = 1 << 40, 1024, 3600.0
PROPOSERS = ("off", "ngram")
MAX_DRAFT_LEN = 15
MAX_SILENCE_S = 120.0
"""Default bound on a step: enough for 2,048 tokens of a small model on two busy cores."""
MIN_SILENCE_S = 3.0
"""Least bound on a step: an engine without work is silent for a second at a time."""


@dataclass(frozen=True)
class CheckpointSettings:
    """The model and its device. kernels: a CPU's, see `select_backend`. kv_dtype: a key of wire.layout.KV_DTYPES.

    weight_cache_bytes: bound on files of packed weights on the node; 0 for none.
    """

    served: ServedModel
    device: str = "cpu"
    kernels: str = "auto"
    kv_dtype: str = "auto"
    weight_cache_bytes: int = 0

    def __post_init__(self) -> None:
        require_setting(self.kv_dtype in KV_DTYPES, "worker.model.kv_dtype", f"one of {', '.join(KV_DTYPES)}")
        parse_kv_policy(self.kv_policy, self.kv_dtype)

    @property
    def kv_policy(self) -> str:
        """The policy of a request that names no policy."""
        return self.served.kv_policies[0]


@dataclass(frozen=True)
class StoreSettings:
    """The node's store: the directory's socket, the cold tiers, nearest first, and their MAC key.

    block_address: the node's block port, by which other nodes read its arena; empty with a single node.
    """

    directory_path: str
    mac_key_hex: Annotated[str, HexOf(MAC_KEY_BYTES)]
    cold: tuple[ColdSettings, ...] = ()
    node_id: str = ""
    block_address: str = ""

    @property
    def mac_key(self) -> bytes:
        return bytes.fromhex(self.mac_key_hex)


@dataclass(frozen=True)
class ServerSettings:
    """The worker's port, 0 for a free port; `token` is the cluster's.

    identity: the worker's, towards routers and other nodes' block ports; without it there is no TLS.
    """

    token: Annotated[str, not_empty]
    host: str = "127.0.0.1"
    port: Annotated[int, Between(0, 65535)] = 0
    identity: Identity | None = None


@dataclass(frozen=True)
class BatchSettings:
    """Bounds of a step; see PrefillBatcher and DecodeBatcher.

    max_chunk_tokens: None for what max_gap_ms allows or, without it, FIRST_CHUNK_TOKENS.
    """

    max_step_tokens: int = 2048
    max_running: int = 128
    max_gap_ms: float | None = None
    max_chunk_tokens: int | None = None
    patience_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("max_running", "max_gap_ms", "max_chunk_tokens", "patience_tokens"):
            value = getattr(self, name)
            require_setting(value is None or value > 0, f"batch.{name}", "positive")
        chunk_tokens = self.max_chunk_tokens or FIRST_CHUNK_TOKENS
        words = "at least batch.max_running + batch.max_chunk_tokens"
        words += "" if self.max_chunk_tokens else f", which is {chunk_tokens} if left out"
        require_setting(self.max_step_tokens >= self.max_running + chunk_tokens, "batch.max_step_tokens", words)

    @property
    def most_chunk_tokens(self) -> int:
        """The most tokens of chunks beside decoding sequences, whatever time they take."""
        by_default = FIRST_CHUNK_TOKENS if self.max_gap_ms is None else self.max_step_tokens
        return self.max_chunk_tokens or by_default

    @property
    def max_gap_s(self) -> float | None:
        return None if self.max_gap_ms is None else self.max_gap_ms / 1000

    def num_open(self, block_size: int) -> int:
        """Counts the blocks that running sequences and a step's chunks can write at once."""
        return self.max_running + self.max_step_tokens // block_size


@dataclass(frozen=True)
class SpeculationSettings:
    """Speculation. proposer: a name of PROPOSERS. max_draft_len: guesses of one choice in one step.

    draft: the folder of a draft model, which guesses in place of a proposer. Text that grammars force is always
    guessed.
    """

    proposer: str = "off"
    max_draft_len: int = 7
    draft: str | None = None

    def __post_init__(self) -> None:
        require_setting(self.proposer in PROPOSERS, "speculation.proposer", f"one of {', '.join(PROPOSERS)}")
        is_fit = 1 <= self.max_draft_len <= MAX_DRAFT_LEN
        require_setting(is_fit, "speculation.max_draft_len", f"between 1 and {MAX_DRAFT_LEN}")
        guesses_once = self.draft is None or self.proposer == "off"
        require_setting(guesses_once, "speculation.proposer", "off where speculation.draft names a model that guesses")


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """The configuration of a worker.

    num_blocks: the worker's pages. num_threads: computing threads of each process. max_silence_s: bound on a step of
    the engine.
    """

    worker_id: Annotated[str, not_empty]
    role: Role
    model: CheckpointSettings
    num_blocks: Annotated[int, Between(1, MAX_BLOCKS)]
    store: StoreSettings
    server: ServerSettings
    batch: BatchSettings = field(default_factory=BatchSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    num_threads: Annotated[int, Between(1, MAX_THREADS)] = 1
    max_silence_s: Annotated[float, Between(MIN_SILENCE_S, MAX_STEP_S)] = MAX_SILENCE_S

    @property
    def block_size(self) -> int:
        return self.model.served.layout.block_size
