"""The configuration of a router, as one JSON text. The controller fills it in; nothing changes it later."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated

from wire.ids import NamespaceRoot
from wire.served_model import ServedModel, ServedNamespace
from wire.trust.certificates import TlsFiles
from wire.trust.identity import Identity
from wire.trust.key_ring import KeyList
from wire.typed_reader import HexOf

LOOPBACK = "127.0.0.1"
METRICS_COMPAT = ("vllm",)
"""Servers whose names of metrics can be exported, too."""


@dataclass(frozen=True, kw_only=True)
class PortSettings:
    """The router's ports for clients and Prometheus: port 0 takes a free port, `off` serves no metrics.

    metrics_compat: a name of METRICS_COMPAT, or `off`. max_connections: the most that a gRPC port takes; it closes
    further ones at once. reflection: whether these ports describe their services to clients.
    """

    host: str = LOOPBACK
    grpc_port: int = 50051
    metrics_port: int | str = 0
    metrics_compat: str = "off"
    max_connections: int = 2048
    reflection: bool = True


@dataclass(frozen=True)
class ClusterAccess:
    """The router's secrets: `token` opens workers and the operator port, `secret_hex` keys the names of blocks.

    identity: the router's, towards workers; without it lines have no TLS.
    """

    token: str
    secret_hex: Annotated[str, HexOf()]
    controller: str = ""
    ray_namespace: str = ""
    identity: Identity | None = None

    @property
    def secret(self) -> bytes:
        return bytes.fromhex(self.secret_hex)


@dataclass(frozen=True)
class AdmissionBounds:
    """Bounds on open requests. A request is queued until its first token, and running from then on."""

    max_open_requests: int = 2048
    max_queued_requests: int = 512
    max_queued_bytes: int = 64 << 20
    retry_after_s: float = 1.0


class Disaggregation(StrEnum):
    """The prompts that the prefill pool computes; CONDITIONAL asks `router.disaggregation.decide`."""

    ALWAYS = "always"
    NEVER = "never"
    CONDITIONAL = "conditional"


@dataclass(frozen=True)
class StreamBounds:
    """Bounds on each request: its longest life, the unread tokens of a slow reader, the wait for a decode worker.

    disaggregation: whether prompts go to the prefill pool, or to decode at once.
    """

    max_deadline_s: float = 600.0
    max_buffered_tokens: int = 8192
    max_stall_s: float = 30.0
    max_worker_wait_s: float = 60.0
    disaggregation: Disaggregation = Disaggregation.CONDITIONAL


@dataclass(frozen=True, kw_only=True)
class RouterSettings(StreamBounds, AdmissionBounds, PortSettings):
    """The settings of the routers: a table of the cluster's file.

    routers: their number; each further router takes the next gRPC and metrics port, unless these are any free ones.
    public_prefixes: texts, at the start of prompts or as system messages, whose blocks all tenants share.
    """

    routers: int = 1
    public_prefixes: tuple[str, ...] = ()

    def at(self, index: int) -> "RouterSettings":
        """Returns the settings of one router, by its place among them: its ports are behind the first router's."""
        grpc, metrics = self.grpc_port, self.metrics_port
        is_fixed = isinstance(metrics, int) and metrics
        return replace(
            self, grpc_port=grpc and grpc + index, metrics_port=int(metrics) + index if is_fixed else metrics
        )

    @property
    def ports(self) -> frozenset[int]:
        """The fixed ports of all routers."""
        each = [self.at(index) for index in range(self.routers)]
        return frozenset(
            port for one in each for port in (one.grpc_port, one.metrics_port) if isinstance(port, int) and port
        )


@dataclass(frozen=True)
class TraceSettings:
    """Traces of requests. endpoint: the URL of a collector of OTLP over HTTP; without it traces are off.

    ratio: the share of traced requests, among requests without a `traceparent`.
    """

    endpoint: str | None = None
    ratio: float = 1.0


@dataclass(frozen=True)
class LatencyBounds:
    """Limits on a request's latency: the time to its first token, and the mean time between its tokens."""

    ttft_ms: float | None = None
    itl_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The configuration of a router. max_prefix_keys: size of its PrefixMap. keys: the callers' keys.

    operator_port: reachable on this machine only; 0 takes a free port. tls: certificate of the clients' port. With it,
    metrics are reachable on this machine only, and so is `local_port`, a clients' port without TLS for the gateway.
    limits: decide which requests count as late, and which prompts are deferred. earlier: namespaces of other models and
    layouts that the secret has served, the latest first.
    """

    model: ServedModel
    cluster: ClusterAccess
    settings: RouterSettings = field(default_factory=RouterSettings)
    local_port: int = 0
    operator_port: int = 0
    tls: TlsFiles | None = None
    max_prefix_keys: int = 65536
    keys: KeyList = field(default_factory=KeyList)
    traces: TraceSettings = field(default_factory=TraceSettings)
    limits: LatencyBounds = field(default_factory=LatencyBounds)
    earlier: tuple[ServedNamespace, ...] = ()

    def root_of(self, tenant: str) -> NamespaceRoot:
        """Derives the root of a tenant's block names."""
        return self.model.namespace.root_of(self.cluster.secret, tenant)
