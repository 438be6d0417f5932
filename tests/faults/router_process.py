"""A router as a process of its own, before workers that run elsewhere.

python -m tests.faults.router_process, and an Order as one line of input; says at which address it serves
"""

import asyncio
import json
import resource
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

import psutil

from router.config import RouterConfig
from router.ports.server import RouterServer
from router.router import Router
from router.workers.controller_port import LocalController
from router.workers.grpc_transport import GrpcTransport
from text.byte_tokenizer import ByteTokenizer
from wire.ids import WorkerId
from wire.pools import PoolSizes, Role, Worker
from wire.typed_reader import from_json


@dataclass(frozen=True)
class Order:
    """`addresses` of workers by their names; `max_files`: file descriptors that the process may have, 0 for any."""

    config: str
    addresses: dict[str, str]
    max_files: int = 0


@dataclass(frozen=True)
class RouterProcess:
    """A router that serves at `address`."""

    process: asyncio.subprocess.Process
    address: str

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    def num_files(self) -> int:
        """Open ones."""
        return psutil.Process(self.process.pid).num_fds()


@asynccontextmanager
async def router_process(order: Order) -> AsyncIterator[RouterProcess]:
    """One that serves."""
    command = [sys.executable, "-m", "tests.faults.router_process"]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{json.dumps(asdict(order))}\n".encode())
    router = RouterProcess(process, (await process.stdout.readline()).decode().strip())
    try:
        yield router
    finally:
        await router.kill()


async def serve(order: Order) -> None:
    if order.max_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (order.max_files, order.max_files))
    config = from_json(RouterConfig, order.config, "router")
    token = config.cluster.token
    router = Router(
        config, ByteTokenizer(), lambda address: GrpcTransport(address, token), LocalController(PoolSizes(0, 0))
    )
    server = RouterServer(router)
    addresses = await server.start()
    listed = [
        Worker(WorkerId(name), Role.PREFILL if name.startswith("p") else Role.DECODE, address)
        for name, address in order.addresses.items()
    ]
    assert await router.membership.set(listed) == {}
    print(addresses.public, flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Order(**json.loads(sys.stdin.readline()))))
