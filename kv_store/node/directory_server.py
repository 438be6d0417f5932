"""The server of a directory for the processes of its node, over a Unix socket that only this user may use.

Bytes that are no call end their connection only. The death of a process frees its slots and leases; a silent, stopped
or disconnected process keeps them.
"""

import asyncio
import logging
import os
import socket
import stat
import struct
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from kv_store.node.directory import Directory
from kv_store.node.directory_port import CALLS, GREETING, carry_out
from kv_store.node.service import LENGTH, ClientName, RefusedCall, ServiceCall, WaitS, body_len
from wire.errors import ConfigError, StoreError, WireError
from wire.ids import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, agreed_version

_CREDENTIALS = struct.Struct("iII")


class PeerProcess:
    """A process with all its connections. `own` prefixes the names of its writers and readers."""

    def __init__(self, pid: int, nth: int, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_alive = True
        self._id = f"{pid}.{nth}"
        self.names: set[str] = set()

    def own(self, name: str) -> str:
        owned = f"{self._id}/{name}"
        self.names.add(owned)
        return owned


class PeerProcesses:
    """A watch over processes; calls `on_death`, on the loop, for each process that has ended and so writes no more."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_death: Callable[[PeerProcess], None]) -> None:
        self._loop = loop
        self._on_death = on_death
        self._by_pid: dict[int, PeerProcess] = {}
        self._num_met = 0

    def of(self, connection: socket.socket) -> PeerProcess:
        """Finds the process at the other end. Raises ProcessLookupError if it has ended already."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, _, _ = _CREDENTIALS.unpack(credentials)
        return self._by_pid.get(pid) or self._meet(pid)

    def close(self) -> None:
        """Ends all watches."""
        for peer in self._by_pid.values():
            self._forget(peer)
        self._by_pid.clear()

    def _meet(self, pid: int) -> PeerProcess:
        self._num_met += 1
        peer = PeerProcess(pid, self._num_met, os.pidfd_open(pid))
        self._by_pid[pid] = peer
        self._loop.add_reader(peer.descriptor, self._bury, pid)
        return peer

    def _bury(self, pid: int) -> None:
        peer = self._by_pid.pop(pid)
        peer.is_alive = False
        self._forget(peer)
        self._on_death(peer)

    def _forget(self, peer: PeerProcess) -> None:
        self._loop.remove_reader(peer.descriptor)
        os.close(peer.descriptor)


_HELLO_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 5.0
_THREAD_TIMEOUT_S = 5.0
_BACKLOG = 128

log = logging.getLogger(__name__)


class DirectoryServer:
    """The server's thread with its event loop, between `start` and `stop`; it is started once."""

    def __init__(self, directory: Directory, path: str) -> None:
        self._directory = directory
        self._path = path
        self._newest: dict[tuple[PeerProcess, str], int] = {}
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="directory", daemon=True)

    def start(self) -> None:
        """Returns once connections are accepted. Raises ConfigError if another server runs, or the path is unusable."""
        self._listener = _bound(self._path)
        self._thread.start()
        if not self._is_ready.wait(_THREAD_TIMEOUT_S):
            raise StoreError("the directory's server did not start")

    def stop(self) -> None:
        """Ends all connections and removes the socket. The directory itself is unchanged."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._is_stopping.set)
            self._thread.join(_THREAD_TIMEOUT_S)

    async def _serve(self) -> None:
        """Serves until `stop`; the end of the loop ends running conversations."""
        self._loop = asyncio.get_running_loop()
        self._is_stopping = asyncio.Event()
        self._peers = PeerProcesses(self._loop, self._forget)
        server = await asyncio.start_unix_server(self._accept, sock=self._listener, backlog=_BACKLOG)
        self._is_ready.set()
        await self._is_stopping.wait()
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        self._loop.remove_reader(self._listener)
        await asyncio.sleep(0)  # for a connection just accepted: a closed server has no transport for it
        server.close()
        self._peers.close()

    def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(0)  # `drain` waits until the process has all
        task = self._loop.create_task(self._serve_one(reader, writer))
        task.add_done_callback(lambda _: writer.close())

    async def _serve_one(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            await self._converse(self._peers.of(writer.get_extra_info("socket")), reader, writer)
        except (OSError, TimeoutError, EOFError) as error:
            log.debug("a connection has ended: %r", error)
        except WireError as error:
            log.warning("a connection was ended: %s", error)
        except Exception:
            log.exception("a connection was ended by a fault of the directory")

    async def _converse(self, peer: PeerProcess, reader: StreamReader, writer: StreamWriter) -> None:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            version, client_id, number = GREETING.decode_call(await _receive(reader)).arguments
        if agreed_version(version, version) is None:
            spoken = f"{OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}"
            await _send(writer, RefusedCall(f"this directory speaks versions {spoken}, not {version}"))
            return
        client = (peer, client_id)
        self._newest[client] = max(number, self._newest.get(client, 0))
        await _send(writer, self._directory.attach())
        while True:
            call = CALLS.decode_call(await _receive(reader))
            if not peer.is_alive or self._newest[client] != number:
                return  # a call from before a death or a reconnect must not be done after it
            if wait_s := CALLS.wait_s(call.method, call.arguments):
                await self._wait(peer, call, wait_s)
            await _send(writer, self._answer(peer, call))

    async def _wait(self, peer: PeerProcess, call: ServiceCall, wait_s: float) -> None:
        """Waits, on the loop, for the next event of the directory, unless the call has its answer at once."""
        news = asyncio.Event()
        wake = partial(self._loop.call_soon_threadsafe, news.set)
        with self._directory.records.signal.subscribed(wake), suppress(TimeoutError):
            if not self._answer(peer, call):
                async with asyncio.timeout(wait_s):
                    await news.wait()

    def _answer(self, peer: PeerProcess, call: ServiceCall) -> object:
        """Carries out a call at once, with the names of writers and readers prefixed by their process."""
        own: dict[Any, Callable[[Any], object]] = {ClientName: peer.own, WaitS: lambda _: 0.0}
        given = zip(call.hints, call.arguments, strict=True)
        arguments = [own[hint](value) if hint in own else value for hint, value in given]
        try:
            return carry_out(self._directory, call.method, arguments)
        except StoreError as error:
            return RefusedCall(error.message)

    def _forget(self, peer: PeerProcess) -> None:
        for name in peer.names:
            self._directory.writer_died(name)
        self._newest = {client: number for client, number in self._newest.items() if client[0] is not peer}


def _bound(path: str) -> socket.socket:
    """Makes a listening socket that is never open to other users, replacing a dead socket."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    try:
        _remove_stale(path)
        listener.bind(path)
        os.chmod(path, 0o600)
    except BaseException as error:
        listener.close()
        if isinstance(error, OSError):
            raise ConfigError(f"the directory's socket cannot be made: {error.strerror or error}") from error
        raise
    return listener


def _remove_stale(path: str) -> None:
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(path) == 0:
            raise ConfigError("another directory is served at this path")
    os.unlink(path)


async def _receive(reader: StreamReader) -> bytes:
    return await reader.readexactly(body_len(await reader.readexactly(LENGTH.size)))


async def _send(writer: StreamWriter, answer: object) -> None:
    writer.write(CALLS.encode_answer(answer))
    if writer.transport.get_write_buffer_size():
        async with asyncio.timeout(_SEND_TIMEOUT_S):
            await writer.drain()
