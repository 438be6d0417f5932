"""All settings of a cluster, from a TOML file and the command line. `baton.example.toml` explains each of them."""

import json
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deploy.plan.byte_size import parse_bytes
from deploy.plan.rules import MIB, TEXT, SettingRule, is_within, require_all
from router.config import LatencyBounds, RouterSettings, TraceSettings
from text.answer.formats import AUTO, OFF
from wire.errors import ConfigError, require_setting
from wire.kv_policy import Sinks, parse_kv_policy
from wire.pools import PoolSizes, Role
from wire.trust.certificates import TlsFiles
from wire.typed_reader import from_object, to_json
from worker.config import BatchSettings, SpeculationSettings

DEFAULT_HTTP_PORT = 8000
ALLOW = "--insecure allows it"
MAX_FILE_BYTES = MIB
MAX_DEPTH = 2
_NAME = SettingRule(
    re.compile(r"[a-z0-9][a-z0-9-]{0,15}").fullmatch, "1 to 16 of a-z, 0-9 and -, beginning with a letter or digit"
)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model to serve, by default the demo model. served_name: names for clients, by default the folder's.

    generation_config: "auto" takes sampling defaults from that file, "off" does not. max_chat_tokens: the most tokens
    of a chat's answer without max_tokens. tool_format, reasoning_format: "auto" reads them off the chat template.
    exact: whether rows of a GPU know no batch; "auto" says so where a device has timed that it costs little.
    weight_cache_bytes: bound on packed weights in the user's cache, on each node.
    """

    path: str | None = None
    served_name: str | tuple[str, ...] | None = None
    dtype: str = "auto"
    weights: str = "auto"
    exact: str = "auto"
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
        """The policies that a request may name, without repeats; the deployment's own is first."""
        return tuple(dict.fromkeys((self.kv_policy, *self.allowed_kv_policies)))

    @property
    def served_names(self) -> tuple[str, ...]:
        """The given names, without repeats."""
        given = (self.served_name,) if isinstance(self.served_name, str) else self.served_name or ()
        return tuple(dict.fromkeys(given))


