"""The configuration of a router, as one JSON text. The controller fills it in; nothing changes it later."""

from dataclasses import dataclass, field
from enum import StrEnum

from text.answer.formats import AUTO
from wire.block_names import namespace_root
from wire.errors import ConfigError, WireError
from wire.ids import NamespaceRoot
from wire.layout import KVLayout
from wire.sampling import DEFAULT_MAX_TOKENS, DEFAULTS, SamplingParams
from wire.trust.certificates import TlsFiles
from wire.trust.identity import Identity
from wire.trust.key_ring import KeyList
from wire.typed_reader import from_json

NO_ADAPTER = ""
FULL_CACHE = ""
"""The policy of a cache that keeps every token."""
LOOPBACK = "127.0.0.1"
METRICS_COMPAT = ("vllm",)
"""Servers under whose names metrics may be exported, too."""


@dataclass(frozen=True)
class ServedNamespace:
    """The parts of a namespace root that all tenants of a model share. model: its name, for the operator.

    layout_hex: as it was encoded when the model was served; a later version may encode the same layout otherwise.
    """

    model: str
    fingerprint_hex: str
    layout_hex: str

    @property
    def fingerprint(self) -> bytes:
        return bytes.fromhex(self.fingerprint_hex)

    @property
    def layout(self) -> KVLayout:
        return KVLayout.decode(bytes.fromhex(self.layout_hex))

    def root_of(self, secret: bytes, tenant: str) -> NamespaceRoot:
        """Derives the root of the names of a tenant's blocks."""
        layout = bytes.fromhex(self.layout_hex)
        return namespace_root(secret, tenant, self.fingerprint, layout, NO_ADAPTER, FULL_CACHE)


@dataclass(frozen=True)
class ServedModel:
    """The model as workers loaded it. `folder` is where the tokenizer is; bytes are in hex; aliases: further names.

    kv_policies: that a request may have; the first is that of the others. sampling: what unset fields of a request
    mean. max_chat_tokens: of an answer in a chat that gives no max_tokens.
    tool_format, reasoning_format: as AnswerFormats.of takes them.
    """

    name: str
    folder: str
    dtype: str
    max_context_len: int
    vocab_size: int
    fingerprint_hex: str
    layout_hex: str
    aliases: tuple[str, ...] = ()
    kv_policies: tuple[str, ...] = ("full",)
    sampling: SamplingParams = DEFAULTS
    max_chat_tokens: int = DEFAULT_MAX_TOKENS
    tool_format: str = AUTO
    reasoning_format: str = AUTO

    @property
    def fingerprint(self) -> bytes:
        return self.namespace.fingerprint

    @property
    def layout(self) -> KVLayout:
        return self.namespace.layout

    @property
    def namespace(self) -> ServedNamespace:
        return ServedNamespace(self.name, self.fingerprint_hex, self.layout_hex)


@dataclass(frozen=True)
class Listeners:
    """Host and ports of the router. Port 0 takes a free one; without a port for metrics, there are none to scrape.

    metrics_compat: one of METRICS_COMPAT.
    host: of the ports for clients and metrics; the operator's port is on this machine only.
    max_connections: that either of the gRPC ports takes; more are closed at once.
    reflection: whether these ports describe their services to clients. tls: of the port for clients; then metrics are
    on this machine only, and so is another port for clients without TLS, `local_port`, for the gateway.
    """

    host: str = LOOPBACK
    grpc_port: int = 0
    local_port: int = 0
    operator_port: int = 0
    metrics_port: int | None = None
    metrics_compat: str | None = None
    max_connections: int = 2048
    reflection: bool = True
    tls: TlsFiles | None = None


@dataclass(frozen=True)
class ClusterAccess:
    """`token` opens workers and operator port; `secret_hex` keys the names of blocks. The controller is a Ray actor.

    identity: the router's, towards workers; without it no line speaks TLS.
    """

    token: str
    secret_hex: str
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
    """The prompts that the prefill pool computes; conditional: by `router.disaggregation.decide`."""

    ALWAYS = "always"
    NEVER = "never"
    CONDITIONAL = "conditional"


@dataclass(frozen=True)
class StreamBounds:
    """Per request: its longest life, what a reader may leave waiting and for how long, the wait for a decode worker.

    disaggregation: whether prompts go to the prefill pool, or to decode at once.
    """

    max_deadline_s: float = 600.0
    max_buffered_tokens: int = 8192
    max_stall_s: float = 30.0
    max_worker_wait_s: float = 60.0
    disaggregation: Disaggregation = Disaggregation.ALWAYS


@dataclass(frozen=True)
class TraceSettings:
    """Traces of requests, off without an endpoint, the URL of a collector that takes OTLP over HTTP.

    ratio: the share of requests that is traced, among requests whose caller sends no `traceparent`.
    """

    endpoint: str | None = None
    ratio: float = 1.0


@dataclass(frozen=True)
class RouterConfig:
    """`max_prefix_keys`: blocks whose whereabouts the router remembers. keys: of callers.

    public_prefixes: texts, at the start of prompts or as system messages, whose blocks all tenants share.
    earlier: namespaces of other models and layouts that the secret has served, the latest first.
    """

    model: ServedModel
    cluster: ClusterAccess
    listeners: Listeners = field(default_factory=Listeners)
    admission: AdmissionBounds = field(default_factory=AdmissionBounds)
    streams: StreamBounds = field(default_factory=StreamBounds)
    max_prefix_keys: int = 65536
    keys: KeyList = field(default_factory=KeyList)
    public_prefixes: tuple[str, ...] = ()
    traces: TraceSettings = field(default_factory=TraceSettings)
    earlier: tuple[ServedNamespace, ...] = ()

    def root_of(self, tenant: str) -> NamespaceRoot:
        """Derives the root of the names of a tenant's blocks."""
        return self.model.namespace.root_of(self.cluster.secret, tenant)

    @classmethod
    def from_json(cls, text: str) -> "RouterConfig":
        """Raises ConfigError for anything that is missing, unknown or of the wrong type, and names it."""
        config = from_json(cls, text, "router")
        try:
            namespaces = (config.model.namespace, *config.earlier)
            _ = [(one.fingerprint, one.layout) for one in namespaces], config.cluster.secret
        except (ValueError, WireError) as error:
            raise ConfigError("router: fingerprint, layout or secret is not what it claims") from error
        return config
