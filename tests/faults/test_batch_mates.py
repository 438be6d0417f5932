"""Requests that go wrong by themselves: those that run with them notice nothing."""

import pytest

from kv_store.frame import checksum_of
from kv_store.node.messages import Block
from tests.faults.rest import at_rest
from tests.harness.answer import Reader, ask
from tests.harness.cluster import until
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.faulty_model import SPOILT
from tests.harness.known_model import LAYOUT, MODEL
from tests.harness.local_cluster import Sizes
from wire.block_names import BlockName
from wire.errors import BatonError, NonFiniteLogits
from worker.config import BatchSettings

SIZES = Sizes(num_blocks=128, num_slots=256)
SMALL_STEPS = BatchSettings(max_step_tokens=32, max_running=16, max_chunk_tokens=16)
BAD = MODEL.vocab_size
"""A token that is in prompts only."""
NO_TOKEN = -1
NUM_MATES = 7


def prompt_of(number: int) -> tuple[int, ...]:
    return tuple((number * 13 + position) % 200 for position in range(60))


async def mates_of(cluster: FaultyCluster, num_tokens: int) -> list[Reader]:
    """Seven requests that run."""
    mates = [cluster.open(ask(prompt_of(number), num_tokens)) for number in range(NUM_MATES)]
    for mate in mates:
        await mate.read_tokens(2)
    return mates


async def expect_whole(cluster: FaultyCluster, mates: list[Reader], num_tokens: int) -> None:
    for number, mate in enumerate(mates):
        [choice] = await mate.read_all()
        assert choice.token_ids == MODEL.oracle(prompt_of(number), num_tokens)
        assert mate.complete is not None
        calls = [span for span in mate.complete.timeline.spans if span.name in ("prefill.queue", "decode.queue")]
        assert len(calls) == len(cluster.listed), "one at each worker: nothing was tried twice"


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_a_request_that_no_step_can_do(num_prefill: int) -> None:
    async with FaultyCluster.running(MODEL, num_prefill, 1, SIZES) as cluster:
        for model in cluster.models.values():
            model.poison = BAD
        mates = await mates_of(cluster, 100)
        with pytest.raises(BatonError) as failure:
            await cluster.answer(ask((*prompt_of(50), BAD), 20))
        assert failure.value.reason == "BATON_ERROR"
        assert "incident" in failure.value.message
        await expect_whole(cluster, mates, 100)
        await at_rest(cluster)


async def test_a_request_that_no_step_can_do_after_some_tokens() -> None:
    """Its tokens so far are delivered; then it ends, and nobody else does."""
    prompt = prompt_of(50)
    bad = MODEL.oracle(prompt, 20)[10]
    others = [number for number in range(60) if bad not in (*prompt_of(number), *MODEL.oracle(prompt_of(number), 60))]
    async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
        cluster.models["d0"].poison = bad
        mates = [cluster.open(ask(prompt_of(number), 60)) for number in others[:NUM_MATES]]
        reader = cluster.open(ask(prompt, 20))
        with pytest.raises(BatonError) as failure:
            await reader.read_all()
        assert type(failure.value) is BatonError
        assert reader.choices[0].token_ids == MODEL.oracle(prompt, 11)
        for number, mate in zip(others, mates, strict=False):
            [choice] = await mate.read_all()
            assert choice.token_ids == MODEL.oracle(prompt_of(number), 60)
        await at_rest(cluster)


async def test_a_worker_that_can_do_no_step_is_left() -> None:
    """Not the requests are at fault then: they go on elsewhere."""
    async with FaultyCluster.running(MODEL, 1, 2, SIZES) as cluster:
        mates = await mates_of(cluster, 100)
        cluster.models["d0"].is_broken = True
        for number, mate in enumerate(mates):
            [choice] = await mate.read_all()
            assert choice.token_ids == MODEL.oracle(prompt_of(number), 100)
        await at_rest(cluster)


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_logits_that_are_no_numbers(num_prefill: int) -> None:
    async with FaultyCluster.running(MODEL, num_prefill, 1, SIZES) as cluster:
        for model in cluster.models.values():
            model.spoilt = BAD
        mates = await mates_of(cluster, 100)
        with pytest.raises(BatonError, match="not finite"):
            await cluster.answer(ask((*prompt_of(50), BAD), 20))
        await expect_whole(cluster, mates, 100)
        await at_rest(cluster)


