"""Serves a directory to the processes of its node, over a Unix socket that only this user may use.

A message that is none ends its connection and nothing else. A process that has ended is forgotten, as a writer and as a
reader; one that is silent, stopped or disconnected keeps its slots.
"""

import asyncio
import logging
import os
import socket
import threading

from kv_store.directory import Directory
from kv_store.directory_calls import CODEC, answer
from kv_store.peer_processes import PeerProcess, PeerProcesses
from wire.codec import LENGTH, body_len
from wire.directory import Failed, Hello
from wire.errors import ConfigError, StoreError, WireError
from wire.ids import PROTOCOL_VERSION

_HELLO_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 5.0
_THREAD_TIMEOUT_S = 5.0
_BACKLOG = 128

log = logging.getLogger(__name__)


class DirectoryServer:
    """One thread with an event loop, between `start` and `stop`; it is started once."""

    def __init__(self, directory: Directory, path: str) -> None:
        self._directory = directory
        self._path = path
        self._newest: dict[tuple[PeerProcess, str], int] = {}
        self._conversations: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="directory", daemon=True)

    def start(self) -> None:
        """Returns when connections are accepted. ConfigError if another server is there, or the path is of no use."""
        self._listener = _listen(self._path)
        self._thread.start()
        if not self._is_ready.wait(_THREAD_TIMEOUT_S):
            raise StoreError("the directory's server did not start")

    def stop(self) -> None:
        """Ends all connections and removes the socket. The directory itself stays as it is."""
        self._loop.call_soon_threadsafe(self._is_stopping.set)
        self._thread.join(_THREAD_TIMEOUT_S)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_stopping = asyncio.Event()
        self._peers = PeerProcesses(self._loop, self._forget)
        server = await asyncio.start_unix_server(self._serve_one, sock=self._listener)
        self._is_ready.set()
        await self._is_stopping.wait()
        os.unlink(self._path)
        server.close()
        await self._hang_up()
        self._peers.close()

    async def _hang_up(self) -> None:
        for writer in self._conversations.values():
            writer.transport.abort()
        if self._conversations:
            await asyncio.wait(self._conversations, timeout=_SEND_TIMEOUT_S)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._conversations[task] = writer
        try:
            peer = self._peers.of(writer.get_extra_info("socket"))
            await self._converse(peer, reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.debug("a connection has ended: %r", error)
        except WireError as error:
            log.warning("a connection was ended: %s", error)
        finally:
            writer.close()
            del self._conversations[task]

    async def _converse(self, peer: PeerProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            hello = await _receive(reader)
        if not isinstance(hello, Hello) or hello.protocol_version != PROTOCOL_VERSION:
            await _send(writer, Failed(f"this directory speaks version {PROTOCOL_VERSION}"))
            return
        client = (peer, hello.client_id)
        self._newest[client] = max(hello.connection, self._newest.get(client, 0))
        await _send(writer, self._directory.info())
        while True:
            request = await _receive(reader)
            if not peer.is_alive or self._newest[client] != hello.connection:
                return  # what was sent before a death or a reconnect must not be done after it
            await _send(writer, self._answer(peer, request))

    def _answer(self, peer: PeerProcess, request: object) -> object:
        try:
            return answer(self._directory, request, peer.own)
        except StoreError as error:
            return Failed(error.message)

    def _forget(self, peer: PeerProcess) -> None:
        for name in peer.names:
            self._directory.writer_died(name)
        self._newest = {client: number for client, number in self._newest.items() if client[0] is not peer}


def _listen(path: str) -> socket.socket:
    """A listening socket that is never open to others, in the place of one that nobody serves any more."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"the directory's socket cannot be made: {error}") from error
    return listener


def _remove_stale(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except FileNotFoundError:
            return
        else:
            raise ConfigError("another directory is served at this path")


async def _receive(reader: asyncio.StreamReader) -> object:
    length = await reader.readexactly(LENGTH.size)
    return CODEC.decode(await reader.readexactly(body_len(length)))


async def _send(writer: asyncio.StreamWriter, message: object) -> None:
    writer.write(CODEC.encode(message))
    async with asyncio.timeout(_SEND_TIMEOUT_S):
        await writer.drain()
