"""All settings of a cluster, from a TOML file and the command line. `baton.example.toml` explains each of them."""

import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from ipaddress import IPv4Address, ip_address, ip_network
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deploy.plan.byte_size import parse_bytes
from deploy.plan.machine import RESERVED
from router.config import LOOPBACK, METRICS_COMPAT, AdmissionBounds, StreamBounds, TraceSettings
from text.answer.formats import AUTO, CALL_FORMATS, CHANNELS, OFF
from wire.errors import ConfigError
from wire.kv_policy import Sinks, parse_kv_policy
from wire.layout import KV_DTYPES
from wire.pools import PoolSizes, Role
from wire.rpc import MAX_MESSAGE_BYTES
from wire.tier import Write
from wire.trust.certificates import TlsFiles
from wire.typed_reader import from_object, shown
from worker.config import MAX_DRAFT_LEN, MIN_SILENCE_S, PROPOSERS, BatchSettings, SpeculationSettings

DTYPES = ("auto", "float32", "bfloat16", "float16")
CPU_KERNELS = ("auto", "avx512", "avx2", "portable", "torch")
WEIGHTS = ("auto", "int8", "int4")
BLOCK_SIZES = (8, 16, 32, 64, 128)
DEFAULT_HTTP_PORT = 8000
MAX_WORKERS = 64
ALLOW = "--insecure allows it"
WORKER_TABLES = ("worker", *(f"worker.{role.value}" for role in Role))
TEXTS = (
    *(
        "model.path",
        "speculation.draft",
        "model.served_name",
        "redis.url",
        "ray.address",
        "files.folder",
        "secret_file",
    ),
    *("tls.certificate", "tls.key", "tls.client_ca"),
)
MIB = 1 << 20
MAX_FILE_BYTES = MIB
MAX_RESOURCE = 1 << 20
MAX_DEPTH = 2
MAX_TEXT_CHARS = 4096
"""The most that a path may have."""
MAX_NAME_CHARS = 256
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,15}")
_TEXT = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]+")
_REDIS_URL = re.compile(r"own|off|rediss?://[^\s/]+(/[0-9]*)?(\?\S*)?|unix://[^\s/]*/\S+")
_RESOURCE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")
_ORIGIN = re.compile(
    r"\*|(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?"
)
_COLLECTOR = re.compile(r"https?://[^\s/?#@]+/?")
_RAY_ADDRESS = re.compile(r"auto|[^\s/]+:[0-9]+")


