import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from decode_worker.behaviour import DecodeJob
from engine.model.hash_model import HashModel
from tests.harness.known_model import LAYOUT
from tests.harness.node import Node
from tests.harness.one_worker import (
    POISON,
    PROMPT,
    TIMEOUT_S,
    VOCAB_SIZE,
    Caller,
    Worker,
    attempts_of,
    begin_of,
    greedy,
    prompt_source,
    serving,
    timeless_node,
    tokens_of,
)
from wire.convert import error_from_pb, tiers_from_pb, tiers_to_pb
from wire.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    PromptReturned,
    RequestExists,
    Unavailable,
    Unsupported,
    WorkerLeaving,
)
from wire.ids import NUMBER_BITS, AttemptId
from wire.pb import inference_pb2, worker_pb2
from wire.pools import Role
from wire.sampling import SamplingParams
from worker.config import MIN_SILENCE_S
from worker.job import News
from worker.line import WorkerLine
from worker.service import Cold

ORACLE = HashModel(LAYOUT, VOCAB_SIZE)
ATTEMPT = AttemptId("r/1")


@pytest.fixture
def node() -> Node:
    return timeless_node()


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


async def read(line: WorkerLine) -> list[worker_pb2.Update]:
    """The updates of the next message."""
    async with asyncio.timeout(TIMEOUT_S):
        response = await line.next()
    assert response is not None
    return list(response.updates)


async def test_hands_a_request_over_and_decode_computes_nothing_of_the_prompt(prefill: Worker, decode: Worker) -> None:
    answer = await prefill.caller.prefill(begin_of())
    assert answer.prompt.computed_tokens == len(PROMPT)
    assert answer.num_held_blocks == 7
    assert await prefill.num_holds() == 1
    first = list(answer.choices[0].token_ids)
    updates = await decode.caller.decode(begin_of(outputs=[first]))
    assert first + tokens_of(updates) == ORACLE.oracle(PROMPT, 40)
    fetched = worker_pb2.PromptSource(cached_tokens=tiers_to_pb({"host": len(PROMPT)}), computed_tokens=0)
    assert prompt_source(updates) == fetched
    status = await decode.at_rest()
    assert status.computed_prompt_tokens == 0
    assert status.generated_tokens == 39
    await prefill.at_rest()


async def test_a_second_prompt_finds_the_first_on_the_device(prefill: Worker) -> None:
    await prefill.caller.prefill(begin_of())
    answer = await prefill.caller.prefill(begin_of((*PROMPT, 7, 8), request_id="second"))
    assert tiers_from_pb(answer.prompt.cached_tokens) == {"device": 96}
    assert answer.prompt.computed_tokens == len(PROMPT) + 2 - 96


async def test_choices_are_handed_over_and_go_on_together(prefill: Worker, decode: Worker) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=20, n=3, ignore_eos=True)
    answer = await prefill.caller.prefill(begin_of(sampling=sampling, outputs=[[]] * 3))
    firsts = [tokens_of([answer], index) for index in range(3)]
    assert [len(first) for first in firsts] == [1, 1, 1]
    apart = await decode.caller.decode(begin_of(sampling=sampling, outputs=firsts))
    alone = await decode.caller.decode(begin_of(sampling=sampling, request_id="alone", outputs=[[]] * 3))
    assert [firsts[n] + tokens_of(apart, n) for n in range(3)] == [tokens_of(alone, n) for n in range(3)]
    assert len({tuple(tokens_of(alone, n)) for n in range(3)}) == 3


async def test_a_request_that_ends_with_its_first_token_holds_nothing(prefill: Worker) -> None:
    answer = await prefill.caller.prefill(begin_of(sampling=greedy(1)))
    assert answer.choices[0].finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert answer.num_held_blocks == 0
    await prefill.at_rest()


async def test_decode_alone_computes_the_prompt(decode: Worker) -> None:
    updates = await decode.caller.decode(begin_of())
    assert tokens_of(updates) == ORACLE.oracle(PROMPT, 40)
    assert prompt_source(updates).computed_tokens == len(PROMPT)
    assert [span.name for span in updates[-1].end.spans] == [
        "decode.queue",
        "decode.fetch",
        "decode.wait_turn",
        "decode.compute",
        "decode.generate",
    ]


