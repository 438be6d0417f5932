"""The router's own processor time per token, as workers and open requests grow: one process, twins of every wire.

    python benchmarks/router_tokens.py --rounds 3

Workers compute nothing and send one message per step, with a token for each of their requests. Two sizes take turns in
one process: few workers and requests, and many. The time that workers take to make their messages is left out.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.result_file import write_result
from router.requests.dispatch import OpenRequest
from router.router import Router
from router.workers.controller_port import LocalController
from router.workers.local_transport import LocalTransport
from tests.harness.fake_cluster import CONFIG
from tests.harness.fake_worker import FakeWorker
from text.byte_tokenizer import ByteTokenizer
from wire.ids import AttemptId, WorkerId
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.pools import PoolSizes, Role, Worker, WorkerState

SIZES = {"few": (2, 32), "many": (64, 2000)}
"""Decode workers and open requests."""
_SETTINGS = replace(CONFIG.settings, max_buffered_tokens=100_000, max_queued_requests=4096)
_CONFIG = replace(CONFIG, settings=_SETTINGS)
_TOKEN = ord("a")


class SteppingLine:
    """The worker's end of a line: `step` gives each of its requests a token."""

    def __init__(self, worker: "SteppingWorker") -> None:
        self._worker = worker
        self._positions: dict[AttemptId, int] = {}
        self._news = worker_pb2.ConnectResponse()
        self._changed = asyncio.Event()

    def take(self, request: worker_pb2.ConnectRequest) -> None:
        self._positions.update((AttemptId(begin.id), 0) for begin in request.begins)
        for attempt in map(AttemptId, request.aborts):
            self._positions.pop(attempt, None)
        for ask in request.asks:
            self._news.answers.add(number=ask.number, info=self._worker.info_now)
            self._changed.set()

    @property
    def num_requests(self) -> int:
        return len(self._positions)

    def step(self) -> int:
        """Makes the message of a step; returns how many tokens it has."""
        for attempt, position in self._positions.items():
            update = self._news.updates.add(id=attempt)
            update.choices.add(first_position=position, token_ids=[_TOKEN])
            self._positions[attempt] = position + 1
        self._changed.set()
        return len(self._positions)

    async def next(self) -> worker_pb2.ConnectResponse:
        while not self._news.ByteSize():
            self._changed.clear()
            await self._changed.wait()
        news, self._news = self._news, worker_pb2.ConnectResponse()
        return news

    def close(self) -> None:
        self._positions.clear()


class SteppingWorker:
    """A worker that routers can connect to."""

    def __init__(self, name: str) -> None:
        self.lines: list[SteppingLine] = []
        self._fake = FakeWorker(WorkerId(name), Role.DECODE)

    async def learn(self) -> None:
        self.info_now = await self._fake.info()

    def connect(self) -> SteppingLine:
        self.lines.append(SteppingLine(self))
        return self.lines[-1]


async def run_steps(lines: Sequence[SteppingLine], num_tokens: int) -> tuple[int, float]:
    """Has the workers send tokens; returns how many, and the processor time of the workers."""
    num_sent, workers_s = 0, 0.0
    while num_sent < num_tokens:
        began_s = time.process_time()
        num_sent += sum(line.step() for line in lines)
        workers_s += time.process_time() - began_s
        for _ in range(8):
            await asyncio.sleep(0)
    return num_sent, workers_s


async def time_per_token_us(num_workers: int, num_requests: int, num_tokens: int) -> float:
    """Processor time of this process per token, without that of the workers."""
    workers = {f"d{number}": SteppingWorker(f"d{number}") for number in range(num_workers)}
    for worker in workers.values():
        await worker.learn()
    router = Router(
        _CONFIG, ByteTokenizer(), lambda name: LocalTransport(workers[name]), LocalController(PoolSizes(0, num_workers))
    )
    listed = [Worker(WorkerId(name), Role.DECODE, name, WorkerState.READY) for name in workers]
    assert not await router.membership.set(listed)
    opened = [router.dispatcher.open(_request(), 600.0) for _ in range(num_requests)]
    reading = [asyncio.create_task(_read(request)) for request in opened]
    lines = [line for worker in workers.values() for line in worker.lines]
    while sum(line.num_requests for line in lines) < num_requests:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    began_s = time.process_time()
    num_sent, workers_s = await run_steps(lines, num_tokens)
    per_token_us = (time.process_time() - began_s - workers_s) / num_sent * 1e6
    await router.stop()
    await asyncio.gather(*reading, return_exceptions=True)
    return per_token_us


def _request() -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hello", sampling_params=pb.SamplingParams(max_tokens=1900, ignore_eos=True))


async def _read(request: OpenRequest) -> None:
    async for _ in request.outbox:
        pass


def _figures(options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    taken: dict[str, list[float]] = {name: [] for name in SIZES}
    for _ in range(options.rounds):
        for name, (num_workers, num_requests) in SIZES.items():
            taken[name].append(asyncio.run(time_per_token_us(num_workers, num_requests, options.tokens)))
    for name, values in taken.items():
        yield f"us_per_token_{name}", min(values)
    yield "ratio", min(taken["many"]) / min(taken["few"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=60_000, help="of each round, over all requests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="router_tokens", help="name of the result in benchmarks/results")
    options = parser.parse_args()
    write_result(options.out, dict(_figures(options)), {})


if __name__ == "__main__":
    main()
