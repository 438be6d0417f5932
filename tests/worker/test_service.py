import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from engine.model.hash_model import HashModel
from tests.worker.workers import (
    LAYOUT,
    POISON,
    PROMPT,
    TIMEOUT_S,
    VOCAB_SIZE,
    Node,
    Worker,
    decode_request,
    greedy,
    prefill_request,
    serving,
    tokens_of,
)
from wire.convert import status_of, tiers_from_pb, tiers_to_pb
from wire.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    RequestExists,
    Unavailable,
    Unsupported,
)
from wire.pb import inference_pb2, worker_pb2
from wire.pools import Role
from wire.sampling import SamplingParams
from worker.config import MIN_SILENCE_S

ORACLE = HashModel(LAYOUT, VOCAB_SIZE)


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
async def prefill(node: Node) -> AsyncIterator[Worker]:
    async with serving(Role.PREFILL, node) as worker:
        yield worker


@pytest.fixture
async def decode(node: Node) -> AsyncIterator[Worker]:
    async with serving(Role.DECODE, node) as worker:
        yield worker


def setter_of(event: asyncio.Event) -> Callable[[], None]:
    """To be called on any thread."""
    loop = asyncio.get_running_loop()

    def set_soon() -> None:
        loop.call_soon_threadsafe(event.set)

    return set_soon


async def collect(worker: Worker, request: worker_pb2.DecodeRequest) -> list[worker_pb2.DecodeUpdate]:
    async with asyncio.timeout(TIMEOUT_S):
        return [update async for update in worker.service.decode(request)]


async def test_hands_a_request_over_and_decode_computes_nothing_of_the_prompt(prefill: Worker, decode: Worker) -> None:
    answer = await prefill.service.prefill(prefill_request())
    assert answer.computed_tokens == len(PROMPT)
    assert answer.num_held_blocks == 7
    assert status_of("host", (await prefill.status()).tiers).counts["holds"] == 1
    first = list(answer.choices[0].token_ids)
    updates = await collect(decode, decode_request(outputs=[first]))
    assert first + tokens_of(updates) == ORACLE.oracle(PROMPT, 40)
    (fetched,) = [update.fetched for update in updates if update.HasField("fetched")]
    assert fetched == worker_pb2.Fetched(fetched_tokens=tiers_to_pb({"host": len(PROMPT)}), computed_tokens=0)
    status = await decode.at_rest()
    assert status.computed_prompt_tokens == 0
    assert status.generated_tokens == 39
    await prefill.at_rest()


async def test_a_second_prompt_finds_the_first_on_the_device(prefill: Worker) -> None:
    await prefill.service.prefill(prefill_request())
    answer = await prefill.service.prefill(prefill_request((*PROMPT, 7, 8), request_id="second"))
    assert tiers_from_pb(answer.cached_tokens) == {"device": 96}
    assert answer.computed_tokens == len(PROMPT) + 2 - 96


async def test_choices_are_handed_over_and_go_on_together(prefill: Worker, decode: Worker) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=20, n=3, ignore_eos=True)
    answer = await prefill.service.prefill(prefill_request(sampling=sampling))
    firsts = [list(choice.token_ids) for choice in sorted(answer.choices, key=lambda choice: choice.index)]
    apart = await collect(decode, decode_request(sampling=sampling, outputs=firsts))
    alone = await collect(decode, decode_request(sampling=sampling, request_id="alone", outputs=[[]] * 3))
    assert [firsts[n] + tokens_of(apart, n) for n in range(3)] == [tokens_of(alone, n) for n in range(3)]
    assert len({tuple(tokens_of(alone, n)) for n in range(3)}) == 3


async def test_a_request_that_ends_with_its_first_token_holds_nothing(prefill: Worker) -> None:
    answer = await prefill.service.prefill(prefill_request(sampling=greedy(1)))
    assert answer.choices[0].finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert answer.num_held_blocks == 0
    await prefill.at_rest()


