"""What a router is started with, as one JSON text. Whoever starts it fills this in; nothing changes it later."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from router.admission import Bounds
from wire.errors import ConfigError, WireError
from wire.layout import KVLayout

T = TypeVar("T")


@dataclass(frozen=True)
class ServedModel:
    """The model as workers loaded it. `folder` is where the tokenizer is; bytes are in hex."""

    name: str
    folder: str
    dtype: str
    max_context_len: int
    vocab_size: int
    fingerprint_hex: str
    layout_hex: str

    @property
    def fingerprint(self) -> bytes:
        return bytes.fromhex(self.fingerprint_hex)

    @property
    def layout(self) -> KVLayout:
        return KVLayout.decode(bytes.fromhex(self.layout_hex))


@dataclass(frozen=True)
class Listeners:
    """Where the router listens. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    grpc_port: int = 0
    operator_port: int = 0


@dataclass(frozen=True)
class ClusterAccess:
    """`token` opens workers and operator port; `secret_hex` keys the names of blocks. The controller is a Ray actor."""

    token: str
    secret_hex: str
    controller: str = ""
    ray_namespace: str = ""

    @property
    def secret(self) -> bytes:
        return bytes.fromhex(self.secret_hex)


@dataclass(frozen=True)
class StreamBounds:
    """Per request: its longest life, what a reader may leave waiting and for how long, the wait for a decode worker."""

    max_deadline_s: float = 600.0
    max_buffered_events: int = 256
    max_stall_s: float = 30.0
    max_worker_wait_s: float = 60.0


@dataclass(frozen=True)
class RouterConfig:
    """`max_prefix_keys`: blocks whose whereabouts the router remembers."""

    model: ServedModel
    cluster: ClusterAccess
    listeners: Listeners = field(default_factory=Listeners)
    admission: Bounds = field(default_factory=Bounds)
    streams: StreamBounds = field(default_factory=StreamBounds)
    max_prefix_keys: int = 65536

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RouterConfig":
        """Raises ConfigError for anything that is missing, unknown or of the wrong type, and names it."""
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise ConfigError("router configuration: not JSON") from error
        config = _read(cls, raw, "router")
        try:
            _ = config.model.fingerprint, config.model.layout, config.cluster.secret
        except (ValueError, WireError) as error:
            raise ConfigError("router configuration: fingerprint, layout or secret is not what it claims") from error
        return config


def _read(cls: type[T], raw: object, path: str) -> T:
    """An instance of a dataclass from a JSON object, strictly."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path}: must be an object")
    types = get_type_hints(cls)
    unknown = sorted(set(raw) - set(types))
    if unknown:
        raise ConfigError(f"{path}.{unknown[0][:64]}: unknown key")
    values = {name: _read_value(types[name], value, f"{path}.{name}") for name, value in raw.items()}
    try:
        return cls(**values)
    except TypeError as error:
        missing = [one.name for one in fields(cls) if one.name not in values]  # type: ignore[arg-type]
        raise ConfigError(f"{path}: lacks some of {', '.join(missing)}") from error


def _read_value(kind: Any, value: object, path: str) -> object:
    if is_dataclass(kind):
        return _read(kind, value, path)  # type: ignore[arg-type]
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{path}: must be of type {kind.__name__}")
    return value
