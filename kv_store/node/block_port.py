"""Blocks between nodes: a node's arena, read over TCP from slot to slot.

    reader ── nonce ─────────────────────────────────▶ server
           ◀─ nonce, HMAC(token, "server", nonces) ──
           ── HMAC(token, "reader", nonces) ─────────▶
           ◀─ payload_bytes (u64) ────────────────────  nothing, and the end, for a wrong proof
    then, as often as wanted:
           ── verb (u8), count (u32), keys ──────────▶
           EXISTS ◀─ one byte a key
           FORGET ◀─ one byte
           READ   ◀─ for each key 1, xxh3-128 and payload; 0 for the first that is missing, and the end

Both sides prove that they know the cluster's token and never send it. With an identity all of it goes over TLS, where
both show a certificate of the cluster. A request is also its credit: the reader asks for the blocks that it has room
for, and the server keeps nothing but what the socket holds. Every wait is bounded.
"""

import logging
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress

from kv_store.breaker import Breaker
from kv_store.frame import CHECKSUM_BYTES, checksum_of
from kv_store.node.arena import Arena
from kv_store.node.directory_port import DirectoryPort
from wire.errors import StoreError
from wire.ids import BlockKey
from wire.keys import BlockName
from wire.tier import ColdStatus, Tier
from wire.trust.identity import NONCE_BYTES, PROOF_BYTES, Identity, is_proven, prove

MAX_KEYS = 4096
KEY_BYTES = 32
MAX_CONNECTIONS = 256
_ACCEPT_PAUSE_S = 0.1
_IDLE_TIMEOUT_S = 60.0
_STALL_TIMEOUT_S = 5.0
_LEASE_TTL_S = 5.0
_LEASE_TTL_PER_BLOCK_S = 0.05
_READER = "block-port"
_JOINED_BYTES = 8 << 10
"""Of a payload, sent together with what stands before it: in one packet, and in one record of TLS."""
_REQUEST = struct.Struct("<BI")
_SIZE = struct.Struct("<Q")
_EXISTS, _READ, _FORGET = 1, 2, 3
_HERE, _MISSING = b"\1", b"\0"

log = logging.getLogger(__name__)


