"""Blocks between nodes: a node's arena, read over TCP from slot to slot.

    reader ◀─ Handshake ─────────────────────▶ server    ends here for a wrong proof
           ◀─ payload_bytes (u64) ────────────
    then, as often as wanted:
           ── verb (u8), count (u32), keys ──▶
           EXISTS ◀─ one byte a key
           DELETE ◀─ one byte
           READ   ◀─ for each key 1, checksum and payload; 0 for the first that is missing, and the end

With an identity all of it goes over TLS, where both show a certificate of the cluster. A request is also the flow
control: the reader asks for blocks that it has room for, and the server buffers only in the socket. Every wait is
bounded.
"""

import logging
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from kv_store.connection import receive_exactly
from kv_store.mapped_arena import leased
from kv_store.node.arena import Arena
from kv_store.node.directory_port import DirectoryPort
from wire.errors import StoreError
from wire.ids import BlockKey
from wire.trust.identity import NONCE_BYTES, PROOF_BYTES, Handshake, Identity, is_equal

MAX_KEYS = 4096
KEY_BYTES = 32
MAX_CONNECTIONS = 256
READER = "block-port"
LEASE_TTL_S = 5.0
REQUEST = struct.Struct("<BI")
SIZE = struct.Struct("<Q")
EXISTS, READ, DELETE = 1, 2, 3
HERE, MISSING = b"\1", b"\0"
_ACCEPT_PAUSE_S = 0.1
_IDLE_TIMEOUT_S = 60.0
_STALL_TIMEOUT_S = 5.0
_LEASE_TTL_PER_BLOCK_S = 0.05
_JOINED_BYTES = 8 << 10
"""Bytes of a payload that are sent together with the bytes before it: in one packet, and in one TLS record."""

log = logging.getLogger(__name__)


class BlockServer:
    """The server of an arena's blocks, between `start` and `stop`, with a thread a connection.

    stall_timeout_s: bounds the wait for each part of a request, and for a reader to take part of an answer.
    """

    def __init__(
        self,
        directory: DirectoryPort,
        arena: Arena,
        payload_bytes: int,
        token: bytes,
        identity: Identity | None = None,
        stall_timeout_s: float = _STALL_TIMEOUT_S,
    ) -> None:
        self._directory = directory
        self._arena = arena
        self._payload_bytes = payload_bytes
        self._handshake = handshake(token)
        self._tls = identity.server_context() if identity else None
        self._stall_timeout_s = stall_timeout_s
        self._readers: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._accept, name="block-port", daemon=True)

    def start(self, host: str, port: int = 0) -> str:
        """Listens; returns the address. Raises OSError."""
        listener = socket.create_server((host, port), backlog=MAX_CONNECTIONS)
        # A handshake takes as long as its client likes: it is made by the thread of its connection.
        self._listener = self._tls.wrap_socket(listener, True, False) if self._tls else listener
        self._thread.start()
        return "{}:{}".format(*self._listener.getsockname()[:2])

    def stop(self) -> None:
        """Ends all connections and their leases."""
        self._is_stopping = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._thread.join(_STALL_TIMEOUT_S)
        with self._lock:
            readers = dict(self._readers)
        for connection in readers:
            with suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)  # that of TLS would go on in plain words
        for reader in readers.values():
            reader.join(_STALL_TIMEOUT_S)

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    def _accept(self) -> None:
        while not self._is_stopping:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._is_stopping:
                    log.warning("a connection to the block port could not be accepted: %s", error)
                    time.sleep(_ACCEPT_PAUSE_S)  # such as too many open files
                continue
            reader = threading.Thread(target=self._serve, args=[connection], name="block-reader", daemon=True)
            with self._lock:
                if len(self._readers) >= MAX_CONNECTIONS:
                    connection.close()
                    continue
                self._readers[connection] = reader
                try:
                    reader.start()
                except RuntimeError as error:  # no thread can be had
                    log.warning("a connection to the block port could not be served: %s", error)
                    del self._readers[connection]
                    connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            prepare(connection, self._stall_timeout_s)
            self._greet(connection)
            while not self._is_stopping:
                self._answer(connection)
        except (OSError, StoreError) as error:
            log.debug("a connection to the block port has ended: %r", error)
        finally:
            connection.close()
            with self._lock:
                del self._readers[connection]

    def _greet(self, connection: socket.socket) -> None:
        answer, wanted = self._handshake.answer(receive(connection, NONCE_BYTES))
        connection.sendall(answer)
        if not is_equal(receive(connection, PROOF_BYTES), wanted):
            raise StoreError("a reader of the block port does not know the token")
        connection.sendall(SIZE.pack(self._payload_bytes))

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_IDLE_TIMEOUT_S)
        verb, count = REQUEST.unpack(receive(connection, REQUEST.size))
        connection.settimeout(self._stall_timeout_s)
        if verb not in (EXISTS, READ, DELETE) or not 0 < count <= MAX_KEYS:
            raise StoreError("no request of a reader")
        data = receive(connection, count * KEY_BYTES)
        keys = [BlockKey(data[at : at + KEY_BYTES]) for at in range(0, len(data), KEY_BYTES)]
        if verb == EXISTS:
            connection.sendall(bytes(self._directory.records.exists(keys)))
        elif verb == DELETE:
            self._directory.delete(keys)
            connection.sendall(HERE)
        else:
            self._send_blocks(connection, keys)

    def _send_blocks(self, connection: socket.socket, keys: Sequence[BlockKey]) -> None:
        """Sends blocks directly from their slots, under a lease; the checksum shows the reader a lease that expired."""
        with leased(self._directory, READER, keys, LEASE_TTL_S + _LEASE_TTL_PER_BLOCK_S * len(keys)) as blocks:
            for entry in blocks.entries:
                if entry is None:
                    connection.sendall(MISSING)
                    return
                _send(connection, HERE + entry.checksum, self._arena.slot(entry.slot)[: self._payload_bytes])


def handshake(token: bytes) -> Handshake:
    return Handshake(token, client=b"reader", server=b"server")


def prepare(connection: socket.socket, timeout_s: float) -> None:
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if isinstance(connection, ssl.SSLSocket):
        connection.do_handshake()


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    return bytes(receive_into(connection, memoryview(bytearray(num_bytes))))


def receive_into(connection: socket.socket, into: memoryview) -> memoryview:
    """Fills `into` within the connection's timeout for the whole."""
    deadline = time.monotonic() + (connection.gettimeout() or 0.0)

    def receive_some(left: memoryview) -> int:
        num_received = connection.recv_into(left)
        if num_received < len(left) and time.monotonic() > deadline:
            raise TimeoutError("the other side sends too slowly")
        return num_received

    return receive_exactly(receive_some, into)


def _send(connection: socket.socket, front: bytes, payload: memoryview) -> None:
    connection.sendall(front + payload[:_JOINED_BYTES])
    connection.sendall(payload[_JOINED_BYTES:])