@dataclass(frozen=True)
class RoleSettings:
    """The settings of one role's workers where they differ from WorkerSettings."""

    num_threads: int | None = None
    num_gpus: float | None = None
    num_cpus: float | None = None
    memory_bytes: int | None = None
    resources: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """The resources of each worker. For None the machine decides.

    num_gpus, num_cpus, memory_bytes, resources: requested from Ray, which places the worker on a node that has them.
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
        """Returns the settings for one role, whose own settings override the common settings."""
        own = {name: value for name, value in vars(getattr(self, role.value)).items() if value not in (None, {})}
        return replace(self, **own)


@dataclass(frozen=True)
class ArenaSettings:
    """The host tier: blocks in shared memory, one arena a node. max_keep_s, keep_share: see KeepLimits."""

    size_bytes: int | None = None
    max_keep_s: float = 600.0
    keep_share: float = 0.75


@dataclass(frozen=True)
class RedisSettings:
    """The tier `redis`: `own` starts a server, `off` has no such tier, a URL names a running server.

    write: a value of `wire.tier.Write`; None means "demoted" for the own server, which ends with the cluster, and "all"
    for another. ttl_s: time to live since a block's last use; None for no end.
    """

    url: str = "own"
    max_bytes: int = 256 * MIB
    timeout_ms: int = 50
    write: str | None = None
    ttl_s: float | None = None


@dataclass(frozen=True)
class FilesSettings:
    """The tier `files`, off without a folder. write: a value of `wire.tier.Write`. ttl_s: see RedisSettings."""

    folder: str | None = None
    max_bytes: int = 16384 * MIB
    timeout_ms: int = 200
    write: str = "all"
    ttl_s: float | None = None


@dataclass(frozen=True)
class HttpSettings:
    """The port of the gateways, at `router.host`: 0 takes a free port, `off` starts no gateway.

    None means DEFAULT_HTTP_PORT, or a free port if `router.grpc_port` is 0. host_names, cors_origins: see
    GatewayConfig.
    """

    port: int | str | None = None
    gateways: int = 1
    host_names: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()


@dataclass(frozen=True)
class TlsSettings:
    """TLS at the ports for clients, off without paths of PEM files; see `wire.trust.certificates.TlsFiles`."""

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
    """The Ray cluster to join. Without an address, Baton starts its own on this machine.

    plain_network: the trusted network in which ports between nodes have no TLS; None: TLS everywhere.
    standby_frontends: whether all routers and gateways but the first run on a node beside the head.
    """

    address: str | None = None
    plain_network: str | None = None
    standby_frontends: bool = False


@dataclass(frozen=True, kw_only=True)
class SloSettings(LatencyBounds):
    """The limits that the sizes of the pools follow, each pool by its own; a pool without a limit is sized by hand.

    share: part of requests that keep the limits. dwell_s: least time for which fewer workers suffice before some go.
    min_*, max_*: bounds of a pool's size; a limit needs its pool's max.
    """

    share: float = 0.95
    dwell_s: float = 60.0
    min_prefill: int = 1
    max_prefill: int | None = None
    min_decode: int = 1
    max_decode: int | None = None

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of the pools with limits."""
        limits = {Role.PREFILL: self.ttft_ms, Role.DECODE: self.itl_ms}
        return tuple(role for role, limit in limits.items() if limit is not None)

    def bounds(self, role: Role) -> tuple[int, int]:
        """Returns the least and the most workers of a pool."""
        least, most = (getattr(self, f"{each}_{role.value}") for each in ("min", "max"))
        return least, least if most is None else most

    def describe(self, role: Role) -> str:
        """Describes the limit of a pool and the bounds of its size."""
        limit = f"slo.ttft_ms {self.ttft_ms:g}" if role is Role.PREFILL else f"slo.itl_ms {self.itl_ms:g}"
        least, most = self.bounds(role)
        return f"{limit} for {self.share:.0%} of requests, {least} to {most} workers"

    def require_possible(self, pools: PoolSizes) -> None:
        """Raises ConfigError for bounds that are missing, contradict, or exclude the pools' first sizes."""
        for role in self.roles:
            limit, name = ("slo.ttft_ms" if role is Role.PREFILL else "slo.itl_ms"), f"slo.max_{role.value}"
            require_setting(getattr(self, f"max_{role.value}") is not None, name, f"given with {limit}")
            least, most = self.bounds(role)
            require_setting(least <= most, name, f"at least slo.min_{role.value}, which is {least}, not {most}")
            words = f"between slo.min_{role.value} and {name}, {least} and {most}, not {pools[role]}"
            require_setting(least <= pools[role] <= most, f"pools.{role.value}", words)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The settings of a cluster, validated when made and immutable.

    insecure: permits settings that leave a port open to strangers.
    """

    name: str = "default"
    insecure: bool = False
    secret_file: str | None = None
    model: ModelSettings = field(default_factory=ModelSettings)
    pools: PoolSizes = field(default_factory=PoolSizes)
    slo: SloSettings = field(default_factory=SloSettings)
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
        require_all(self)
        self.slo.require_possible(self.pools)
        policies = [parse_kv_policy(text, self.model.kv_dtype) for text in self.model.kv_policies]
        have_sinks = len(policies) > 1 and any(isinstance(policy, Sinks) for policy in policies)
        require_setting(not have_sinks, "model.allowed_kv_policies", "without sinks, which all requests have or none")
        is_streaming = isinstance(policies[0], Sinks)
        require_setting(not (is_streaming and self.speculation.draft), "speculation.draft", "left out with sinks")
        grpc, metrics, http = self.router.grpc_port, self.router.metrics_port, self.http.port
        ports, num_fixed = self.router.ports, sum(one not in (0, OFF) for one in (grpc, metrics))
        words = "another port than router.grpc_port, of each router"
        are_apart = len(ports) == num_fixed * self.router.routers
        require_setting(are_apart, "router.metrics_port", f"{words}, not {metrics}")
        require_setting(max(ports, default=0) < 1 << 16, "router.routers", "no more than there are ports")
        words = "another port than those of the router"
        require_setting(http in (None, 0, OFF) or http not in ports, "http.port", f"{words}, not {http}")
        are_whole = self.tls == TlsSettings() or self.tls.files is not None
        require_setting(are_whole, "tls", "given with both certificate and key")
        self._require_closed()
        if self.ray.standby_frontends:
            require_setting(self.ray.address is not None, "ray.address", "given with ray.standby_frontends")
            require_setting(self.router.routers > 1, "router.routers", "2 at least with ray.standby_frontends")
            is_everywhere = self.router.host == "0.0.0.0" or not self.is_public
            require_setting(is_everywhere, "router.host", "127.0.0.1 or 0.0.0.0 with ray.standby_frontends")

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach the ports for clients."""
        return not is_within(self.router.host, "127.0.0.0/8")

    @property
    def http_port(self) -> int | None:
        """Returns the gateways' port, 0 for any free one; None without a gateway."""
        if isinstance(self.http.port, str):
            return None
        default = DEFAULT_HTTP_PORT if self.router.grpc_port else 0
        return default if self.http.port is None else self.http.port

    def _require_closed(self) -> None:
        """Raises ConfigError for a port that is open to strangers, unless that is permitted."""
        host, network = self.router.host, self.ray.plain_network
        if not self.insecure and self.is_public and self.tls.files is None:
            problem = "without TLS, keys, prompts and answers can be read on the wire: give --tls-cert and --tls-key"
            raise ConfigError(f"router.host {host}: {problem} ({ALLOW})")
        if not self.insecure and network is not None:
            raise ConfigError(f"ray.plain_network {network}: KV and tokens cross it unencrypted ({ALLOW})")

    @classmethod
    def load(cls, file: Path | None, flags: Mapping[str, Any]) -> "ClusterConfig":
        """Reads a TOML file, if given; the nested table `flags` overrides it. Raises ConfigError."""
        return cls._merged({}, file, flags)

    def changed(self, file: Path | None, flags: Mapping[str, Any]) -> "ClusterConfig":
        """Returns these settings with the given ones in their place. Raises ConfigError as `load`."""
        return self._merged(json.loads(to_json(self)), file, flags)

    @classmethod
    def _merged(cls, base: Mapping[str, Any], file: Path | None, flags: Mapping[str, Any]) -> "ClusterConfig":
        table = _merge(_merge(base, _read(file) if file is not None else {}), flags)
        return from_object(cls, {name: _count_bytes(value, name) for name, value in table.items()}, "")


def check_name(name: str) -> str:
    """Returns the name of a cluster, which is part of paths. Raises ConfigError if it cannot be."""
    _NAME.require("name", name[:64])
    return name


def _read(file: Path) -> dict[str, Any]:
    SettingRule(TEXT.fullmatch, "a path without control characters").require("--config", str(file))
    try:
        # Asked first: to open a pipe would wait for its writer.
        require_setting(stat.S_ISREG(file.stat().st_mode), str(file), "a regular file")
        with file.open("rb") as content:
            data = content.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    require_setting(len(data) <= MAX_FILE_BYTES, str(file), f"a file of at most {MAX_FILE_BYTES} bytes")
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
    """Turns each text under a key that ends in `_bytes` into a number, in nested tables, too. Raises ConfigError."""
    if isinstance(value, Mapping) and name.count(".") < MAX_DEPTH:
        return {key: _count_bytes(each, f"{name}.{key}") for key, each in value.items()}
    return parse_bytes(value, name) if name.endswith("_bytes") and isinstance(value, str) else value