class BlockServer:
    """Serves the blocks of an arena between `start` and `stop`, with a thread a connection.

    stall_timeout_s: for each part of a request to come, and for a reader to take something of an answer.
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
        self._token = token
        self._tls = identity.server_context() if identity else None
        self._stall_timeout_s = stall_timeout_s
        self._readers: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._accept, name="block-port", daemon=True)

    def start(self, host: str, port: int = 0) -> str:
        """Listens, and returns the address. OSError if that cannot be."""
        listener = socket.create_server((host, port), backlog=MAX_CONNECTIONS)
        # A handshake takes as long as its client likes: it is made by the thread of its connection.
        self._listener = self._tls.wrap_socket(listener, True, False) if self._tls else listener
        self._thread.start()
        return "{}:{}".format(*self._listener.getsockname()[:2])

    def stop(self) -> None:
        """Ends all connections, and the leases with them."""
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
            _prepare(connection, self._stall_timeout_s)
            _greet_reader(connection, self._token, self._payload_bytes)
            while not self._is_stopping:
                self._answer(connection)
        except (OSError, StoreError) as error:
            log.debug("a connection to the block port has ended: %r", error)
        finally:
            connection.close()
            with self._lock:
                del self._readers[connection]

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_IDLE_TIMEOUT_S)
        verb, count = _REQUEST.unpack(_receive(connection, _REQUEST.size))
        connection.settimeout(self._stall_timeout_s)
        if verb not in (_EXISTS, _READ, _FORGET) or not 0 < count <= MAX_KEYS:
            raise StoreError("no request of a reader")
        data = _receive(connection, count * KEY_BYTES)
        keys = [BlockKey(data[at : at + KEY_BYTES]) for at in range(0, len(data), KEY_BYTES)]
        if verb == _EXISTS:
            connection.sendall(bytes(self._directory.exists(keys)))
        elif verb == _FORGET:
            self._directory.forget(keys)
            connection.sendall(_HERE)
        else:
            self._send_blocks(connection, keys)

    def _send_blocks(self, connection: socket.socket, keys: Sequence[BlockKey]) -> None:
        """Sends blocks straight from their slots, under a lease. By the checksum the reader sees if it ran out."""
        lease = self._directory.lease(_READER, keys, _LEASE_TTL_S + _LEASE_TTL_PER_BLOCK_S * len(keys))
        try:
            for entry in lease.entries:
                if entry is None:
                    connection.sendall(_MISSING)
                    return
                _send(connection, _HERE + entry.checksum, self._arena.slot(entry.slot)[: self._payload_bytes])
        finally:
            self._directory.release(lease.lease_id)


class BlockReader:
    """A BlockSource over the block port of one node. A fault ends the connection. For one thread, but for `status`.

    A node that has failed three times in a row is asked again only every two seconds. timeout_s: for the connection to
    be made, and for each block to come.
    """

    tier = Tier.PEERS

    def __init__(
        self,
        address: str,
        payload_bytes: int,
        token: bytes,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        identity: Identity | None = None,
    ) -> None:
        self._counted = Counter[str]()
        self._address = address
        self._payload_bytes = payload_bytes
        self._token = token
        self._tls = identity.client_context() if identity else None
        self._timeout_s = timeout_s
        self._breaker = Breaker(clock)
        self._connection: socket.socket | None = None

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Tells for each key whether its block is in the node's arena."""
        found = [False] * len(keys)
        with suppress(_Unanswered):
            for start in range(0, len(keys), MAX_KEYS):
                asked = keys[start : start + MAX_KEYS]
                with self._asking(_EXISTS, asked) as connection:
                    found[start : start + len(asked)] = map(bool, _receive(connection, len(asked)))
        return found

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Makes blocks unfindable in the node's arena."""
        with suppress(_Unanswered):
            for start in range(0, len(keys), MAX_KEYS):
                with self._asking(_FORGET, keys[start : start + MAX_KEYS]) as connection:
                    _receive(connection, len(_HERE))

    def get(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> Generator[bytes, None, None]:
        """Fills a payload of `into` for each block, and yields its checksum once it is verified.

        Ends at the first block that is missing or spoilt, or at a fault.
        """
        with suppress(_Unanswered):
            for start in range(0, len(names), MAX_KEYS):
                asked = [name.key for name in names[start : start + MAX_KEYS]]
                with self._asking(_READ, asked) as connection:
                    for payload in into[start : start + len(asked)]:
                        if _receive(connection, 1) != _HERE:
                            self._counted["misses"] += 1
                            return
                        checksum = _receive(connection, CHECKSUM_BYTES)
                        _receive_into(connection, payload)
                        if checksum_of(payload) != checksum:
                            self._counted["corrupt"] += 1
                            raise _Unanswered("a block came spoilt")
                        self._counted["hits"] += 1
                        yield checksum

    def status(self) -> ColdStatus:
        return ColdStatus(self.tier, "broken" if self._breaker.is_open else "up", **self._counted)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _asking(self, verb: int, keys: Sequence[BlockKey]) -> Iterator[socket.socket]:
        """Sends a request. The connection is kept if the body returns, for it has then read the whole answer."""
        if not self._breaker.allows():
            raise _Unanswered("the node is left alone for now")
        if self._connection is not None and _has_ended(self._connection):
            self.close()
        connection, self._connection = self._connection, None
        try:
            connection = connection or self._connect()
            connection.sendall(_REQUEST.pack(verb, len(keys)) + b"".join(keys))
            yield connection
        except (OSError, StoreError) as error:
            self._breaker.failed()
            self._counted["errors"] += 1
            log.warning("node at %s does not answer: %s", self._address, error)
            raise _Unanswered(str(error)) from error
        else:
            self._breaker.succeeded()
            self._connection = connection
        finally:
            if connection is not None and self._connection is not connection:
                connection.close()

    def _connect(self) -> socket.socket:
        host, _, port = self._address.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), self._timeout_s)
        except (ValueError, OverflowError) as error:
            raise StoreError(f"{self._address!r} is no address") from error
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, do_handshake_on_connect=False, server_hostname=host)
            _prepare(connection, self._timeout_s)
            _greet_server(connection, self._token, self._payload_bytes)
        except BaseException:
            connection.close()
            raise
        return connection


