"""Good requests at a bad time: too many, no worker, no time left, workers that die of them; each on its own cluster."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc.aio
import pytest

from router.config import RouterSettings
from tests.bad_input.ports import GOOD, MODEL, PROMPT, SIZES, GenerateCall, serving
from tests.bad_input.refusal import Refusal, refusal_of, refused
from tests.faults.rest import at_rest
from tests.harness.answer import ask
from tests.harness.cluster import until

ANOTHER_PROMPT = tuple(range(100, 140))
NUM_CALLS = 200
NUM_TAKEN = 4
TEN_YEARS_S = 315_360_000.0


async def test_a_flood_over_one_connection_is_refused_beyond_the_queue() -> None:
    bounds = RouterSettings(max_queued_requests=NUM_TAKEN, retry_after_s=2.0)
    async with serving(replace(SIZES, settings=bounds)) as ports:
        model = ports.cluster.models["p0"]
        model.pause()
        ends = [asyncio.create_task(_end(ports.generate(GOOD))) for _ in range(NUM_CALLS)]
        await until(lambda: sum(end.done() for end in ends) == NUM_CALLS - NUM_TAKEN)
        refusals = [refusal for end in ends if end.done() and (refusal := end.result()) is not None]
        assert len(refusals) == NUM_CALLS - NUM_TAKEN
        assert {one.code for one in refusals} == {"RESOURCE_EXHAUSTED"}
        assert {one.ids["retryable"] for one in refusals} == {"true"}
        assert {one.retry_after_s for one in refusals} == {2.0}
        model.go_on()
        assert (await asyncio.gather(*ends)).count(None) == NUM_TAKEN
        await ports.require_unharmed()


async def test_without_workers_a_request_waits_and_is_told_so() -> None:
    async with serving(replace(SIZES, settings=RouterSettings(max_worker_wait_s=0.2))) as ports:
        await ports.cluster.enlist()
        refusal = await refused(ports.generate(GOOD))
        assert (refusal.code, refusal.ids["retryable"]) == ("UNAVAILABLE", "true")
        refusal.require_discreet()
        await ports.cluster.enlist("p0", "d0")
        await ports.require_unharmed()


@pytest.mark.parametrize("time_left_s", [None, TEN_YEARS_S], ids=["no deadline", "ten years"])
async def test_a_deadline_is_at_most_the_servers_own(time_left_s: float | None) -> None:
    async with serving(replace(SIZES, settings=RouterSettings(max_deadline_s=1.0))) as ports:
        ports.cluster.models["d0"].pause()
        refusal = await refused(ports.generate(GOOD, time_left_s))
        assert (refusal.code, refusal.reason) == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")
        ports.cluster.models["d0"].go_on()
        await at_rest(ports.cluster)


async def test_a_request_whose_tokens_kill_every_worker_ends_its_stream_as_not_to_be_tried_again() -> None:
    """The client has tokens by then, and must see that no more will come."""
    output = MODEL.oracle(PROMPT, 40)
    num_tokens = next(index for index in range(5, 40) if output[index] not in (*PROMPT, *output[:index])) + 1
    async with serving() as ports:
        ports.cluster.replace_dead = True
        ports.cluster.poison(output[num_tokens - 1])
        had: list[int] = []
        refusal = await refused(_noting(had, ports.generate(ask(PROMPT, 40).SerializeToString())))
        assert 0 < len(had) <= num_tokens, "what a worker has said when it dies may be lost, and is said again"
        assert had == output[: len(had)]
        assert (refusal.code, refusal.reason) == ("ABORTED", "ATTEMPTS_EXHAUSTED")
        assert refusal.ids["retryable"] == "false"
        refusal.require_discreet()
        [choice] = await ports.answer(ask(ANOTHER_PROMPT, 1).SerializeToString())
        assert choice.token_ids == MODEL.oracle(ANOTHER_PROMPT, 1)
        await at_rest(ports.cluster)


async def _end(call: GenerateCall) -> Refusal | None:
    """Reads a call to its end, which may be good or bad."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as failure:
        return refusal_of(failure)
    return None


async def _noting(tokens: list[int], call: GenerateCall) -> AsyncIterator[None]:
    """The call, whose tokens are added to those."""
    async for response in call:
        tokens += response.chunk.token_ids
        yield
