"""A cluster whose decode worker reads a prompt's blocks while a prefill worker computes the rest."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import torch

from engine.model.batch import Batch
from engine.model.hash_model import HashModel
from kernels.backend import KVPages
from router.requests import read_ahead
from router.workers.line import MAX_PREFETCHES
from tests.harness.cluster import until
from tests.harness.local_cluster import LocalCluster, Parts, Sizes
from tests.local_cluster.test_local_cluster import LAYOUT, MODEL, ask, at_rest
from wire.errors import Cancelled
from wire.ids import RequestId, WorkerId
from wire.pb import inference_pb2 as pb
from worker.config import BatchSettings

PROMPT = tuple(number % 300 for number in range(200))
SIZES = Sizes(batch=BatchSettings(max_step_tokens=48, max_running=8, max_chunk_tokens=32))
NUM_AHEAD = 192 // 16
WAIT_S = 10.0


@dataclass
class Gate:
    """The last step of a prompt's prefill, which waits until it is let through."""

    reached: threading.Event = field(default_factory=threading.Event)
    passed: threading.Event = field(default_factory=threading.Event)


class GatedModel(HashModel):
    """A model whose steps with a token to choose wait at a gate."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(LAYOUT, vocab_size=300)
        self._gate = gate

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        if len(batch.sample_rows):
            self._gate.reached.set()
            assert self._gate.passed.wait(WAIT_S)
        return super().forward(batch, kv)


class GatedCluster(LocalCluster):
    """A cluster whose prefill workers hold the ends of prompts back."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(MODEL, SIZES)
        self._gate = gate

    def _parts(self, name: str) -> Parts:
        parts = super()._parts(name)
        return Parts(GatedModel(self._gate), parts.tiers) if name.startswith("p") else parts

    def num_cached(self, name: str) -> int:
        return self.workers[name].engine.pool.ledger.counts().cached


@asynccontextmanager
async def gated(num_decode: int = 1) -> AsyncIterator[tuple[GatedCluster, Gate]]:
    gate = Gate()
    cluster = GatedCluster(gate)
    await cluster.start(1, num_decode)
    try:
        yield cluster, gate
    finally:
        gate.passed.set()
        await cluster.stop()


def fetched(timeline: pb.Timeline) -> dict[str, int]:
    """The tokens of the decode worker's fetch, by tier."""
    counts: dict[str, int] = {}
    for span in timeline.spans:
        if span.name == "decode.fetch":
            counts |= {name: count for name, count in span.counts.items() if name.startswith("tokens_")}
    return counts


async def test_blocks_are_on_the_decode_workers_device_before_the_prompts_end() -> None:
    async with gated() as (cluster, gate):
        asked = asyncio.create_task(cluster.generate(ask(PROMPT)))
        await until(lambda: gate.reached.is_set() and cluster.num_cached("d0") == NUM_AHEAD)
        gate.passed.set()
        output = await asked
        await at_rest(cluster)
    assert output.token_ids[0] == MODEL.oracle(PROMPT, 40)
    assert fetched(output.complete.timeline) == {"tokens_device": 192, "tokens_host": 8}


async def test_a_request_that_ends_at_its_first_token_is_not_read_ahead() -> None:
    async with gated() as (cluster, gate):
        gate.passed.set()
        await cluster.generate(ask(PROMPT, max_tokens=1))
        await at_rest(cluster)
        assert cluster.num_cached("d0") == 0


async def test_another_decode_worker_serves_the_request_if_the_chosen_one_is_lost() -> None:
    async with gated(2) as (cluster, gate):
        asked = asyncio.create_task(cluster.generate(ask(PROMPT)))
        await until(lambda: any(cluster.num_cached(name) == NUM_AHEAD for name in ("d0", "d1")))
        chosen, other = sorted(("d0", "d1"), key=cluster.num_cached, reverse=True)
        await cluster.enlist("p0", other)
        gate.passed.set()
        output = await asked
    assert output.token_ids[0] == MODEL.oracle(PROMPT, 40)
    assert (output.complete.timeline.decode_worker, chosen) == (other, "d1" if other == "d0" else "d0")


async def test_the_work_counts_as_the_decode_workers_from_its_choice_on() -> None:
    async with gated(2) as (cluster, gate):
        asked = asyncio.create_task(cluster.generate(ask(PROMPT)))
        await until(lambda: gate.reached.is_set() and any(cluster.num_cached(name) for name in ("d0", "d1")))
        works = {name: cluster.router.members[WorkerId(name)].num_choices for name in ("d0", "d1")}
        gate.passed.set()
        output = await asked
        await at_rest(cluster)
    assert sorted(works.values()) == [0, 1]
    assert works[output.complete.timeline.decode_worker] == 1


async def test_an_abort_amid_the_prompt_leaves_no_trace() -> None:
    async with gated() as (cluster, gate):
        aborted = ask(PROMPT)
        aborted.request_id = "aborted"
        asked = asyncio.create_task(cluster.generate(aborted))
        await until(lambda: cluster.num_cached("d0") == NUM_AHEAD)
        await cluster.router.dispatcher.abort(RequestId("aborted"))
        with pytest.raises(Cancelled):
            await asked
        gate.passed.set()
        await at_rest(cluster)
        output = await cluster.generate(ask(PROMPT))
    assert output.token_ids[0] == MODEL.oracle(PROMPT, 40)


async def test_long_prefixes_go_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "MAX_BLOCKS", NUM_AHEAD // MAX_PREFETCHES)
    async with gated() as (cluster, gate):
        asked = asyncio.create_task(cluster.generate(ask(PROMPT)))
        await until(lambda: cluster.num_cached("d0") == NUM_AHEAD)
        gate.passed.set()
        assert (await asked).token_ids[0] == MODEL.oracle(PROMPT, 40)
