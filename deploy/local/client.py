"""The command line's side of gRPC: finds a cluster by its state, asks its router."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from deploy.local.state import ClusterPhase, ClusterState, StateFile
from wire.errors import Unavailable
from wire.pb.cluster_pb2_grpc import ClusterStub
from wire.pb.inference_pb2_grpc import InferenceStub
from wire.rpc import CHANNEL_OPTIONS, TOKEN_METADATA
from wire.rpc_status import from_rpc_error


def find_cluster(name: str) -> ClusterState:
    """The state of a cluster that serves. Raises Unavailable, saying what to do, if there is none."""
    state = StateFile(name).read()
    if state is None:
        raise Unavailable(f"no cluster named {name} is running: start one with `{_command('up', name)}`")
    if state.phase is ClusterPhase.STARTING:
        what = "is still starting" if state.command.is_alive else f"has not come up: {_clean_up(name)}"
        raise Unavailable(f"the cluster {name} {what}")
    return state


@asynccontextmanager
async def inference(state: ClusterState) -> AsyncIterator[InferenceStub]:
    """The public service. Raises BatonError for what goes wrong in a call."""
    async with _calls(state), grpc.aio.insecure_channel(state.address, options=CHANNEL_OPTIONS) as channel:
        yield InferenceStub(channel)


@asynccontextmanager
async def operator(state: ClusterState) -> AsyncIterator[ClusterStub]:
    """The operator's service. Calls want `metadata(state)`. Raises BatonError for what goes wrong in a call."""
    async with _calls(state), grpc.aio.insecure_channel(state.operator_address, options=CHANNEL_OPTIONS) as channel:
        yield ClusterStub(channel)


def metadata(state: ClusterState) -> tuple[tuple[str, str], ...]:
    """What opens the operator's port."""
    return ((TOKEN_METADATA, state.token),)


@asynccontextmanager
async def _calls(state: ClusterState) -> AsyncIterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as failure:
        error = from_rpc_error(failure)
        if isinstance(error, Unavailable) and not state.is_alive:
            raise Unavailable(f"the cluster {state.name} has crashed: {_clean_up(state.name)}") from failure
        if isinstance(error, Unavailable) and not failure.trailing_metadata():  # gRPC itself says so, and no server
            status = _command("status", state.name)
            raise Unavailable(f"the router went away or is not back yet ({error.message}): see `{status}`") from failure
        raise error from failure


def _clean_up(name: str) -> str:
    return f"clean up with `{_command('down', name)}`"


def _command(verb: str, name: str) -> str:
    return f"baton {verb}" if name == "default" else f"baton {verb} --name {name}"
