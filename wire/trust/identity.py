"""Trust between the processes of a cluster: a certificate for each, and proofs of their common token."""

import hashlib
import hmac
import os
import secrets
import ssl
from dataclasses import dataclass, field

from wire.errors import Unauthenticated

NONCE_BYTES = 16
PROOF_BYTES = 32
ROUTER = "router"
"""The router's name in its certificate."""


@dataclass(frozen=True)
class Identity:
    """The key and the certificate of one process, and the certificate of the cluster's authority, as PEM."""

    key_pem: str = field(repr=False)
    certificate_pem: str
    authority_pem: str

    def server_context(self) -> ssl.SSLContext:
        """Returns a server's TLS context: TLS 1.3, and clients must show a certificate of the cluster's authority."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # connections last
        return context

    def client_context(self) -> ssl.SSLContext:
        """Returns a client's TLS context: the same, and the server's certificate must name its address."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.authority_pem)
        load_pair(context, f"{self.key_pem}{self.certificate_pem}".encode())
        return context


def load_pair(context: ssl.SSLContext, pem: bytes) -> None:
    """Loads a key and its certificates. Raises OSError or ValueError for other or encrypted contents."""
    # OpenSSL takes a key from a file only; a file in memory is no process's but this one's.
    memory = os.memfd_create("identity", os.MFD_CLOEXEC)
    try:
        os.write(memory, pem)
        context.load_cert_chain(f"/proc/self/fd/{memory}", password=lambda: b"")  # else it would ask the terminal
    finally:
        os.close(memory)


def prove(token: bytes, role: bytes, clients_nonce: bytes, servers_nonce: bytes) -> bytes:
    """Computes the proof that a side, `role`, knows the token: its HMAC of both sides' nonces."""
    return hmac.digest(token, role + clients_nonce + servers_nonce, hashlib.sha256)


is_equal = hmac.compare_digest
"""Compares two proofs, in constant time."""


@dataclass(frozen=True)
class Handshake:
    """A mutual proof of the cluster's token, which is never sent. `client` and `server` are names of roles.

    client ── nonce ─────────────────────────────▶ server
           ◀─ nonce, HMAC(token, server, nonces) ──
           ── HMAC(token, client, nonces) ────────▶
    """

    token: bytes = field(repr=False)
    client: bytes
    server: bytes

    def answer(self, clients_nonce: bytes) -> tuple[bytes, bytes]:
        """Makes a server's answer to a nonce; returns it, and the expected proof of the client, for `is_equal`."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        proof, wanted = (prove(self.token, role, clients_nonce, nonce) for role in (self.server, self.client))
        return nonce + proof, wanted

    def reply(self, nonce: bytes, answer: bytes) -> bytes:
        """Returns a client's proof. Raises Unauthenticated if the server's answer does not prove the token."""
        servers_nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not is_equal(proof, prove(self.token, self.server, nonce, servers_nonce)):
            raise Unauthenticated(f"the {self.server.decode()} does not know the cluster's token")
        return prove(self.token, self.client, nonce, servers_nonce)
