"""The configuration of a gateway, as one JSON text. The controller fills it in."""

from dataclasses import dataclass, field

from wire.settings import from_json, to_json
from wire.trust.certificates import TlsFiles
from wire.trust.key_ring import KeyList


@dataclass(frozen=True)
class GatewayConfig:
    """`address` is the router's public port. Port 0 takes a free one. metrics_address: the router's, "" without one.

    tls: of its own port; towards the router, which is on this machine, it speaks none. keys: of clients; the router
    checks them again.
    """

    address: str = ""
    metrics_address: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    tls: TlsFiles | None = None
    keys: KeyList = field(default_factory=KeyList)

    def to_json(self) -> str:
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "GatewayConfig":
        """Raises ConfigError."""
        return from_json(cls, text, "gateway")