async def test_attempts_share_a_line_and_each_gets_its_own_tokens(decode: Worker) -> None:
    begins = [begin_of(PROMPT[number:], request_id=str(number)) for number in range(8)]
    outputs = await asyncio.gather(*(decode.caller.decode(begin) for begin in begins))
    assert [tokens_of(updates) for updates in outputs] == [ORACLE.oracle(PROMPT[number:], 40) for number in range(8)]


async def test_a_router_that_reads_nothing_holds_up_no_step_and_finds_one_update_of_each_attempt(
    decode: Worker,
) -> None:
    line = decode.service.connect()
    for number in range(4):
        line.take(worker_pb2.ConnectRequest(begins=[begin_of(request_id=str(number), sampling=greedy(200))]))
    assert (await decode.at_rest()).generated_tokens == 4 * 200
    updates = await read(line)
    assert sorted(update.id for update in updates) == ["0/1", "1/1", "2/1", "3/1"]
    for update in updates:
        assert tokens_of([update]) == ORACLE.oracle(PROMPT, 200)
        assert update.HasField("end")


async def test_an_aborted_prefill_leaves_nothing_behind(prefill: Worker) -> None:
    prefill.model.may_go.clear()
    attempt = prefill.caller.begin(begin_of())
    await prefill.at_work()
    attempt.abort()
    await prefill.was_aborted()
    prefill.model.may_go.set()
    assert (await prefill.at_rest()).generated_tokens <= 1


async def test_a_prompt_that_is_recalled_goes_back_unless_it_has_begun(prefill: Worker) -> None:
    prefill.model.may_go.clear()
    first = prefill.caller.begin(begin_of())
    await prefill.at_work()
    second = prefill.caller.begin(begin_of(request_id="second"))
    async with asyncio.timeout(TIMEOUT_S):
        while len(prefill.service.attempts) < 2:
            await prefill.service.status()
    for attempt in ("r/1", "second/1", "unknown/1"):
        prefill.caller.line.recall(AttemptId(attempt))
    prefill.service.connect().take(worker_pb2.ConnectRequest(recalls=["second/1"]))  # of no attempt on that line
    await prefill.service.status()
    prefill.model.may_go.set()
    with pytest.raises(PromptReturned):
        await second.end()
    [update] = second.updates
    assert [span.name for span in update.end.spans] == ["prefill.queue"]
    assert tokens_of(await first.end()) == ORACLE.oracle(PROMPT, 1)
    status = await prefill.idle()
    assert (status.computed_prompt_tokens, await prefill.num_holds()) == (len(PROMPT), 1)
    again = await prefill.caller.prefill(begin_of(request_id="second", attempt=2))
    assert tokens_of([again]) == ORACLE.oracle(PROMPT, 1)


async def test_an_abort_takes_the_attempt_out_of_the_engine(decode: Worker) -> None:
    attempt = decode.caller.begin(begin_of(sampling=greedy(3000)))
    await attempt.first()
    attempt.abort()
    assert (await decode.at_rest()).generated_tokens < 3000


async def test_an_attempt_goes_on_with_the_choices_that_are_not_ended(decode: Worker) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=1000, n=2, ignore_eos=True)
    attempt = decode.caller.begin(begin_of(sampling=sampling, outputs=[[]] * 2))
    await attempt.first()
    attempt.end_choice(1)
    updates = await attempt.end()
    assert len(tokens_of(updates, 0)) == 1000
    assert len(tokens_of(updates, 1)) < 1000
    assert (await decode.at_rest()).generated_tokens < 2000


async def test_only_the_line_of_an_attempt_may_abort_it(decode: Worker) -> None:
    decode.model.may_go.clear()
    attempt = decode.caller.begin(begin_of())
    await decode.at_work()
    decode.service.connect().take(worker_pb2.ConnectRequest(aborts=[ATTEMPT]))
    decode.model.may_go.set()
    assert tokens_of(await attempt.end()) == ORACLE.oracle(PROMPT, 40)


@pytest.mark.parametrize("time_left_s", [0.05, 1e-9])
async def test_the_workers_own_timer_ends_an_attempt(decode: Worker, time_left_s: float) -> None:
    decode.model.may_go.clear()
    with pytest.raises(DeadlineExceeded):
        await decode.caller.decode(begin_of(time_left_s=time_left_s))
    decode.model.may_go.set()
    assert (await decode.at_rest()).generated_tokens <= 1