async def test_decode_alone_computes_the_prompt(decode: Worker) -> None:
    updates = await collect(decode, decode_request())
    assert tokens_of(updates) == ORACLE.oracle(PROMPT, 40)
    (fetched,) = [update.fetched for update in updates if update.HasField("fetched")]
    assert fetched.computed_tokens == len(PROMPT)
    assert [span.name for span in updates[-1].summary.spans] == [
        "decode.queue",
        "decode.fetch",
        "decode.wait_turn",
        "decode.compute",
        "decode.generate",
    ]
    assert {span.worker for span in updates[-1].summary.spans} == {"decode-0"}


async def test_a_slow_reader_gets_everything_in_one_update(decode: Worker) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        updates = decode.service.decode(decode_request())
        first = await anext(updates)
        await decode.at_rest()
        rest = [update async for update in updates]
    assert len(rest) == 1
    assert tokens_of([first, *rest]) == ORACLE.oracle(PROMPT, 40)


async def test_a_cancelled_prefill_leaves_nothing_behind(prefill: Worker) -> None:
    prefill.model.may_go.clear()
    task = asyncio.create_task(prefill.service.prefill(prefill_request()))
    await prefill.at_work()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    prefill.model.may_go.set()
    assert (await prefill.at_rest()).generated_tokens <= 1


async def test_closing_a_stream_takes_the_request_out_of_the_engine(decode: Worker) -> None:
    updates = decode.service.decode(decode_request(sampling=greedy(3000)))
    await anext(updates)
    await updates.aclose()
    assert (await decode.at_rest()).generated_tokens < 3000


async def test_deadline_ends_the_request_here_too(decode: Worker) -> None:
    decode.model.may_go.clear()
    with pytest.raises(DeadlineExceeded):
        [update async for update in decode.service.decode(decode_request(), timeout_s=0.05)]
    decode.model.may_go.set()
    assert (await decode.at_rest()).generated_tokens <= 1


async def test_a_later_attempt_takes_the_place_of_an_earlier_one(decode: Worker) -> None:
    earlier = decode.service.decode(decode_request(sampling=greedy(3000), attempt=2))
    await anext(earlier)
    for attempt in (1, 2):
        with pytest.raises(RequestExists):
            await anext(decode.service.decode(decode_request(attempt=attempt)))
    later = await collect(decode, decode_request(attempt=3))
    assert {update.attempt for update in later} == {3}
    assert tokens_of(later) == ORACLE.oracle(PROMPT, 40)
    with pytest.raises(Cancelled):
        [update async for update in earlier]
    await decode.at_rest()


async def test_one_bad_request_does_not_touch_the_others(decode: Worker) -> None:
    good = asyncio.create_task(collect(decode, decode_request(request_id="good")))
    with pytest.raises(BatonError, match="not a number"):
        await collect(decode, decode_request(POISON, request_id="bad"))
    assert tokens_of(await good) == ORACLE.oracle(PROMPT, 40)
    await decode.at_rest()


async def test_a_failed_step_gives_all_requests_back_and_the_worker_goes_on(decode: Worker) -> None:
    decode.model.is_broken = True
    both = [collect(decode, decode_request(request_id=name)) for name in ("one", "two")]
    errors = await asyncio.gather(*both, return_exceptions=True)
    assert {type(error) for error in errors} == {Unavailable}
    decode.model.is_broken = False
    await decode.at_rest()
    assert tokens_of(await collect(decode, decode_request())) == ORACLE.oracle(PROMPT, 40)


