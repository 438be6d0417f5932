"""The client of a node's directory, over a Unix socket."""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kv_store.connection import Breaker, receive_exactly
from kv_store.node.directory_port import CALLS, CALLS_OF_ANY_EPOCH, GREETING, DirectoryPort, EpochChanged
from kv_store.node.messages import DirectoryInfo
from kv_store.node.service import LENGTH, RefusedCall, ServiceCodec, body_len
from wire.errors import StoreError, WireError
from wire.ids import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION


class DirectoryClient(DirectoryPort):
    """A DirectoryPort over a socket. Thread-safe; each call ends within `timeout_s`, plus its wait for events.

    A failed call is not repeated; the next call reconnects. After three failures in a row calls fail at once, except a
    probe every two seconds. A wait for events has a separate connection, and delays no other call.
    """

    def __init__(self, path: str, timeout_s: float = 2.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel = _Channel(path, clock)
        self._event_channel = _Channel(path, clock)
        self._timeout_s = timeout_s
        self._epoch: str | None = None

    def close(self) -> None:
        """Closes the connections; the connection for events after the running wait."""
        for channel in (self._channel, self._event_channel):
            with channel.lock:
                channel.close()

    def attach(self) -> DirectoryInfo:
        with self._channel.connected(self._timeout_s) as (info, _):
            self._epoch = info.epoch
            return info

    def _ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        wait_s = CALLS.wait_s(method, arguments)
        channel = self._channel if wait_s is None else self._event_channel
        with channel.connected(self._timeout_s + (wait_s or 0.0)) as (info, deadline):
            self._epoch = self._epoch or info.epoch
            is_meant = info.epoch == self._epoch or method in CALLS_OF_ANY_EPOCH
            answer = channel.exchange(CALLS, method, arguments, deadline) if is_meant else None
        if answer is None:
            raise EpochChanged("the directory has restarted")
        if isinstance(answer, RefusedCall):
            raise StoreError(answer.message)
        return answer


class _Channel:
    """A blocking Unix socket for one call at a time, connected on demand.

    It closes after any failure, so that no answer goes to another call. Deadlines are by `clock`.
    """

    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._breaker = Breaker(clock)
        self._socket: socket.socket | None = None
        self.lock = threading.Lock()
        self._start_anew()

    @contextmanager
    def connected(self, timeout_s: float) -> Iterator[tuple[DirectoryInfo, float]]:
        """Yields the directory's description and the deadline. Raises StoreError for any failure on the connection."""
        deadline = self._clock() + timeout_s
        if not self.lock.acquire(timeout=timeout_s):
            raise StoreError("too many calls to the directory")
        try:
            if not self._breaker.allows():
                raise StoreError("the directory is left alone for now")
            yield self.connect(deadline), deadline
            self._breaker.succeeded()
        except (OSError, WireError) as error:
            self._breaker.failed()
            self.close()
            raise StoreError(f"the directory does not answer: {error}") from error
        finally:
            self.lock.release()

    def connect(self, deadline: float) -> DirectoryInfo:
        """Connects if needed. The server serves only a client's newest connection."""
        if self._process != os.getpid():  # a fork must not use its parent's connection
            self._start_anew()
        if self._socket is None:
            self._info = self._greet(deadline)
        return self._info

    def _greet(self, deadline: float) -> DirectoryInfo:
        """Connects with the newest version that both sides speak. Raises WireError without a common version."""
        refusal = ""
        for version in range(PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION - 1, -1):
            self._socket = self._dial(deadline)
            self._num_connections += 1
            hello = (version, self._client_id, self._num_connections)
            answer: DirectoryInfo | RefusedCall = self.exchange(GREETING, "hello", hello, deadline)
            if not isinstance(answer, RefusedCall):
                return answer
            refusal = answer.message
            self.close()  # a directory hangs up after a refusal
        raise WireError(refusal)

    def exchange(self, codec: ServiceCodec, method: str, arguments: tuple[Any, ...], deadline: float) -> Any:
        """Sends a call; returns its answer or a `RefusedCall`. Raises OSError or WireError if none comes in time."""
        if self._socket is None:
            raise ConnectionError("not connected")
        try:
            self._socket.settimeout(self._left(deadline))
            self._socket.sendall(codec.encode_call(method, arguments))
            num_bytes = body_len(self._receive(self._socket, LENGTH.size, deadline))
            return codec.decode_answer(method, self._receive(self._socket, num_bytes, deadline))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _start_anew(self) -> None:
        self.close()
        self._process = os.getpid()
        self._client_id = secrets.token_hex(8)
        self._num_connections = 0

    def _dial(self, deadline: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self._left(deadline))
            connection.connect(self._path)
        except BaseException:
            connection.close()
            raise
        return connection

    def _receive(self, connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
        def receive_some(left: memoryview) -> int:
            connection.settimeout(self._left(deadline))
            return connection.recv_into(left)

        return bytes(receive_exactly(receive_some, memoryview(bytearray(num_bytes))))

    def _left(self, deadline: float) -> float:
        left_s = deadline - self._clock()
        if left_s <= 0:
            raise TimeoutError("the directory took too long")
        return left_s
