"""A cluster without Ray: its head forks the controller and the actors, each a process of its own.

    ForkHost, in the controller ──▶ ForkHead: forks and kills actors, and starts the controller again
              └── a connection for each call ──▶ an actor's socket: its ActorShell; the controller's: the Controller

What RayHost decides stays as it is: ForkHost has its calls, answers and failures, and other processes below. An actor
that is killed is dead at once, and one that is stopped is silent. All of them end with the head, as Ray's do.
"""

import asyncio
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray.exceptions import RayActorError, RayTaskError

from deploy.actors.liveness import Liveness
from deploy.actors.ray_host import ActorShell, RayHost
from deploy.controller.controller import Controller
from deploy.deadlines import STOP_S
from deploy.local import run_dir
from deploy.plan.cluster_plan import CONTROLLER
from deploy.plan.machine import RayNode, Resources
from tests.harness.fork_server import entitle, fork, take_streams
from wire import errors
from wire.errors import BatonError
from wire.pools import Addresses, HeadAnswer
from wire.typed_reader import from_json, to_json

NODE_ID = "f0" * 28
MAX_MESSAGE_BYTES = 1 << 16
LINE_LIMIT = 1 << 26
ASK_TIMEOUT_S = 30.0


class ForkHead:
    """The process that leads a cluster's session. Has one thread, so that it can fork."""

    def __init__(self, folder: Path, line: Connection) -> None:
        self._folder = folder
        self._sockets = _sockets(folder)
        self._logs = run_dir.ray_folder(folder) / "session_1" / "logs"
        for one in (self._sockets, self._logs):
            one.mkdir(parents=True)
        self._line = line
        self._plan_json = ""
        self._actors: dict[str, tuple[int, int]] = {}
        self._may_end = False

    def run(self) -> None:
        """Starts the controller, and does as it is told until the end of this process."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self._sockets / "head"))
            listener.listen(64)
            self._say(HeadAnswer(ray_address="forked"))
            self._plan_json = self._line.recv_bytes().decode()
            self._fork(CONTROLLER, lambda: _serve(self._controller(), self._begin_cluster))
            while True:
                pidfds = {pidfd: name for name, (_, pidfd) in self._actors.items()}
                found, _, _ = select.select([listener.fileno(), *pidfds], [], [])
                for pidfd in pidfds.keys() & found:
                    self._reap(pidfds[pidfd])
                if listener.fileno() in found:
                    self._answer(listener)

    def _answer(self, listener: socket.socket) -> None:
        line, _ = listener.accept()
        with line:
            verb, *arguments = json.loads(line.recv(MAX_MESSAGE_BYTES))
            verbs: dict[str, Any] = {
                "names": self._names,
                "launch": self._launch,
                "kill": self._kill,
                "leave": self._leave,
            }
            with suppress(BrokenPipeError):
                line.send(json.dumps(verbs[verb](*arguments)).encode())

    def _names(self) -> list[str]:
        return list(self._actors)

    def _launch(self, name: str, target: str) -> None:
        if name not in self._actors:
            shell = partial(ForkedShell, name, target, str(self._folder))
            self._fork(name, lambda: _serve(shell), target.partition(":")[2])

    def _kill(self, name: str) -> None:
        if name in self._actors:
            os.kill(self._actors[name][0], signal.SIGKILL)
            self._reap(name)

    def _leave(self) -> None:
        self._may_end = True
        self._kill(CONTROLLER)

    def _reap(self, name: str) -> None:
        pid, pidfd = self._actors.pop(name)
        os.waitpid(pid, 0)
        os.close(pidfd)
        if name == CONTROLLER and not self._may_end:
            self._fork(CONTROLLER, lambda: _serve(self._controller()))

    def _controller(self) -> Callable[[], Any]:
        return partial(Controller, self._plan_json, ForkHost(self._folder))

    async def _begin_cluster(self, controller: Controller) -> None:
        """Starts the cluster in the first controller, and tells `baton up` of it."""
        try:
            self._say(HeadAnswer(addresses=from_json(Addresses, await controller.start(), "addresses")))
        except BatonError as error:
            self._say(HeadAnswer(failure=error.message))

    def _say(self, answer: HeadAnswer) -> None:
        with suppress(OSError):  # `baton up` has ended
            self._line.send_bytes(to_json(answer).encode())

    def _fork(self, name: str, serve: "Callable[[], Callable[[socket.socket], None]]", what: str = "") -> None:
        """Forks an actor. It listens before it is there, so that a call waits for it."""
        path = self._sockets / name
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(128)
            pid = fork(lambda: self._be_actor(name, listener, serve(), what))
        self._actors[name] = pid, os.pidfd_open(pid)

    def _be_actor(self, name: str, listener: socket.socket, serve: Callable[[socket.socket], None], what: str) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(self._logs / f"worker-{name}-{os.getpid()}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        take_streams(nothing, log, log, keep=[listener.fileno(), self._line.fileno()])
        entitle(f"fork::{what or name} {name} {self._folder}")
        found = SimpleNamespace(get_actor=lambda one, _: ForkedHandle(self._folder, one))
        pytest.MonkeyPatch().setattr("router.actor.ray", found)
        serve(listener)


class ForkedShell(ActorShell):
    """An ActorShell that knows its node without Ray."""

    async def where(self) -> str:
        return NODE_ID


class ForkedHandle:
    """A handle of an actor: `handle.METHOD.remote(*arguments)` is awaited, and fails as Ray's does."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = _sockets(folder) / name

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, method))

    async def _call(self, method: str, *arguments: str | int) -> str:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=LINE_LIMIT)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise RayActorError(error_msg="its process has ended") from error
        try:
            writer.write(json.dumps([method, *arguments]).encode() + b"\n")
            line = await reader.readline()
        except ConnectionError:
            line = b""
        finally:
            writer.close()
        if not line:
            raise RayActorError(error_msg="its process has ended")
        answer, failure = json.loads(line)
        if failure is not None:
            raise RayTaskError(method, "", _revived(*failure))
        return str(answer)


