"""The blocks of another node, read over its block port; `kv_store.peers.block_server` has the protocol."""

import logging
import secrets
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress

from kv_store.connection import Breaker
from kv_store.frame import CHECKSUM_BYTES, checksum_of
from kv_store.mapped_arena import ArenaBlocks
from kv_store.node.arena import Arena
from kv_store.node.directory_port import DirectoryPort
from kv_store.node.messages import Block
from kv_store.peers.block_server import (
    DELETE,
    EXISTS,
    HERE,
    LEASE_TTL_S,
    MAX_KEYS,
    READ,
    READER,
    REQUEST,
    SIZE,
    handshake,
    prepare,
    receive,
    receive_into,
)
from wire.block_names import BlockName
from wire.errors import StoreError, Unauthenticated
from wire.ids import BlockKey
from wire.tier import FarStatus, Tier
from wire.trust.identity import NONCE_BYTES, PROOF_BYTES, Identity

log = logging.getLogger(__name__)


class BlockReader:
    """A BlockSource over a node's block port. A fault ends the connection. For one thread, except `status`.

    A node that has failed three times in a row is asked only every two seconds. timeout_s: bounds the connect, and the
    wait for each block.
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
        self._handshake = handshake(token)
        self._tls = identity.client_context() if identity else None
        self._timeout_s = timeout_s
        self._breaker = Breaker(clock)
        self._connection: socket.socket | None = None

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Returns for each key whether its block is in the node's arena."""
        found = [False] * len(keys)
        with suppress(_Unanswered):
            for start in range(0, len(keys), MAX_KEYS):
                asked = keys[start : start + MAX_KEYS]
                with self._asking(EXISTS, asked) as connection:
                    found[start : start + len(asked)] = map(bool, receive(connection, len(asked)))
        return found

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Unindexes blocks in the node's arena."""
        with suppress(_Unanswered):
            for start in range(0, len(keys), MAX_KEYS):
                with self._asking(DELETE, keys[start : start + MAX_KEYS]) as connection:
                    receive(connection, len(HERE))

    def get(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> Generator[bytes, None, None]:
        """Fills a payload of `into` for each block, and yields its checksum once it is verified.

        Ends at the first missing or damaged block, or at a fault.
        """
        with suppress(_Unanswered):
            for start in range(0, len(names), MAX_KEYS):
                asked = [name.key for name in names[start : start + MAX_KEYS]]
                with self._asking(READ, asked) as connection:
                    for payload in into[start : start + len(asked)]:
                        if receive(connection, 1) != HERE:
                            self._counted["misses"] += 1
                            return
                        checksum = receive(connection, CHECKSUM_BYTES)
                        receive_into(connection, payload)
                        if checksum_of(payload) != checksum:
                            self._counted["corrupt"] += 1
                            raise _Unanswered("a block came spoilt")
                        self._counted["hits"] += 1
                        yield checksum

    def status(self) -> FarStatus:
        return FarStatus(tier=self.tier, state="broken" if self._breaker.is_open else "up", **self._counted)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _asking(self, verb: int, keys: Sequence[BlockKey]) -> Iterator[socket.socket]:
        """Sends a request. Keeps the connection if the body returns, having read the whole answer."""
        if not self._breaker.allows():
            raise _Unanswered("the node is left alone for now")
        if self._connection is not None and _has_ended(self._connection):
            self.close()
        connection, self._connection = self._connection, None
        try:
            connection = connection or self._connect()
            connection.sendall(REQUEST.pack(verb, len(keys)) + b"".join(keys))
            yield connection
        except (OSError, StoreError, Unauthenticated) as error:
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
            prepare(connection, self._timeout_s)
            self._greet(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _greet(self, connection: socket.socket) -> None:
        """Greets the server. Raises Unauthenticated if it lacks the token, StoreError for another block size."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(nonce)
        connection.sendall(self._handshake.reply(nonce, receive(connection, NONCE_BYTES + PROOF_BYTES)))
        if SIZE.unpack(receive(connection, SIZE.size)) != (self._payload_bytes,):
            raise StoreError("its blocks have another size")


class LocalBlocks(ArenaBlocks):
    """The twin of BlockReader: the blocks of an arena and directory in this process, owned by others."""

    tier = Tier.PEERS

    def __init__(self, directory: DirectoryPort, arena: Arena, payload_bytes: int) -> None:
        super().__init__(directory, arena, payload_bytes, READER, LEASE_TTL_S)

    def close(self) -> None:
        pass

    def _reject(self, block: Block) -> None:
        pass


class _Unanswered(StoreError):
    """A request got no complete answer."""


def _has_ended(connection: socket.socket) -> bool:
    """Returns whether the server has closed an idle connection."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))
