"""The cluster's certificate authority: a key, and a certificate for each process that other nodes speak to."""

import datetime
import ipaddress
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from wire.trust.identity import Identity

NAME = "baton"
VALID_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
VALID_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""For ever (RFC 5280, 4.1.2.5): keys end with their cluster, and clocks of nodes may be wrong."""


@dataclass(frozen=True)
class Authority:
    """The key and the certificate by which a cluster's processes prove themselves to one another, as PEM."""

    key_pem: str = field(repr=False)
    certificate_pem: str

    @classmethod
    def make(cls) -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        own = _certificate(NAME, NAME, key.public_key()).add_extension(x509.BasicConstraints(True, 0), critical=True)
        return cls(_pem_of(key), own.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode())

    def issue(self, name: str, host: str) -> Identity:
        """Draws a key for a process, and certifies the process's name and host."""
        key, own_key = ec.generate_private_key(ec.SECP256R1()), load_pem_private_key(self.key_pem.encode(), None)
        names = x509.SubjectAlternativeName([x509.DNSName(name), _name_of(host)])
        unsigned = _certificate(name, NAME, key.public_key()).add_extension(names, critical=False)
        assert isinstance(own_key, ec.EllipticCurvePrivateKey)
        certificate = unsigned.sign(own_key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()
        return Identity(_pem_of(key), certificate, self.certificate_pem)


def _certificate(subject: str, issuer: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    return x509.CertificateBuilder(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]),
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]),
        key,
        x509.random_serial_number(),
        VALID_FROM,
        VALID_UNTIL,
    )


def _name_of(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem_of(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
