"""Servers for benchmarks, each a process of its own: prints its addresses, and serves until its input ends.

stream_server.py workers INTERVAL_S | bare INTERVAL_S | refusing | router PREFILL DECODE [MAX_OPEN_REQUESTS]
    | worker INTERVAL_S | engine INTERVAL_S REQUESTS TOKENS
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import torch
from grpc_status import rpc_status

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.paced_engine import PacedEngine
from benchmarks.paced_worker import PacedWorker, beats
from decode_worker.behaviour import decode_behaviour
from engine.request import EngineRequest
from gateway.actor import GatewayActor
from gateway.config import GatewayConfig
from kv_store.device_pool import DevicePool
from kv_store.node_store import NodeStore
from router.config import AdmissionBounds
from router.ports.server import RouterServer
from router.router import Router
from router.workers.controller_port import LocalController
from router.workers.grpc_transport import GrpcTransport
from tests.harness.assembled_worker import TOKEN
from tests.harness.fake_cluster import CONFIG
from tests.harness.known_model import LAYOUT
from tests.harness.one_worker import PROMPT, VOCAB_SIZE, greedy, timeless_node
from tests.router.worker_server import served
from text.byte_tokenizer import ByteTokenizer
from wire.errors import Overloaded
from wire.ids import AttemptId, NamespaceRoot, WorkerId
from wire.pb import inference_pb2 as pb
from wire.pb.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from wire.pb.worker_pb2 import WorkerInfo
from wire.pools import PoolSizes, Role, Worker
from wire.rpc import SERVER_OPTIONS
from wire.rpc_status import to_status
from wire.typed_reader import to_json
from worker.config import MAX_SILENCE_S, BatchSettings, ServerSettings
from worker.loop import Inbox
from worker.server import WorkerServer
from worker.service import WorkerService
from worker.store_control import AsyncStore

_TOKEN = CONFIG.cluster.token
_CONFIG = replace(CONFIG, model=replace(CONFIG.model, max_context_len=100_000))


class BareApi(InferenceServicer):
    """The streams of a router, from a server that does nothing else."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        attempt_id = "0" * 24
        async for number in beats(self._interval_s, request.sampling_params.max_tokens):
            chunk = pb.Chunk(index=0, token_ids=[ord("a")] * number, text="a" * number)
            yield pb.GenerateResponse(request_id=attempt_id, chunk=chunk)
        yield pb.GenerateResponse(request_id=attempt_id, complete=pb.Complete())


async def _refuse(_messages: Any, context: Any) -> None:
    """Refuses at the least cost: reads nothing, and says as much as the router's error."""
    await context.abort_with_status(rpc_status.to_status(to_status(Overloaded("no room", 1.0))))


async def _bare(interval_s: str) -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_InferenceServicer_to_server(BareApi(float(interval_s)), server)
    await _serve_alone(server)


async def _refusing() -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"Generate": grpc.stream_unary_rpc_method_handler(_refuse)}
    service = pb.DESCRIPTOR.services_by_name["Inference"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    await _serve_alone(server)


async def _workers(interval_s: str) -> None:
    async with AsyncExitStack() as servers:
        workers = [
            PacedWorker(
                WorkerId(role.value), role, num_arena_blocks=1 << 20, num_blocks=1 << 20, interval_s=float(interval_s)
            )
            for role in (Role.PREFILL, Role.DECODE)
        ]
        addresses = [(await servers.enter_async_context(served(worker, _TOKEN)))[1] for worker in workers]
        await _serve(*addresses)


async def _router(prefill: str, decode: str, max_open: str = str(AdmissionBounds().max_open_requests)) -> None:
    config = replace(_CONFIG, admission=AdmissionBounds(max_open_requests=int(max_open)))
    router = Router(config, ByteTokenizer(), partial(GrpcTransport, token=_TOKEN), LocalController(PoolSizes(1, 1)))
    server = RouterServer(router)
    addresses = await server.start()
    listed = [
        Worker(WorkerId("prefill"), Role.PREFILL, prefill),
        Worker(WorkerId("decode"), Role.DECODE, decode),
    ]
    refused = await router.membership.set(listed)
    assert not refused, refused
    await _serve(addresses.public)
    await server.stop()


async def _gateway(address: str) -> None:
    actor = GatewayActor(to_json(GatewayConfig(address)))
    await _serve(json.loads(await actor.start())["http"])
    await actor.stop()


async def _worker(interval_s: str) -> None:
    """Serves a decode worker on an engine that only keeps time."""
    node = timeless_node()
    store = NodeStore(LAYOUT, node.arena, node.directory, [], DevicePool(LAYOUT, 1, torch.device("cpu")))
    engine: Any = PacedEngine(float(interval_s))
    asynced = AsyncStore(store.control, node.directory.records)
    info = WorkerInfo(worker_id="decode-0", role="decode", vocab_size=VOCAB_SIZE)
    behaviour = decode_behaviour(BatchSettings(), LAYOUT.block_size)
    service = WorkerService(info, behaviour, engine, Inbox(), asynced, lambda: None, MAX_SILENCE_S)
    server = WorkerServer(service, ServerSettings(TOKEN))
    await service.start()
    await _serve(await server.start())
    await service.close()
    await server.stop()


async def _engine(interval_s: str, num_requests: str, num_tokens: str) -> None:
    """Turns the engine of `_worker` through so many requests, and prints its processor time in place of an address."""
    engine = PacedEngine(float(interval_s))
    for number in range(int(num_requests)):
        attempt_id = AttemptId(f"{number}/1")
        engine.add(EngineRequest(attempt_id, NamespaceRoot(bytes(32)), PROMPT, greedy(int(num_tokens))))
    began_s = time.process_time()
    await asyncio.to_thread(_step_to_the_end, engine)
    await _serve(str(time.process_time() - began_s))


def _step_to_the_end(engine: PacedEngine) -> None:
    while engine.can_step:
        engine.step()


async def _serve_alone(server: grpc.aio.Server) -> None:
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await _serve(f"127.0.0.1:{port}")
    await server.stop(None)


async def _serve(*addresses: str) -> None:
    # As routers and workers do at the end of their start.
    gc.collect()
    gc.freeze()
    print(*addresses, flush=True)
    await asyncio.to_thread(sys.stdin.read)


_SERVERS: Mapping[str, Callable[..., Coroutine[Any, Any, None]]] = {
    "workers": _workers,
    "bare": _bare,
    "router": _router,
    "gateway": _gateway,
    "refusing": _refusing,
    "worker": _worker,
    "engine": _engine,
}

if __name__ == "__main__":
    asyncio.run(_SERVERS[sys.argv[1]](*sys.argv[2:]))
