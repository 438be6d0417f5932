"""The command line's side of gRPC: finds a cluster by its state, and calls its router."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import grpc
from google.protobuf.message import Message

from baton.request import API_KEY, typed_errors
from baton.routers import RECONNECT_OPTIONS
from deploy.local import run_dir
from deploy.local.state import ClusterPhase, ClusterState, StateFile, command_line
from wire.errors import BatonError, RequestNotFound, Unauthenticated, Unavailable, Unreachable, WorkerNotFound
from wire.pb.cluster_pb2_grpc import ClusterStub
from wire.rpc import CHANNEL_OPTIONS, NO_PROXY, TOKEN_METADATA

CONNECT_TIMEOUT_S = 5.0


def known_cluster(name: str) -> ClusterState:
    """Returns the state of a cluster, whether it serves or not. Raises Unavailable, with advice, if there is none."""
    state = StateFile(name).read()
    if state is None:
        raise Unavailable(f"no cluster named {name} is running: start one with `{command_line('up', name)}`")
    return state


def find_cluster(name: str) -> ClusterState:
    """Returns the state of a cluster that serves. Raises Unavailable, with advice, if there is none."""
    state = known_cluster(name)
    if state.phase is ClusterPhase.STARTING:
        what = "is still starting" if state.command.is_alive else f"has not come up: {_anew(name)}"
        raise Unavailable(f"the cluster {name} {what}")
    if (crash := state.crash) is not None:
        raise _crashed(name, crash)
    if (lost := state.lost_folder) is not None:
        problem = f"{lost} was removed, so that nothing that dies is replaced"
        raise Unavailable(f"the cluster {name} cannot go on: {problem}: {_anew(name)}")
    return state


@contextmanager
def explained(state: ClusterState) -> Iterator[None]:
    """Adds advice to the Unavailable and Unauthenticated of calls within. Raises BatonError."""
    try:
        yield
    except Unauthenticated as error:
        create = command_line("key create --tenant NAME", state.name)
        raise Unauthenticated(f"this cluster wants a key in {API_KEY}: `{create}` prints one") from error
    except Unavailable as error:
        failure = error.__cause__
        if (crash := state.crash) is not None or not state.is_alive:
            raise _crashed(state.name, crash) from failure
        if isinstance(failure, grpc.RpcError) and not cast(grpc.Call, failure).trailing_metadata():  # no server's word
            if state.head is None and (problem := connection_problem(state.ray_address)) is not None:
                gone = f"(no Ray cluster answers at {state.ray_address}: {problem})"
                raise _crashed(state.name, gone) from failure
            logs = run_dir.ray_logs(Path(state.run_dir)) if state.head else "the logs of its Ray"
            raise Unavailable(
                f"the router went away or is not back yet ({error.message}): ask again in a moment, or see {logs}"
            ) from failure
        raise


def call_operator(state: ClusterState, method: str, request: Message, timeout_s: float) -> Any:
    """Calls a method of the operator's service, and blocks until its answer. Raises BatonError.

    Asks one router after another, until one answers and knows the request or worker that is named. A router that is
    stopped takes no connection, and costs the 2 s of RECONNECT_OPTIONS.
    """
    *others, last = state.addresses.operator.split(",")
    with explained(state):
        for address in others:
            with suppress(Unreachable, RequestNotFound, WorkerNotFound):
                return _call(state, address, method, request, timeout_s, RECONNECT_OPTIONS)
        return _call(state, last, method, request, timeout_s)


def call_each(state: ClusterState, method: str, request: Message, timeout_s: float) -> dict[str, Any]:
    """Calls a method of each router's service; returns the answers by address, None for a router that gives none."""
    answers: dict[str, Any] = {}
    for address in state.addresses.operator.split(","):
        answers[address] = None
        with suppress(BatonError):
            answers[address] = _call(state, address, method, request, timeout_s, RECONNECT_OPTIONS)
    return answers


def _call(
    state: ClusterState,
    address: str,
    method: str,
    request: Message,
    timeout_s: float,
    options: tuple[tuple[str, int], ...] = (),
) -> Any:
    channel = grpc.insecure_channel(address, options=(*CHANNEL_OPTIONS, *NO_PROXY, *options))
    with typed_errors(timeout_s), channel:
        call = getattr(ClusterStub(channel), method)
        return call(request, metadata=((TOKEN_METADATA, state.token),), timeout=timeout_s)


def connection_problem(address: str) -> str | None:
    """Returns the reason if nothing answers at HOST:PORT, within seconds; else, and for `auto`, None."""
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdigit():
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _crashed(name: str, crash: str | None) -> Unavailable:
    return Unavailable(f"the cluster {name} crashed{f' {crash}' if crash else ''}: {_anew(name)}")


def _anew(name: str) -> str:
    return f"`{command_line('down', name)}` cleans up, `{command_line('up', name)}` starts anew"