@dataclass(frozen=True)
class ModelSettings:
    """The model to serve. Without a path it is the demo model; without a served_name, one or several, clients know it
    by its folder's name.

    generation_config: "auto" where that file's sampling completes requests, or "off". max_chat_tokens: of an answer in
    a chat that gives no max_tokens. tool_format, reasoning_format: "auto" where the chat
    template tells them. weight_cache_bytes: of packed weights in the user's cache, on each node.
    """

    path: str | None = None
    served_name: str | tuple[str, ...] | None = None
    dtype: str = "auto"
    weights: str = "auto"
    kv_dtype: str = "auto"
    kv_policy: str = "full"
    allowed_kv_policies: tuple[str, ...] = ()
    block_size: int = 16
    generation_config: str = "auto"
    max_chat_tokens: int = 4096
    tool_format: str = AUTO
    reasoning_format: str = AUTO
    weight_cache_bytes: int = 32768 * MIB

    @property
    def kv_policies(self) -> tuple[str, ...]:
        """The policies that a request may have, each once; first the deployment's own."""
        return tuple(dict.fromkeys((self.kv_policy, *self.allowed_kv_policies)))

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names that were given, each once."""
        given = (self.served_name,) if isinstance(self.served_name, str) else self.served_name or ()
        return tuple(dict.fromkeys(given))


@dataclass(frozen=True)
class RoleSettings:
    """The share of each worker of one role, where it is another than that of all workers."""

    num_threads: int | None = None
    num_gpus: float | None = None
    num_cpus: float | None = None
    memory_bytes: int | None = None
    resources: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerSettings:
    """The share of each worker. The machine decides where a setting is None.

    num_gpus, num_cpus, memory_bytes, resources: asked of Ray, which places the worker on a node that has them.
    """

    pool_bytes: int | None = None
    num_threads: int | None = None
    num_gpus: float | None = None
    cpu_kernels: str = "auto"
    num_cpus: float = 0.0
    memory_bytes: int | None = None
    resources: dict[str, float] = field(default_factory=dict)
    drain_grace_s: int = 30
    max_silence_s: float | None = None
    prefill: RoleSettings = field(default_factory=RoleSettings)
    decode: RoleSettings = field(default_factory=RoleSettings)

    def of(self, role: Role) -> "WorkerSettings":
        """Returns the settings for one role: its own ones in place of the common ones."""
        own = {name: value for name, value in vars(getattr(self, role.value)).items() if value not in (None, {})}
        return replace(self, **own)


@dataclass(frozen=True)
class ArenaSettings:
    """The host tier: blocks in shared memory, one arena a node. max_keep_s, keep_share: of KeepLimits."""

    size_bytes: int | None = None
    max_keep_s: float = 600.0
    keep_share: float = 0.75


@dataclass(frozen=True)
class RedisSettings:
    """The tier `redis`: `own` starts a server, `off` goes without, a URL uses a server that is there.

    write: of `wire.tier.Write`; None is "demoted" for an own server, which ends with the cluster, "all" for another.
    ttl_s: of a block, since its last use; None for no end.
    """

    url: str = "own"
    max_bytes: int = 256 * MIB
    timeout_ms: int = 50
    write: str | None = None
    ttl_s: float | None = None


@dataclass(frozen=True)
class FilesSettings:
    """The tier `files`, off without a folder. write: of `wire.tier.Write`. ttl_s: as of RedisSettings."""

    folder: str | None = None
    max_bytes: int = 16384 * MIB
    timeout_ms: int = 200
    write: str = "all"
    ttl_s: float | None = None


@dataclass(frozen=True)
class PortSettings:
    """The router's ports for clients and Prometheus: port 0 is any free one, `off` serves no metrics."""

    host: str = LOOPBACK
    grpc_port: int = 50051
    metrics_port: int | str = 0
    metrics_compat: str = OFF
    max_connections: int = 2048
    reflection: bool = True


@dataclass(frozen=True)
class RouterSettings(StreamBounds, AdmissionBounds, PortSettings):
    """The settings of three parts of the router, which share a table of the file. public_prefixes: see RouterConfig."""

    public_prefixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class HttpSettings:
    """The port of the gateways, at `router.host`: 0 is any free one, `off` starts no gateway.

    None is DEFAULT_HTTP_PORT; any free port where `router.grpc_port` is 0. host_names, cors_origins: of GatewayConfig.
    """

    port: int | str | None = None
    gateways: int = 1
    host_names: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()


@dataclass(frozen=True)
class TlsSettings:
    """TLS at the ports for clients: paths of PEM files, as of `wire.trust.certificates.TlsFiles`; off without them."""

    certificate: str | None = None
    key: str | None = None
    client_ca: str | None = None

    @property
    def files(self) -> TlsFiles | None:
        if self.certificate is None or self.key is None:
            return None
        client_ca = None if self.client_ca is None else str(Path(self.client_ca).absolute())
        return TlsFiles(str(Path(self.certificate).absolute()), str(Path(self.key).absolute()), client_ca)


@dataclass(frozen=True)
class RaySettings:
    """The Ray cluster to join. Without an address, one is started on this machine and belongs to the Baton cluster.

    plain_network: the trusted network in which ports between nodes speak no TLS; None: TLS everywhere.
    """

    address: str | None = None
    plain_network: str | None = None


