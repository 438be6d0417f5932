"""Certificates of the clients' ports, read from files, and again at the first connection after a change."""

import logging
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from wire.errors import ConfigError
from wire.trust.identity import load_pair

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files: a port's certificate chain, its key, and the authority of its clients.

    client_ca: with it, each client must show a certificate of that authority.
    """

    certificate: str
    key: str
    client_ca: str | None = None

    def stamps(self) -> tuple[object, ...]:
        """Returns stamps of the files, which differ after a change. Raises OSError."""
        found = [os.stat(path) for path in (self.certificate, self.key, self.client_ca) if path is not None]
        return tuple((one.st_mtime_ns, one.st_ino, one.st_size) for one in found)


@dataclass(frozen=True)
class Pems:
    """The contents of the files."""

    certificate: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None

    @classmethod
    def read(cls, files: TlsFiles) -> "Pems":
        """Reads the files. Raises OSError."""
        authority = None if files.client_ca is None else Path(files.client_ca).read_bytes()
        return cls(Path(files.certificate).read_bytes(), Path(files.key).read_bytes(), authority)

    def context(self) -> ssl.SSLContext:
        """Returns a server's TLS context. Raises OSError or ValueError for contents that are no PEM, or no pair."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        load_pair(context, self.key + b"\n" + self.certificate)
        if self.client_ca is not None:
            context.load_verify_locations(cadata=self.client_ca.decode("ascii"))
            context.verify_mode = ssl.CERT_REQUIRED
            # A resumed session would show no certificate, and outlive its authority.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
        return context


class Certificates:
    """The certificates in force at one port."""

    def __init__(self, files: TlsFiles) -> None:
        """Loads the files. Raises ConfigError if they cannot be read, or are no certificate with its key."""
        self._files = files
        try:
            self._stamps = files.stamps()
            self.pems = Pems.read(files)
            self.context = self.pems.context()
        except (OSError, ValueError) as error:
            named = ", ".join(path for path in (files.certificate, files.key, files.client_ca) if path is not None)
            raise ConfigError(f"{named}: not a certificate with its key, and an authority, as PEM") from error

    def refresh(self) -> bool:
        """Loads the files again if they have changed and are valid; returns whether it has."""
        try:
            stamps = self._files.stamps()
            if stamps == self._stamps:
                return False
            self._stamps = stamps
            pems = Pems.read(self._files)
            self.context, self.pems = pems.context(), pems
        except (OSError, ValueError):
            log.exception("certificates have changed and cannot be used: the ones before stay in force")
            return False
        log.info("certificates have changed, and are in force")
        return True

    def server_context(self) -> ssl.SSLContext:
        """Returns a context that loads the files, if they have changed, before each handshake."""
        context = self.pems.context()

        def follow(connection: ssl.SSLSocket | ssl.SSLObject, *_: object) -> None:
            self.refresh()
            connection.context = self.context

        context.sni_callback = follow
        return context