class LocalBlocks:
    """The reader's twin: the blocks of an arena and directory in this process."""

    tier = Tier.PEERS

    def __init__(self, directory: DirectoryPort, arena: Arena, payload_bytes: int) -> None:
        self._directory = directory
        self._arena = arena
        self._payload_bytes = payload_bytes
        self._counted = Counter[str]()

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._directory.exists(keys)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._directory.forget(keys)

    def get(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> Generator[bytes, None, None]:
        lease = self._directory.lease(_READER, [name.key for name in names], _LEASE_TTL_S)
        try:
            for entry, payload in zip(lease.entries, into, strict=True):
                if entry is None:
                    self._counted["misses"] += 1
                    return
                payload[:] = self._arena.slot(entry.slot)[: self._payload_bytes]
                if checksum_of(payload) != entry.checksum:
                    self._counted["corrupt"] += 1
                    return
                self._counted["hits"] += 1
                yield entry.checksum
        finally:
            self._directory.release(lease.lease_id)

    def status(self) -> ColdStatus:
        return ColdStatus(self.tier, "up", **self._counted)

    def close(self) -> None:
        pass


class _Unanswered(StoreError):
    """A request had no whole answer."""


def _has_ended(connection: socket.socket) -> bool:
    """Tells whether the server has ended a connection on which it owes nothing."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _prepare(connection: socket.socket, timeout_s: float) -> None:
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if isinstance(connection, ssl.SSLSocket):
        connection.do_handshake()


def _greet_reader(connection: socket.socket, token: bytes, payload_bytes: int) -> None:
    """Raises StoreError for a reader that does not know the token."""
    theirs, ours = _receive(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours + prove(token, b"server", theirs, ours))
    if not is_proven(_receive(connection, PROOF_BYTES), token, b"reader", theirs, ours):
        raise StoreError("a reader of the block port does not know the token")
    connection.sendall(_SIZE.pack(payload_bytes))


def _greet_server(connection: socket.socket, token: bytes, payload_bytes: int) -> None:
    """Raises StoreError for a server that does not know the token, or has blocks of another size."""
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours)
    theirs = _receive(connection, NONCE_BYTES)
    if not is_proven(_receive(connection, PROOF_BYTES), token, b"server", ours, theirs):
        raise StoreError("it does not know the cluster's token")
    connection.sendall(prove(token, b"reader", ours, theirs))
    if _SIZE.unpack(_receive(connection, _SIZE.size)) != (payload_bytes,):
        raise StoreError("its blocks have another size")


def _send(connection: socket.socket, front: bytes, payload: memoryview) -> None:
    connection.sendall(front + payload[:_JOINED_BYTES])
    connection.sendall(payload[_JOINED_BYTES:])


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    _receive_into(connection, memoryview(data))
    return bytes(data)


def _receive_into(connection: socket.socket, rest: memoryview) -> None:
    """Fills `rest` within the connection's timeout, however many bytes come at a time."""
    timeout_s = connection.gettimeout()
    deadline = time.monotonic() + (timeout_s or 0.0)
    while rest:
        num_received = connection.recv_into(rest)
        if not num_received:
            raise ConnectionError("the other side has hung up")
        rest = rest[num_received:]
        if rest and time.monotonic() > deadline:
            raise TimeoutError("the other side sends too slowly")