RANGES: dict[str, tuple[float, float]] = {
    "model.max_chat_tokens": (1, 1 << 20),
    "model.weight_cache_bytes": (0, 1 << 50),
    "pools.prefill": (0, MAX_WORKERS),
    "pools.decode": (1, MAX_WORKERS),
    "worker.pool_bytes": (MIB, 1 << 50),
    **{f"{each}.num_threads": (1, 1024) for each in WORKER_TABLES},
    **{f"{each}.num_gpus": (0, 1) for each in WORKER_TABLES},
    **{f"{each}.num_cpus": (0, 1024) for each in WORKER_TABLES},
    **{f"{each}.memory_bytes": (MIB, 1 << 50) for each in WORKER_TABLES},
    "worker.drain_grace_s": (0, 3600),
    "worker.max_silence_s": (MIN_SILENCE_S, 3600),
    **{f"batch.{each.name}": (1, 1 << 20) for each in fields(BatchSettings)},
    "speculation.max_draft_len": (1, MAX_DRAFT_LEN),
    "arena.size_bytes": (MIB, 1 << 50),
    "arena.max_keep_s": (0, 86400),
    "arena.keep_share": (0, 1),
    "redis.max_bytes": (16 * MIB, 1 << 50),
    "files.max_bytes": (16 * MIB, 1 << 60),
    **{f"{each}.timeout_ms": (1, 10_000) for each in ("redis", "files")},
    **{f"{each}.ttl_s": (1, 1e9) for each in ("redis", "files")},
    **{f"router.{each}_port": (0, 65535) for each in ("grpc", "metrics")},
    "http.port": (0, 65535),
    "http.gateways": (1, 16),
    "traces.ratio": (0, 1),
    "router.max_queued_bytes": (MAX_MESSAGE_BYTES, 1 << 40),
    **{f"router.max_{each}": (1, 1 << 20) for each in ("connections", "open_requests", "queued_requests")},
    "router.max_buffered_tokens": (1, 1 << 20),
    **{f"router.{each}_s": (0.1, 86400) for each in ("retry_after", "max_deadline", "max_stall", "max_worker_wait")},
}
"""Least and most of each number. A setting that is no number is not decided yet, or off."""


PLACES: dict[str, tuple[Callable[[Any], object], str]] = {
    "redis.url": (
        lambda url: _REDIS_URL.fullmatch(url) and _names_a_host(url),
        "own, off, or a URL: redis://HOST:PORT/DB, rediss://..., unix:///PATH",
    ),
    "files.folder": (lambda folder: Path(folder).is_absolute(), "an absolute path"),
    "ray.address": (
        lambda address: _RAY_ADDRESS.fullmatch(address) and _names_a_host(f"ray://{address}"),
        "HOST:PORT or auto (without it, Ray is started)",
    ),
    "http.cors_origins": (
        lambda origins: all(_ORIGIN.fullmatch(one) and _names_a_host(one) for one in origins),
        "* or origins as browsers write them, like https://chat.example.org: lower case, no path, no default port",
    ),
    "http.host_names": (lambda names: all(map(_HOST_NAME.fullmatch, names)), "names without ports"),
    "traces.endpoint": (
        lambda url: _COLLECTOR.fullmatch(url) and _names_a_host(url),
        "a URL without a path: http://HOST:PORT, https://HOST:PORT",
    ),
    "router.host": (lambda host: _is_made(IPv4Address, host), "an IPv4 address"),
    "ray.plain_network": (lambda network: _is_made(ip_network, network), "like 10.0.0.0/24"),
}
"""URLs, addresses and folders: a check of each that is given, and its words."""
SECRET = ("redis.url",)
"""Settings whose value, which may have a password, no message shows."""


