"""The command line's side of gRPC: finds a cluster by its state, and calls its router."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from deploy.local.state import ClusterPhase, ClusterState, StateFile
from wire.errors import Unavailable
from wire.pb.cluster_pb2_grpc import ClusterStub
from wire.pb.inference_pb2_grpc import InferenceStub
from wire.rpc import CHANNEL_OPTIONS, TOKEN_METADATA
from wire.rpc_status import from_rpc_error


def find_cluster(name: str) -> ClusterState:
    """Returns the state of a cluster that serves. Raises Unavailable, with advice, if there is none."""
    state = StateFile(name).read()
    if state is None:
        raise Unavailable(f"no cluster named {name} is running: start one with `{_command('up', name)}`")
    if state.phase is ClusterPhase.STARTING:
        what = "is still starting" if state.command.is_alive else f"has not come up: {_clean_up(name)}"
        raise Unavailable(f"the cluster {name} {what}")
    return state


@asynccontextmanager
async def inference(state: ClusterState) -> AsyncIterator[InferenceStub]:
    """Opens the public service. Raises BatonError for any failure of a call."""
    async with _channel(state, state.address) as channel:
        yield InferenceStub(channel)


def call_operator(state: ClusterState, method: str, request: Message, timeout_s: float) -> Any:
    """Calls a method of the operator's service, and blocks until its answer. Raises BatonError."""
    return asyncio.run(_call_operator(state, method, request, timeout_s))


async def _call_operator(state: ClusterState, method: str, request: Message, timeout_s: float) -> Any:
    async with _channel(state, state.operator_address) as channel:
        call = getattr(ClusterStub(channel), method)
        return await call(request, metadata=((TOKEN_METADATA, state.token),), timeout=timeout_s)


@asynccontextmanager
async def _channel(state: ClusterState, address: str) -> AsyncIterator[grpc.aio.Channel]:
    try:
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            yield channel
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