async def test_an_attempt_ends_once(decode: Worker) -> None:
    decode.model.may_go.clear()
    line = decode.service.connect()
    line.take(worker_pb2.ConnectRequest(begins=[begin_of(time_left_s=0.05)]))
    while not (update := (await read(line))[0]).HasField("end"):
        pass
    assert isinstance(error_from_pb(update.end.error), DeadlineExceeded)
    decode.model.may_go.set()
    await decode.at_rest()
    line.take(worker_pb2.ConnectRequest(asks=[worker_pb2.Ask(number=1, info=worker_pb2.GetInfo())]))
    assert await read(line) == []


async def test_a_later_attempt_takes_the_place_of_an_earlier_one(decode: Worker) -> None:
    earlier = decode.caller.begin(begin_of(sampling=greedy(3000), attempt=2))
    await earlier.first()
    with pytest.raises(RequestExists):
        await decode.caller.decode(begin_of(attempt=1))
    later = await decode.caller.decode(begin_of(attempt=3))
    assert attempts_of(later) == {3}
    assert tokens_of(later) == ORACLE.oracle(PROMPT, 40)
    with pytest.raises(Cancelled):
        await earlier.end()
    await decode.at_rest()


async def test_an_attempt_that_runs_is_not_begun_again_and_goes_on(decode: Worker) -> None:
    decode.model.may_go.clear()
    line = decode.service.connect()
    line.take(worker_pb2.ConnectRequest(begins=[begin_of()]))
    await decode.at_work()
    line.take(worker_pb2.ConnectRequest(begins=[begin_of()]))
    updates = await read(line)
    assert not any(update.HasField("end") for update in updates)
    decode.model.may_go.set()
    await decode.at_rest()
    updates += await read(line)
    assert tokens_of(updates) == ORACLE.oracle(PROMPT, 40)
    assert not updates[-1].end.HasField("error")


@pytest.mark.parametrize("attempt", [1, 2, 3])
async def test_an_attempt_on_another_line_ousts_any_earlier_one(decode: Worker, attempt: int) -> None:
    earlier = decode.caller.begin(begin_of(sampling=greedy(3000), attempt=2))
    await earlier.first()
    another = Caller(decode.service)
    assert tokens_of(await another.decode(begin_of(attempt=attempt))) == ORACLE.oracle(PROMPT, 40)
    with pytest.raises(Cancelled):
        await earlier.end()
    await another.close()
    await decode.at_rest()


async def test_two_routers_serve_one_request_id_at_once(decode: Worker) -> None:
    numbers = [(incarnation << NUMBER_BITS) + 1 for incarnation in (7, 8)]
    another = Caller(decode.service)
    first, second = (
        asyncio.create_task(caller.decode(begin_of(sampling=greedy(3000 - 40), attempt=number)))
        for caller, number in zip((decode.caller, another), numbers, strict=True)
    )
    for updates in (await first, await second):
        assert tokens_of(updates) == ORACLE.oracle(PROMPT, 3000 - 40)
    await another.close()
    await decode.at_rest()


async def test_a_line_that_ends_aborts_what_was_begun_on_it_and_nothing_else(decode: Worker) -> None:
    another = Caller(decode.service)
    lost = [another.begin(begin_of(request_id=name, sampling=greedy(3000))) for name in ("a", "b")]
    for attempt in lost:
        await attempt.first()
    kept = decode.caller.begin(begin_of())
    another.transport.kill()
    for attempt in lost:
        with pytest.raises(Unavailable):
            await attempt.end()
    assert tokens_of(await kept.end()) == ORACLE.oracle(PROMPT, 40)
    assert (await decode.at_rest()).generated_tokens < 2 * 3000


async def test_holds_outlive_their_line(prefill: Worker) -> None:
    another = Caller(prefill.service)
    await another.prefill(begin_of())
    await another.close()
    await prefill.idle()
    assert await prefill.num_holds() == 1
    prefill.caller.line.release(ATTEMPT)
    await prefill.at_rest()


async def test_one_bad_request_does_not_touch_the_others(decode: Worker) -> None:
    good = decode.caller.begin(begin_of(request_id="good"))
    with pytest.raises(BatonError, match="not finite"):
        await decode.caller.decode(begin_of(POISON, request_id="bad"))
    assert tokens_of(await good.end()) == ORACLE.oracle(PROMPT, 40)
    await decode.at_rest()


