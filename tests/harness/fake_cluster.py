"""A router before fake workers, all in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from router.config import ClusterAccess, Disaggregation, RouterConfig, RouterSettings
from router.requests.dispatch import OpenRequest
from tests.harness.cluster import WAIT_S, Cluster, role_of, until
from tests.harness.fake_worker import FINGERPRINT, LAYOUT, FakeWorker, oracle
from text.chat import Renderer
from wire.ids import WorkerId
from wire.pb import inference_pb2 as pb
from wire.served_model import ServedModel

VOCAB_SIZE = 300
PROMPT = "hello, world"
CONFIG = RouterConfig(
    model=ServedModel(
        name="fake",
        folder="",
        dtype="float32",
        max_context_len=2000,
        vocab_size=VOCAB_SIZE,
        fingerprint_hex=FINGERPRINT.hex(),
        layout_hex=LAYOUT.encode().hex(),
    ),
    cluster=ClusterAccess(token="the cluster's token", secret_hex="00" * 32),
    settings=RouterSettings(grpc_port=0, metrics_port="off", disaggregation=Disaggregation.ALWAYS),
)


class FakeCluster(Cluster[FakeWorker]):
    """A cluster whose workers have no model; a test may put others into `workers` before they are listed."""

    def open(self, request: pb.GenerateRequest, time_left_s: float | None = 20.0) -> OpenRequest:
        return self.router.dispatcher.open(request, time_left_s)

    async def problems(self) -> list[str]:
        """What is left behind although no request is open."""
        status = await self.status()
        busy = [f"{name} serves a call" for name, worker in self.workers.items() if worker.open_calls]
        lost = {worker.worker_id for worker in status.workers if worker.state == "lost"}
        return [*(one for one in status.problems if one.split(":")[0] not in lost), *busy]

    async def come_to_rest(self) -> None:
        """Returns when nothing is open, held, assigned or served any more; TimeoutError if that does not come."""
        dispatcher = self.router.dispatcher
        await until(lambda: not dispatcher.num_running and not dispatcher.num_queued)
        async with asyncio.timeout(WAIT_S):
            while await self.problems():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def _start_worker(self, name: str) -> FakeWorker:
        return FakeWorker(WorkerId(name), role_of(name))

    def _port(self, worker: FakeWorker) -> FakeWorker:
        return worker


@asynccontextmanager
async def running(
    num_prefill: int, num_decode: int, config: RouterConfig = CONFIG, renderer: Renderer | None = None
) -> AsyncIterator[FakeCluster]:
    """A cluster that is checked for leaks in the end."""
    cluster = FakeCluster(config, renderer=renderer)
    await cluster.start(num_prefill, num_decode)
    try:
        yield cluster
        await cluster.come_to_rest()
    finally:
        await cluster.stop()


def request(**sampling: Any) -> pb.GenerateRequest:
    """Prompt "hello, world" (three blocks), seed 1 unless told otherwise."""
    return pb.GenerateRequest(text=PROMPT, sampling_params=pb.SamplingParams(**{"seed": 1, **sampling}))


def expected(length: int, choice: int = 0, seed: int = 1) -> list[int]:
    """The output for `request` of `max_tokens` tokens."""
    return oracle(PROMPT.encode(), choice, seed, length)
