"""All settings of a cluster, from a TOML file and the command line. `baton.example.toml` says what each one means."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.settings import count_bytes, merge
from wire.errors import ConfigError
from wire.settings import from_object
from worker.config import MIN_SILENCE_S, BatchSettings

DTYPES = ("auto", "float32", "bfloat16", "float16")
BLOCK_SIZES = (8, 16, 32, 64, 128)
MAX_WORKERS = 64
MIB = 1 << 20
MAX_FILE_BYTES = MIB
MAX_ECHO_CHARS = 64
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,15}")
_REDIS_URL = re.compile(r"own|off|(redis|rediss|unix)://.+")


@dataclass(frozen=True)
class ModelSettings:
    """What is served. Without a path it is the demo model."""

    path: str | None = None
    dtype: str = "auto"
    block_size: int = 16

    def __post_init__(self) -> None:
        _require(self.dtype in DTYPES, "model.dtype", f"one of {', '.join(DTYPES)}", self.dtype)
        sizes = ", ".join(map(str, BLOCK_SIZES))
        _require(self.block_size in BLOCK_SIZES, "model.block_size", f"one of {sizes}", self.block_size)


@dataclass(frozen=True)
class PoolSettings:
    """Number of workers of each role. Without prefill workers, decode workers prefill."""

    prefill: int = 1
    decode: int = 1

    def __post_init__(self) -> None:
        _require_range(self.prefill, "pools.prefill", 0, MAX_WORKERS)
        _require_range(self.decode, "pools.decode", 1, MAX_WORKERS)


@dataclass(frozen=True)
class WorkerSettings:
    """What each worker gets. What is None is decided from what the machine has."""

    pool_bytes: int | None = None
    num_threads: int | None = None
    num_gpus: float | None = None
    num_cpus: float = 0.0
    drain_grace_s: int = 30
    max_silence_s: float | None = None

    def __post_init__(self) -> None:
        _require_range(self.pool_bytes, "worker.pool_bytes", MIB, 1 << 50)
        _require_range(self.num_threads, "worker.num_threads", 1, 1024)
        _require_range(self.num_gpus, "worker.num_gpus", 0, 1)
        _require_range(self.num_cpus, "worker.num_cpus", 0, 1024)
        _require_range(self.drain_grace_s, "worker.drain_grace_s", 0, 3600)
        _require_range(self.max_silence_s, "worker.max_silence_s", MIN_SILENCE_S, 3600)


@dataclass(frozen=True)
class ArenaSettings:
    """The host tier: blocks in shared memory, one arena a node."""

    size_bytes: int | None = None

    def __post_init__(self) -> None:
        _require_range(self.size_bytes, "arena.size_bytes", MIB, 1 << 50)


@dataclass(frozen=True)
class RedisSettings:
    """The cold tier: `own` starts a server, `off` goes without, a URL uses a server that is there."""

    url: str = "own"
    max_bytes: int = 256 * MIB
    timeout_ms: int = 50

    def __post_init__(self) -> None:
        _require(_REDIS_URL.fullmatch(self.url), "redis.url", "own, off, or a redis://, rediss:// or unix:// URL", "")
        _require_range(self.max_bytes, "redis.max_bytes", 16 * MIB, 1 << 50)
        _require_range(self.timeout_ms, "redis.timeout_ms", 1, 10_000)


@dataclass(frozen=True)
class RouterSettings:
    """Where clients and Prometheus connect, on 127.0.0.1: port 0 is any free one, `off` serves no metrics.

    The rest: see `router.config.Listeners`, `router.config.StreamBounds` and `router.requests.admission.Bounds`.
    """

    grpc_port: int = 50051
    metrics_port: int | str = 0
    max_connections: int = 2048
    reflection: bool = True
    max_open_requests: int = 2048
    max_queued_requests: int = 512
    max_queued_bytes: int = 64 * MIB
    retry_after_s: float = 1.0
    max_deadline_s: float = 600.0
    max_buffered_events: int = 256
    max_stall_s: float = 30.0
    max_worker_wait_s: float = 60.0

    def __post_init__(self) -> None:
        _require_range(self.grpc_port, "router.grpc_port", 0, 65535)
        if isinstance(self.metrics_port, str):
            _require(self.metrics_port == "off", "router.metrics_port", "a port or `off`", self.metrics_port[:16])
        else:
            _require_range(self.metrics_port, "router.metrics_port", 0, 65535)
        for name in ("max_connections", "max_open_requests", "max_queued_requests", "max_buffered_events"):
            _require_range(getattr(self, name), f"router.{name}", 1, 1 << 20)
        _require_range(self.max_queued_bytes, "router.max_queued_bytes", MIB, 1 << 40)
        for name in ("retry_after_s", "max_deadline_s", "max_stall_s", "max_worker_wait_s"):
            _require_range(getattr(self, name), f"router.{name}", 0.1, 86400)


@dataclass(frozen=True)
class RaySettings:
    """The Ray cluster to join. Without an address, one is started on this machine and belongs to the Baton cluster."""

    address: str | None = None


@dataclass(frozen=True)
class ClusterConfig:
    """Validated when it is made, and never changed afterwards."""

    name: str = "default"
    model: ModelSettings = field(default_factory=ModelSettings)
    pools: PoolSettings = field(default_factory=PoolSettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    arena: ArenaSettings = field(default_factory=ArenaSettings)
    redis: RedisSettings = field(default_factory=RedisSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    ray: RaySettings = field(default_factory=RaySettings)

    def __post_init__(self) -> None:
        check_name(self.name)

    @classmethod
    def load(cls, file: Path | None, flags: Mapping[str, Any]) -> "ClusterConfig":
        """From a TOML file, if there is one, with the nested table `flags` over it. Raises ConfigError."""
        table = merge(_read(file) if file is not None else {}, flags)
        return from_object(cls, count_bytes(table), "settings")


def check_name(name: str) -> str:
    """A cluster's name, which is part of paths. Raises ConfigError if it is none."""
    _require(_NAME.fullmatch(name), "name", "1 to 16 of a-z, 0-9 and -, beginning with a letter or digit", name[:64])
    return name


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as content:
            data = content.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    _require(len(data) <= MAX_FILE_BYTES, str(file), f"a file of at most {MAX_FILE_BYTES} bytes", "")
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error


def _require(holds: object, name: str, what: str, value: object) -> None:
    if not holds:
        given = f", not {repr(value)[:MAX_ECHO_CHARS]}" if value != "" else ""
        raise ConfigError(f"{name} must be {what}{given}")


def _require_range(value: float | None, name: str, least: float, most: float) -> None:
    """None, which stands for a default that is not decided yet, is in every range."""
    if value is not None:
        _require(least <= value <= most, name, f"between {least} and {most}", value)