@dataclass(frozen=True)
class ClusterConfig:
    """The settings of a cluster: valid once made, and never changed afterwards.

    insecure: allows settings that leave a port open to strangers.
    """

    name: str = "default"
    insecure: bool = False
    secret_file: str | None = None
    model: ModelSettings = field(default_factory=ModelSettings)
    pools: PoolSizes = field(default_factory=PoolSizes)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    arena: ArenaSettings = field(default_factory=ArenaSettings)
    redis: RedisSettings = field(default_factory=RedisSettings)
    files: FilesSettings = field(default_factory=FilesSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)
    traces: TraceSettings = field(default_factory=TraceSettings)
    ray: RaySettings = field(default_factory=RaySettings)

    def __post_init__(self) -> None:
        check_name(self.name)
        self._require_known_values()
        self._require_resources()
        self._require_places()
        self._require_ports()
        are_whole = self.tls == TlsSettings() or self.tls.files is not None
        _require(are_whole, "tls", "given with both certificate and key", "")
        self._require_closed()

    def _require_known_values(self) -> None:
        for name in TEXTS:
            value = attrgetter(name)(self)
            is_text = value is None or all(map(_TEXT.fullmatch, [value] if isinstance(value, str) else value))
            _require(is_text, name, "text without control characters, and not empty: leave it out for the default", "")
            most = MAX_NAME_CHARS if name == "model.served_name" else MAX_TEXT_CHARS
            is_short = value is None or all(len(one) <= most for one in ([value] if isinstance(value, str) else value))
            _require(is_short, name, f"of at most {most} characters", "")
        choices_of = {
            "model.dtype": DTYPES,
            "model.weights": WEIGHTS,
            "model.kv_dtype": KV_DTYPES,
            "model.block_size": BLOCK_SIZES,
            "model.generation_config": ("auto", "off"),
            "model.tool_format": (AUTO, OFF, *CALL_FORMATS),
            "model.reasoning_format": (AUTO, OFF, *CHANNELS),
            "worker.cpu_kernels": CPU_KERNELS,
            "speculation.proposer": PROPOSERS,
            "router.metrics_compat": (OFF, *METRICS_COMPAT),
            "redis.write": tuple(Write),
            "files.write": tuple(Write),
        }
        for name, choices in choices_of.items():
            value = attrgetter(name)(self)
            _require(value in (None, *choices), name, f"one of {', '.join(map(str, choices))}", value)
        policies = [parse_kv_policy(text, self.model.kv_dtype) for text in self.model.kv_policies]
        have_sinks = len(policies) > 1 and any(isinstance(policy, Sinks) for policy in policies)
        _require(not have_sinks, "model.allowed_kv_policies", "without sinks, which all requests have or none", "")
        is_streaming = isinstance(policies[0], Sinks)
        _require(not (is_streaming and self.speculation.draft), "speculation.draft", "left out with sinks", "")
        for name in RANGES:
            if problem := range_problem(name, attrgetter(name)(self)):
                raise ConfigError(f"{name} {problem}")

    def _require_resources(self) -> None:
        for name in WORKER_TABLES:
            resources = attrgetter(f"{name}.resources")(self)
            are_fit = all(_RESOURCE.fullmatch(key) and key not in RESERVED for key in resources)
            _require(are_fit, f"{name}.resources", f"names of letters, digits and ._-, other than {RESERVED}", "")
            are_some = all(0 < amount <= MAX_RESOURCE for amount in resources.values())
            _require(are_some, f"{name}.resources", f"amounts above 0, at most {MAX_RESOURCE}", "")

    def _require_places(self) -> None:
        """Checks URLs, addresses and folders."""
        for name, (is_one, what) in PLACES.items():
            value = attrgetter(name)(self)
            _require(value is None or is_one(value), name, what, "" if name in SECRET else value)

    def _require_ports(self) -> None:
        port = self.router.metrics_port
        _require(isinstance(port, int) or port == "off", "router.metrics_port", "a port or `off`", str(port)[:16])
        _require(
            port in (0, "off") or port != self.router.grpc_port,
            "router.metrics_port",
            "another port than router.grpc_port",
            port,
        )
        http = self.http.port
        _require(not isinstance(http, str) or http == "off", "http.port", "a port or `off`", str(http)[:16])
        is_other = http in (None, 0, "off") or http not in (port, self.router.grpc_port)
        _require(is_other, "http.port", "another port than those of the router", http)

    @property
    def is_public(self) -> bool:
        """True where other machines may reach the ports for clients."""
        return not is_within(self.router.host, "127.0.0.0/8")

    @property
    def http_port(self) -> int | None:
        """Returns the gateways' port, 0 for any free one; None without a gateway."""
        if isinstance(self.http.port, str):
            return None
        default = DEFAULT_HTTP_PORT if self.router.grpc_port else 0
        return default if self.http.port is None else self.http.port

    def _require_closed(self) -> None:
        """Raises ConfigError for a port that is open to strangers, where that is not allowed."""
        host, network = self.router.host, self.ray.plain_network
        if not self.insecure and self.is_public and self.tls.files is None:
            problem = "without TLS, keys, prompts and answers can be read on the wire: give --tls-cert and --tls-key"
            raise ConfigError(f"router.host {host}: {problem} ({ALLOW})")
        if not self.insecure and network is not None:
            raise ConfigError(f"ray.plain_network {network}: KV and tokens cross it unencrypted ({ALLOW})")

    @classmethod
    def load(cls, file: Path | None, flags: Mapping[str, Any]) -> "ClusterConfig":
        """Reads a TOML file, if there is one, with the nested table `flags` over it. Raises ConfigError."""
        table = _merge(_read(file) if file is not None else {}, flags)
        return from_object(cls, {name: _count_bytes(value, name) for name, value in table.items()}, "")


