"""The processes at the other ends of a Unix socket, each watched until its death."""

import asyncio
import os
import socket
import struct
from collections.abc import Callable

_CREDENTIALS = struct.Struct("iII")


class PeerProcess:
    """A process with all its connections. `own` makes a name of its writers and readers unique to it."""

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
    """A watch over processes; calls `on_death`, on the loop, for each that has ended and so writes no more."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_death: Callable[[PeerProcess], None]) -> None:
        self._loop = loop
        self._on_death = on_death
        self._by_pid: dict[int, PeerProcess] = {}
        self._num_met = 0

    def of(self, connection: socket.socket) -> PeerProcess:
        """Finds the process at the other end. ProcessLookupError if it has ended already."""
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