def poison(cluster: FaultyCluster, names: list[BlockName]) -> None:
    """Has blocks in the arena and in the cold tier whose KV leads to no numbers, whatever their checksums."""
    payload = memoryview(bytearray(SPOILT.to_bytes(8, "little", signed=True) * (LAYOUT.payload_bytes // 8)))
    slots = cluster.directory.reserve("poisoner", names, None).slots
    for slot, name in zip(slots, names, strict=True):
        assert slot is not None
        cluster.arena.slot(slot)[: len(payload)] = payload
        cluster.directory.commit("poisoner", [Block(slot, name, checksum_of(payload))], None)
        cluster.cold.put(name, payload, checksum_of(payload))


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_a_request_over_a_poisoned_block_is_computed_without_the_store(num_prefill: int) -> None:
    async with FaultyCluster.running(MODEL, num_prefill, 1, SIZES) as cluster:
        prompt, poisoned = prompt_of(50), cluster.names_of(prompt_of(50))[:2]
        poison(cluster, poisoned)
        for model in cluster.models.values():
            model.spoilt_kv = NO_TOKEN
        [choice] = await cluster.answer(ask(prompt, 20))
        assert choice.token_ids == MODEL.oracle(prompt, 20)
        await until(lambda: not any(worker.transfers.pending for worker in cluster.workers.values()))
        assert cluster.cold.exists([name.key for name in poisoned]) == [False, False]
        [choice] = await cluster.answer(ask(prompt, 20))
        assert choice.token_ids == MODEL.oracle(prompt, 20), "of the blocks that took their place"
        cached = sum(worker.engine.stats().cached_prompt_tokens for worker in cluster.workers.values())
        assert cached > 2 * LAYOUT.block_size
        await at_rest(cluster)


async def test_a_request_without_numbers_is_computed_once_more_and_no_oftener() -> None:
    """The prompt's beginning is cached, but its last token is at fault itself."""
    async with FaultyCluster.running(MODEL, 0, 1, SIZES) as cluster:
        await cluster.answer(ask(prompt_of(50), 1))
        model = cluster.models["d0"]
        model.spoilt, num_steps = BAD, model.num_steps
        with pytest.raises(NonFiniteLogits, match="not finite"):
            await cluster.answer(ask((*prompt_of(50), BAD), 20))
        assert model.num_steps == num_steps + 2
        with pytest.raises(NonFiniteLogits):
            await cluster.answer(ask((*prompt_of(50), BAD), 20))
        assert model.num_steps == num_steps + 3, "nothing was cached any more"
        await at_rest(cluster)


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_what_led_to_no_numbers_is_not_found_again(num_prefill: int) -> None:
    """The fault was in the KV of the prompt's first chunk, computed steps before the logits showed it."""
    sizes = Sizes(num_blocks=128, num_slots=256, batch=SMALL_STEPS)
    async with FaultyCluster.running(MODEL, num_prefill, 1, sizes) as cluster:
        prompt = (BAD, *prompt_of(50))
        for model in cluster.models.values():
            model.spoilt_kv = BAD
        with pytest.raises(BatonError, match="not finite"):
            await cluster.answer(ask(prompt, 20))
        for model in cluster.models.values():
            model.spoilt_kv = None
        await until(lambda: not any(worker.transfers.pending for worker in cluster.workers.values()))
        [choice] = await cluster.answer(ask(prompt, 20))
        assert choice.token_ids == MODEL.oracle(prompt, 20)
        await at_rest(cluster)