def range_problem(name: str, value: object) -> str:
    """Returns the reason for which a number may not be a setting, in words; "" for one in range, and for no number."""
    least, most = RANGES[name]
    is_in = not isinstance(value, int | float) or least <= value <= most
    return "" if is_in else f"must be between {least} and {most}, not {shown(value)}"


def check_name(name: str) -> str:
    """Returns the name of a cluster, which is part of paths. Raises ConfigError if it is none."""
    _require(_NAME.fullmatch(name), "name", "1 to 16 of a-z, 0-9 and -, beginning with a letter or digit", name[:64])
    return name


def is_within(host: str, network: str) -> bool:
    """Tells whether a host is an address of a network."""
    return _is_made(ip_address, host) and ip_address(host) in ip_network(network)


def _is_made(make: Callable[[str], object], text: str) -> bool:
    try:
        make(text)
    except ValueError:
        return False
    return True


def _names_a_host(url: str) -> bool:
    """Tells whether a URL names a host, and no port that there cannot be. One of a Unix socket need not name a host."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("", "unix") or (bool(parts.hostname) and parts.port != 0)
    except ValueError:
        return False


def _read(file: Path) -> dict[str, Any]:
    _require(_TEXT.fullmatch(str(file)), "--config", "a path without control characters", str(file))
    try:
        # Asked first: to open a pipe would wait for its writer.
        _require(stat.S_ISREG(file.stat().st_mode), str(file), "a regular file", "")
        with file.open("rb") as content:
            data = content.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    _require(len(data) <= MAX_FILE_BYTES, str(file), f"a file of at most {MAX_FILE_BYTES} bytes", "")
    try:
        return tomllib.loads(data.decode())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8, as TOML must be") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is nested too deeply, or a number in it is too long") from error


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        is_table = isinstance(merged.get(key), Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(merged[key], value) if is_table else value
    return merged


def _count_bytes(value: Any, name: str) -> Any:
    """Turns each text under a key that ends in `_bytes` into a number, as deep as settings go. Raises ConfigError."""
    if isinstance(value, Mapping) and name.count(".") < MAX_DEPTH:
        return {key: _count_bytes(each, f"{name}.{key}") for key, each in value.items()}
    return parse_bytes(value, name) if name.endswith("_bytes") and isinstance(value, str) else value


def _require(holds: object, name: str, what: str, value: object) -> None:
    if not holds:
        given = f", not {shown(value)}" if value != "" else ""
        raise ConfigError(f"{name} must be {what}{given}")
