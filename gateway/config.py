"""The configuration of a gateway, as one JSON text. The controller fills it in."""

from dataclasses import dataclass, field

from wire.trust.certificates import TlsFiles
from wire.trust.key_ring import KeyList

LOOPBACK = "127.0.0.1"
OWN_HOSTS = ("localhost", LOOPBACK, "[::1]")


@dataclass(frozen=True)
class GatewayConfig:
    """`address` is the router's public port. Port 0 takes a free one. metrics_address: the router's, "" without one.

    operator_address: of the router's service for the operator, which the page reads.

    name: among the gateways of the cluster. joined_port: that of the others, which this one shares instead of `port`.
    metrics_folder: where each of them leaves its metrics for the others; "" for one alone.
    host_names: that requests may ask for, beside OWN_HOSTS. cors_origins: whose pages may ask, and read answers.
    tls: of its own port; towards the router, which is on this machine, it speaks none. keys: of clients; the router
    checks them again.
    """

    address: str = ""
    metrics_address: str = ""
    operator_address: str = ""
    name: str = "gateway-0"
    host: str = LOOPBACK
    port: int = 0
    joined_port: int | None = None
    metrics_folder: str = ""
    host_names: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    tls: TlsFiles | None = None
    keys: KeyList = field(default_factory=KeyList)

    @property
    def hosts(self) -> frozenset[str] | None:
        """The hosts that a request may name, in lower case; None for any.

        On loopback a page of the web, whose name was made to lead here, could else use the model: it shows that name.
        """
        return frozenset((*OWN_HOSTS, *map(str.lower, self.host_names))) if self.host == LOOPBACK else None
