"""Devices that run out of memory in a step: once, at any step; or for good, whenever many run together."""

import asyncio

import pytest
import torch

from engine.model.batch import Batch
from engine.model.hash_model import HashModel
from kernels.backend import KVPages
from tests.faults.rest import at_rest
from tests.harness.answer import ask
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.known_model import LAYOUT, MODEL
from tests.harness.local_cluster import Sizes
from worker.config import BatchSettings

SIZES = Sizes(batch=BatchSettings(max_step_tokens=64, max_running=16, max_chunk_tokens=16))
NUM_REQUESTS = 4
NUM_TOKENS = 12


class SmallDevice(HashModel):
    """Takes no more than `max_tokens` in a step."""

    max_tokens = 48
    num_refused = 0

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        if len(batch.token_ids) > self.max_tokens:
            self.num_refused += 1
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(batch, kv)


def prompt_of(number: int) -> tuple[int, ...]:
    return tuple((number * 13 + position) % 200 for position in range(40))


@pytest.mark.parametrize(
    ("where", "step"), [*(("p0", step) for step in range(1, 4)), *(("d0", step) for step in range(1, 11))]
)
async def test_once_in_any_step(where: str, step: int) -> None:
    """All of the step's requests go on: one by one there, or elsewhere."""

    def fail(number: int) -> None:
        if number == step:
            raise torch.OutOfMemoryError("out of memory")

    async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
        cluster.models[where].on_step = fail
        requests = [ask(prompt_of(number), NUM_TOKENS) for number in range(NUM_REQUESTS)]
        for number, [choice] in enumerate(await asyncio.gather(*map(cluster.answer, requests))):
            assert choice.token_ids == MODEL.oracle(prompt_of(number), NUM_TOKENS)
        assert cluster.models[where].num_steps >= step
        await at_rest(cluster)


async def test_whenever_many_run_together() -> None:
    model = SmallDevice(LAYOUT, vocab_size=300)
    async with FaultyCluster.running(model, 1, 1, SIZES) as cluster:
        requests = [ask(prompt_of(number), NUM_TOKENS) for number in range(NUM_REQUESTS)]
        for number, [choice] in enumerate(await asyncio.gather(*map(cluster.answer, requests))):
            assert choice.token_ids == MODEL.oracle(prompt_of(number), NUM_TOKENS)
        assert model.num_refused > 0
        await at_rest(cluster)
