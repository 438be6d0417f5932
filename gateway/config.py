"""The configuration of a gateway, as one JSON text. The controller fills it in."""

from dataclasses import dataclass

from wire.settings import from_json, to_json


@dataclass(frozen=True)
class GatewayConfig:
    """`address` is the router's public port. Port 0 takes a free one. metrics_address: the router's, "" without one."""

    address: str = ""
    metrics_address: str = ""
    host: str = "127.0.0.1"
    port: int = 0

    def to_json(self) -> str:
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "GatewayConfig":
        """Raises ConfigError."""
        return from_json(cls, text, "gateway")
