"""One client's line to a directory server: a blocking Unix socket, each exchange bounded by a deadline."""

import os
import secrets
import socket
import time
from typing import Any

from kv_store.node.directory_calls import CODEC
from wire.codec import LENGTH, body_len
from wire.directory import DirectoryInfo, Hello, Refused
from wire.errors import WireError
from wire.ids import PROTOCOL_VERSION


class DirectoryConnection:
    """Connects when it has to, and closes after any failure: no answer is ever taken for that to another request."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._start_anew()

    def exchange(self, request: object, deadline: float) -> Any:
        """The answer to a request. OSError or WireError if there was none before `deadline`, on `time.monotonic`."""
        if self._socket is None:
            raise ConnectionError("not connected")
        try:
            return self._exchange(self._socket, CODEC.encode(request), deadline)
        except BaseException:
            self.close()
            raise

    def connect(self, deadline: float) -> DirectoryInfo:
        """Connects if need be, and tells whom to. The server hears only the newest of one client's connections."""
        if self._process != os.getpid():  # a fork must not speak on its parent's line
            self._start_anew()
        if self._socket is None:
            self._socket = self._dial(deadline)
            self._num_connections += 1
            hello = Hello(PROTOCOL_VERSION, self._client_id, self._num_connections)
            answer = self.exchange(hello, deadline)
            self._info = _info_in(answer)
        return self._info

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
            connection.settimeout(_left(deadline))
            connection.connect(self._path)
        except BaseException:
            connection.close()
            raise
        return connection

    def _exchange(self, connection: socket.socket, message: bytes, deadline: float) -> Any:
        connection.settimeout(_left(deadline))
        connection.sendall(message)
        num_bytes = body_len(_receive(connection, LENGTH.size, deadline))
        return CODEC.decode(_receive(connection, num_bytes, deadline))


def _info_in(answer: object) -> DirectoryInfo:
    if isinstance(answer, Refused):
        raise WireError(answer.message)
    if not isinstance(answer, DirectoryInfo):
        raise WireError(f"{type(answer).__name__} in answer to Hello")
    return answer


def _receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    data = bytearray(num_bytes)
    rest = memoryview(data)
    while rest:
        connection.settimeout(_left(deadline))
        num_received = connection.recv_into(rest)
        if num_received == 0:
            raise ConnectionError("the directory has hung up")
        rest = rest[num_received:]
    return bytes(data)


def _left(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the directory took too long")
    return left_s