async def test_a_worker_whose_books_are_wrong_says_so_and_stops(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = asyncio.Event()
    async with serving(Role.DECODE, node, on_broken=setter_of(broken)) as worker:
        worker.model.is_broken = True
        monkeypatch.setattr(worker.engine, "check", lambda: ["a page is lost"])
        with pytest.raises(Unavailable):
            await collect(worker, decode_request())
        async with asyncio.timeout(TIMEOUT_S):
            await broken.wait()
        with pytest.raises(Unavailable):
            await collect(worker, decode_request())
        status = await worker.service.get_status(worker_pb2.GetWorkerStatusRequest(check=True))
        assert status.state == "broken"
        assert "the engine's thread has ended" in status.problems


async def test_a_worker_that_fails_on_and_on_stops(decode: Worker) -> None:
    decode.model.is_broken = True
    for _ in range(4):
        assert decode.service.state.value == "ready"
        with pytest.raises(Unavailable):
            await collect(decode, decode_request())
    assert decode.service.state.value == "broken"


async def test_an_engine_that_hangs_is_given_up_and_may_go_on_without_harm(node: Node) -> None:
    broken = asyncio.Event()
    async with serving(Role.DECODE, node, on_broken=setter_of(broken), max_silence_s=MIN_SILENCE_S) as worker:
        await collect(worker, decode_request())
        worker.model.may_go.clear()
        hung = [asyncio.create_task(collect(worker, decode_request(request_id=name))) for name in ("a", "b")]
        async with asyncio.timeout(TIMEOUT_S):
            await broken.wait()
        answers = await asyncio.gather(*hung, return_exceptions=True)
        assert [type(answer) for answer in answers] == [Unavailable, Unavailable]
        with pytest.raises(Unavailable):
            await collect(worker, decode_request(request_id="c"))
        status = await worker.service.get_status(worker_pb2.GetWorkerStatusRequest())
        assert (status.state, status.engine_silent_s) == ("broken", MIN_SILENCE_S)
        worker.model.may_go.set()
        await worker.service.close()
        assert not worker.engine.has_requests
        assert worker.engine.check() == []


async def test_draining_lets_open_requests_end_and_takes_no_new_ones(decode: Worker) -> None:
    decode.model.may_go.clear()
    going = asyncio.create_task(collect(decode, decode_request()))
    await decode.at_work()
    await decode.service.start_drain(worker_pb2.StartDrainRequest())
    with pytest.raises(Unavailable):
        await collect(decode, decode_request(request_id="new"))
    draining = asyncio.create_task(decode.service.drain(TIMEOUT_S))
    decode.model.may_go.set()
    assert await draining == 0
    assert tokens_of(await going) == ORACLE.oracle(PROMPT, 40)
    assert (await decode.at_rest()).state == "draining"


async def test_requests_that_outlast_the_grace_go_back_to_the_router(decode: Worker) -> None:
    updates = decode.service.decode(decode_request(sampling=greedy(3000)))
    await anext(updates)
    assert await decode.service.drain(0.0) == 1
    with pytest.raises(Unavailable):
        [update async for update in updates]
    await decode.at_rest()


async def test_each_role_serves_its_own_call(prefill: Worker, decode: Worker) -> None:
    with pytest.raises(Unsupported):
        await decode.service.prefill(prefill_request())
    with pytest.raises(Unsupported):
        await anext(prefill.service.decode(decode_request()))


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        pytest.param(prefill_request(prompt=()), "prompt", id="no prompt"),
        pytest.param(prefill_request(prompt=(VOCAB_SIZE,)), "prompt", id="no such token"),
        pytest.param(prefill_request(sampling=greedy(1 << 20)), "max_tokens", id="longer than the context"),
        pytest.param(prefill_request(sampling=greedy(1, n=0)), "n", id="no choices"),
        pytest.param(prefill_request(sampling=greedy(1, n=10**9)), "n", id="too many choices"),
        pytest.param(prefill_request(request_id=""), "request_id", id="no id"),
        pytest.param(worker_pb2.PrefillRequest(request_id="r"), "namespace_root", id="no root"),
    ],
)
async def test_refuses_what_would_upset_the_engine(
    prefill: Worker, request_: worker_pb2.PrefillRequest, param: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await prefill.service.prefill(request_)
    assert raised.value.ids["param"] == param


async def test_renewed_holds_are_kept_and_released_ones_are_not(prefill: Worker) -> None:
    await prefill.service.prefill(prefill_request())
    await prefill.service.renew(worker_pb2.RenewRequest(request_ids=["r"]))
    assert status_of("host", (await prefill.status()).tiers).counts["holds"] == 1
    await prefill.service.release(worker_pb2.ReleaseRequest(request_ids=["r"]))
    assert status_of("host", (await prefill.status()).tiers).counts["holds"] == 0


async def test_closing_ends_open_calls(node: Node) -> None:
    async with serving(Role.DECODE, node) as worker:
        updates = worker.service.decode(decode_request(sampling=greedy(3000)))
        await anext(updates)
    with pytest.raises(Unavailable):
        [update async for update in updates]
