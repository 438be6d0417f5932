"""The configuration of a gateway, as one JSON text. The controller fills it in."""

from dataclasses import dataclass, field

from wire.trust.certificates import TlsFiles
from wire.trust.key_ring import KeyList

LOOPBACK = "127.0.0.1"
OWN_HOSTS = ("localhost", LOOPBACK, "[::1]")


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """The settings of a gateway. `address`: the router's public port. metrics_address: the router's, or "".

    operator_address: the router's operator service, which the page reads. port: 0 takes a free port.

    name: distinguishes the gateways of the cluster. joined_port: a port to share with the other gateways, in place of
    `port`. metrics_folder: the folder in which gateways share their metrics; "" for a single gateway. host_names: hosts
    that requests may name, besides OWN_HOSTS. cors_origins: origins whose pages may ask, and read answers. tls:
    certificate of the gateway's port; the router, on the same machine, is called without TLS. keys: clients' keys; the
    router checks them again.
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

        Protects a gateway on loopback from DNS rebinding: a page of the web would show its own host name.
        """
        return frozenset((*OWN_HOSTS, *map(str.lower, self.host_names))) if self.host == LOOPBACK else None