async def test_a_bug_in_a_job_ends_its_attempt_alone(decode: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    take = DecodeJob.take

    def stumble(job: DecodeJob, news: News, now_s: float) -> worker_pb2.Update | None:
        if job.request.attempt_id == "bad/1" and isinstance(news, worker_pb2.Update):
            raise KeyError("a bug")
        return take(job, news, now_s)

    monkeypatch.setattr(DecodeJob, "take", stumble)
    good = decode.caller.begin(begin_of(request_id="good"))
    with pytest.raises(BatonError, match="incident"):
        await decode.caller.decode(begin_of(request_id="bad"))
    assert tokens_of(await good.end()) == ORACLE.oracle(PROMPT, 40)
    await decode.at_rest()


async def test_tokens_come_with_log_probabilities(decode: Worker) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=2)
    updates = await decode.caller.decode(begin_of(sampling=sampling))
    told = [one for update in updates for choice in update.choices for one in choice.logprobs]
    assert [one.token_id for one in told] == tokens_of(updates) == ORACLE.oracle(PROMPT, 5)
    assert [(len(one.top), one.top[0].token_id, one.top[0].logprob) for one in told] == [
        (2, one.token_id, one.logprob) for one in told
    ]


async def test_a_step_that_runs_gives_nothing_to_a_later_attempt_of_the_same_id(decode: Worker) -> None:
    """As after a restart of the router, which numbers attempts from 1 again."""
    another = Caller(decode.service)
    decode.model.may_go.clear()
    earlier = another.begin(begin_of(PROMPT[1:], sampling=greedy(3000)))
    await decode.at_work()
    later = decode.caller.begin(begin_of())
    with pytest.raises(Cancelled):
        await earlier.end()
    decode.model.may_go.set()
    assert tokens_of(await later.end()) == ORACLE.oracle(PROMPT, 40)
    await another.close()
    await decode.at_rest()


async def test_a_failed_step_gives_all_requests_back_and_the_worker_goes_on(decode: Worker) -> None:
    decode.model.is_broken = True
    both = [decode.caller.decode(begin_of(request_id=name)) for name in ("one", "two")]
    errors = await asyncio.gather(*both, return_exceptions=True)
    assert {type(error) for error in errors} == {Unavailable}
    decode.model.is_broken = False
    await decode.at_rest()
    assert tokens_of(await decode.caller.decode(begin_of())) == ORACLE.oracle(PROMPT, 40)


