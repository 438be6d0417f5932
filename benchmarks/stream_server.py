"""Servers for benchmarks, each a process of its own: prints its addresses, and serves until its input ends.

stream_server.py workers INTERVAL_S | router PREFILL DECODE | gateway ROUTER
"""

import asyncio
import gc
import json
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.paced_worker import PacedWorker
from gateway.actor import GatewayActor
from gateway.config import GatewayConfig
from router.ports.server import RouterServer
from router.router import Router
from router.workers.controller_port import LocalController
from router.workers.grpc_transport import GrpcTransport
from tests.harness.fake_cluster import CONFIG
from tests.router.worker_server import served
from text.byte_tokenizer import ByteTokenizer
from wire.ids import WorkerId
from wire.pools import PoolSizes, Role, Worker
from wire.typed_reader import to_json

_TOKEN = CONFIG.cluster.token
_CONFIG = replace(CONFIG, model=replace(CONFIG.model, max_context_len=100_000))


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


async def _router(prefill: str, decode: str) -> None:
    router = Router(_CONFIG, ByteTokenizer(), partial(GrpcTransport, token=_TOKEN), LocalController(PoolSizes(1, 1)))
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


async def _serve(*addresses: str) -> None:
    # As routers and workers do at the end of their start.
    gc.collect()
    gc.freeze()
    print(*addresses, flush=True)
    await asyncio.to_thread(sys.stdin.read)


_SERVERS: Mapping[str, Callable[..., Coroutine[Any, Any, None]]] = {
    "workers": _workers,
    "router": _router,
    "gateway": _gateway,
}

if __name__ == "__main__":
    asyncio.run(_SERVERS[sys.argv[1]](*sys.argv[2:]))