class ForkHost(RayHost):
    """An ActorHost over the actors that a ForkHead forks, all on one node."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    @property
    def own_node(self) -> str:
        return NODE_ID

    def names(self) -> list[str]:
        return list(_ask_head(self._folder, "names"))

    def adopt(self, name: str) -> bool:
        if name in self.names():
            self._handles[name] = ForkedHandle(self._folder, name)
        return name in self._handles

    async def nodes(self) -> list[RayNode]:
        resources = {"CPU": float(os.cpu_count() or 1), "memory": float(psutil.virtual_memory().total)}
        return [RayNode(NODE_ID, "127.0.0.1", resources, is_head=True)]

    def launch(
        self, name: str, target: str, resources: Resources, node_id: str | None = None, not_on: Sequence[str] = ()
    ) -> None:
        if name not in self._handles:
            _ask_head(self._folder, "launch", name, target)
            self._handles[name] = ForkedHandle(self._folder, name)

    async def end(self, name: str) -> None:
        if name in self._handles:
            if await self.probe(name) is Liveness.ANSWERING:
                with suppress(BatonError):
                    await self.call(name, "stop", timeout_s=STOP_S)
            await asyncio.to_thread(_ask_head, self._folder, "kill", name)
            self._handles.pop(name, None)

    def leave(self) -> None:
        _ask_head(self._folder, "leave")


def _sockets(folder: Path) -> Path:
    return run_dir.ray_folder(folder) / "s"


def _ask_head(folder: Path, *request: str) -> Any:
    """Blocks for milliseconds."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(ASK_TIMEOUT_S)
        line.connect(str(_sockets(folder) / "head"))
        line.send(json.dumps(request).encode())
        return json.loads(line.recv(MAX_MESSAGE_BYTES))


def _serve(make: Callable[[], Any], begin: Any = None) -> Callable[[socket.socket], None]:
    """Returns what an actor's process does: it makes the object, and passes calls on to it.

    begin: a coroutine beside, with the object.
    """

    async def run(listener: socket.socket) -> None:
        served = make()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):  # the caller has given up
                method, *arguments = json.loads(await reader.readline())
                told, failure = None, None
                try:
                    told = await getattr(served, method)(*arguments)
                except BatonError as error:
                    failure = type(error).__name__, error.message, vars(error)
                except Exception as error:
                    failure = "", repr(error), {}
                writer.write(json.dumps((told, failure)).encode() + b"\n")
                await writer.drain()
            writer.close()

        server = await asyncio.start_unix_server(answer, sock=listener, limit=LINE_LIMIT)
        beside = None if begin is None else asyncio.create_task(begin(served))
        async with server:
            await server.serve_forever()
        del beside

    return lambda listener: asyncio.run(run(listener))


def _revived(kind: str, message: str, values: dict[str, Any]) -> Exception:
    if not kind:
        return RuntimeError(message)
    cls: type[BatonError] = getattr(errors, kind)
    error = cls.__new__(cls, message)
    error.__dict__.update(values)
    return error


def main(arguments: Sequence[str]) -> None:
    [folder] = arguments
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    line = Connection(os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    with suppress(EOFError):
        ForkHead(Path(folder), line).run()
    sys.exit(1)