async def test_a_worker_whose_books_are_wrong_says_so_and_stops(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = asyncio.Event()
    async with serving(Role.DECODE, node, on_broken=setter_of(broken)) as worker:
        worker.model.is_broken = True
        monkeypatch.setattr(worker.engine, "check", lambda: ["a page is lost"])
        with pytest.raises(Unavailable):
            await worker.caller.decode(begin_of())
        async with asyncio.timeout(TIMEOUT_S):
            await broken.wait()
        with pytest.raises(Unavailable):
            await worker.caller.decode(begin_of())
        status = await worker.caller.line.questions.status(check=True, timeout_s=TIMEOUT_S)
        assert status.state == "broken"
        assert "the engine's thread has ended" in status.problems


async def test_a_worker_that_fails_on_and_on_stops(decode: Worker) -> None:
    decode.model.is_broken = True
    for _ in range(4):
        assert decode.service.attempts.state.value == "ready"
        with pytest.raises(Unavailable):
            await decode.caller.decode(begin_of())
    assert decode.service.attempts.state.value == "broken"


async def test_an_engine_that_hangs_is_given_up_and_may_go_on_without_harm(node: Node) -> None:
    broken = asyncio.Event()
    async with serving(Role.DECODE, node, on_broken=setter_of(broken), max_silence_s=MIN_SILENCE_S) as worker:
        await worker.caller.decode(begin_of())
        worker.model.may_go.clear()
        hung = [worker.caller.begin(begin_of(request_id=name)) for name in ("a", "b")]
        async with asyncio.timeout(TIMEOUT_S):
            await broken.wait()
        for attempt in hung:
            with pytest.raises(Unavailable, match="hangs"):
                await attempt.end()
        with pytest.raises(Unavailable):
            await worker.caller.decode(begin_of(request_id="c"))
        status = await worker.service.status()
        assert (status.state, status.engine_silent_s) == ("broken", MIN_SILENCE_S)
        worker.model.may_go.set()
        await worker.service.close()
        assert not worker.engine.has_requests
        assert worker.engine.check() == []


async def test_asks_are_answered_while_a_step_of_the_engine_runs(decode: Worker) -> None:
    decode.model.may_go.clear()
    attempt = decode.caller.begin(begin_of())
    await decode.at_work()
    info = await decode.caller.line.questions.info(TIMEOUT_S)
    assert (info.worker_id, info.role, info.layout) == ("decode-0", "decode", LAYOUT.encode())
    assert (await decode.caller.line.questions.status(check=False, timeout_s=TIMEOUT_S)).state == "ready"
    decode.model.may_go.set()
    assert tokens_of(await attempt.end()) == ORACLE.oracle(PROMPT, 40)


async def test_a_question_of_a_later_release_is_answered_with_an_error(decode: Worker) -> None:
    line = decode.service.connect()
    line.take(worker_pb2.ConnectRequest(asks=[worker_pb2.Ask(number=7)]))
    async with asyncio.timeout(TIMEOUT_S):
        response = await line.next()
    assert response is not None
    (answer,) = response.answers
    assert answer.number == 7
    assert isinstance(error_from_pb(answer.error), Unsupported)


async def test_draining_lets_open_requests_end_and_takes_no_new_ones(decode: Worker) -> None:
    decode.model.may_go.clear()
    going = decode.caller.begin(begin_of())
    await decode.at_work()
    draining = asyncio.create_task(decode.service.attempts.drain(TIMEOUT_S))
    await asyncio.sleep(0)
    with pytest.raises(WorkerLeaving):
        await decode.caller.decode(begin_of(request_id="new"))
    assert not draining.done()
    decode.model.may_go.set()
    assert await draining == 0
    assert tokens_of(await going.end()) == ORACLE.oracle(PROMPT, 40)
    assert (await decode.at_rest()).state == "draining"


async def test_requests_that_outlast_the_grace_go_back_to_the_router(decode: Worker) -> None:
    attempt = decode.caller.begin(begin_of(sampling=greedy(3000)))
    await attempt.first()
    assert await decode.service.attempts.drain(0.0) == 1
    with pytest.raises(WorkerLeaving):
        await attempt.end()
    await decode.at_rest()


@pytest.mark.parametrize(
    ("begin", "param"),
    [
        pytest.param(begin_of(prompt=()), "prompt", id="no prompt"),
        pytest.param(begin_of(prompt=(VOCAB_SIZE,)), "prompt", id="no such token"),
        pytest.param(begin_of(sampling=greedy(1 << 20)), "max_tokens", id="longer than the context"),
        pytest.param(begin_of(outputs=()), "choices", id="no choices"),
        pytest.param(begin_of(outputs=((),) * 17), "choices", id="too many choices"),
        pytest.param(begin_of(request_id=""), "id", id="no id"),
        pytest.param(worker_pb2.Begin(id=ATTEMPT), "namespace_root", id="no root"),
    ],
)
async def test_refuses_what_would_upset_the_engine(prefill: Worker, begin: worker_pb2.Begin, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await prefill.caller.prefill(begin)
    assert raised.value.ids["param"] == param
    assert prefill.service.check() == []


async def test_renewed_holds_are_kept_and_released_ones_are_not(prefill: Worker) -> None:
    await prefill.caller.prefill(begin_of())
    other = AttemptId("r/99")
    prefill.caller.line.renew([ATTEMPT, other])
    assert await prefill.num_holds() == 1
    while not (ended := prefill.caller.line.take_ended_holds()):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert ended == [other]
    prefill.caller.line.release(ATTEMPT)
    await prefill.at_rest()


async def test_a_late_release_of_an_attempt_leaves_the_hold_of_the_next_one(prefill: Worker) -> None:
    for attempt in (1, 2):
        await prefill.caller.prefill(begin_of(attempt=attempt))
    assert await prefill.num_holds() == 2
    prefill.service.release([ATTEMPT])
    assert await prefill.num_holds() == 1
    prefill.service.release([AttemptId("r/2")])
    await prefill.at_rest()


async def test_closing_ends_open_attempts_and_their_lines(node: Node) -> None:
    async with serving(Role.DECODE, node) as worker:
        attempt = worker.caller.begin(begin_of(sampling=greedy(3000)))
        await attempt.first()
        await worker.service.close()
        with pytest.raises(Unavailable, match="the worker has stopped"):
            await attempt.end()
        assert worker.service.check() == []
        with pytest.raises(Unavailable, match="closed the line"):
            await worker.caller.line.questions.info(TIMEOUT_S)


async def test_what_was_compiled_while_requests_waited_is_a_problem(
    decode: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await decode.status()
    monkeypatch.setattr(decode.service, "_warm", Cold(num_late=2))
    (problem,) = (await decode.service.status()).problems
    assert problem.startswith("2 kernels or graphs were made while requests waited")
