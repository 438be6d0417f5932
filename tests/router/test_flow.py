"""The way of one request before workers that say what the test says: each step, each loss, each moment of a stop."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from router.config import LatencyBounds, RouterConfig
from router.requests import attempt
from router.requests.answer import ChoiceStreams
from router.requests.dispatch import OpenRequest
from router.requests.prompt import MAX_TINY_LEN, encode
from router.requests.replay import MAX_ATTEMPTS, MIN_PROGRESS
from tests.harness.cluster import until
from tests.harness.fake_cluster import CONFIG, FakeCluster, request, running
from tests.harness.scripted_worker import ScriptedWorker, chunk, so_far, tokens
from wire.convert import tiers_to_pb
from wire.errors import (
    AttemptsExhausted,
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RequestExists,
    RouterLeaving,
    Unavailable,
    WireError,
    WorkerLeaving,
)
from wire.ids import AttemptId, BlockKey, WorkerId, number_of, request_of
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.pools import Role

LOST = Unavailable("the worker is dead")
LENGTH = pb.FINISH_REASON_LENGTH
STOP = pb.FINISH_REASON_STOP
ENOUGH = Cancelled("enough")


class Client:
    """The client of one request, which reads all that comes; `complete` or `error` is the end."""

    def __init__(self, opened: OpenRequest) -> None:
        self.opened = opened
        self.chunks: list[pb.Chunk] = []
        self.complete: pb.Complete | None = None
        self.error: Exception | None = None
        self._reading = asyncio.create_task(self._read())

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    async def has(self, text: str) -> None:
        """Returns when the client has this text, and no other."""
        await until(lambda: self.text == text)

    async def completed(self) -> pb.Complete:
        await asyncio.wait([self._reading])
        assert self.complete is not None, self.error
        return self.complete

    async def failed(self) -> Exception:
        await asyncio.wait([self._reading])
        assert self.error is not None
        return self.error

    async def _read(self) -> None:
        try:
            async for response in self.opened.outbox:
                if response.WhichOneof("event") == "complete":
                    self.complete = response.complete
                else:
                    self.chunks.append(response.chunk)
        except BatonError as error:
            self.error = error


class Stage:
    """A router before scripted workers: p0, p1 prefill, d0, d1 decode."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self._scripted: dict[str, ScriptedWorker] = {}

    async def enlist(self, *names: str, num_arena_blocks: int = 1000) -> None:
        for name in names:
            role = Role.PREFILL if name.startswith("p") else Role.DECODE
            worker = self._scripted.setdefault(name, ScriptedWorker(WorkerId(name), role, num_arena_blocks))
            self.cluster.workers[name] = worker
        await self.cluster.enlist(*names)

    def __getitem__(self, name: str) -> ScriptedWorker:
        return self._scripted[name]

    def busy(self, name: str) -> AbstractContextManager[None]:
        """A context in which others are preferred to this worker, though it is not lost."""
        return self.cluster.router.members[WorkerId(name)].assigned(1, 1000)

    @property
    def releases(self) -> list[AttemptId]:
        return [attempt for worker in self._scripted.values() for attempt in worker.releases]

    def open(self, request_id: str = "", text: str = "", time_left_s: float = 20.0, **sampling: Any) -> Client:
        message = request(**{"max_tokens": 50, **sampling})
        if request_id:
            message.request_id = request_id
        message.text = text or message.text
        return Client(self.cluster.open(message, time_left_s))

    async def begun(self, name: str, count: int = 1) -> worker_pb2.Begin:
        """Returns the latest attempt at a worker, once it has had so many."""
        await until(lambda: len(self[name].begins) >= count)
        assert len(self[name].begins) == count
        return self[name].begins[-1]

    async def prefilled(self, **sampling: Any) -> Client:
        """A request whose prefill gave "a", and whose decode has begun at d0."""
        client = self.open(**sampling)
        await self.begun("p0")
        self["p0"].say(tokens("a", 0), prompt={"device": 4, "redis": 2}, ends=True)
        await self.begun("d0")
        return client


@asynccontextmanager
async def stage_of(*names: str, config: RouterConfig = CONFIG, num_arena_blocks: int = 1000) -> AsyncIterator[Stage]:
    """A stage that is checked for leaks in the end."""
    async with running(0, 0, config) as cluster:
        stage = Stage(cluster)
        await stage.enlist(*names, num_arena_blocks=num_arena_blocks)
        yield stage


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with stage_of("p0", "p1", "d0", "d1") as stage:
        yield stage
        await stage.cluster.come_to_rest()
        assert serving() == []


def serving() -> list[str]:
    """Tasks that serve requests."""
    coroutines = [repr(task.get_coro()) for task in asyncio.all_tasks()]
    return [coroutine for coroutine in coroutines if "Flow.serve" in coroutine]


async def settle() -> None:
    """Lets everything happen that waits for nothing."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_request_from_beginning_to_end(stage: Stage) -> None:
    client = stage.open()
    begin = await stage.begun("p0")
    assert list(begin.choices) == [so_far("")]
    assert 19 < begin.time_left_s <= 20
    stage["p0"].say(tokens("a", 0), prompt={"device": 4, "redis": 2}, ends=True)
    decode = await stage.begun("d0")
    assert (decode.id, list(decode.choices)) == (begin.id, [so_far("a")])
    assert (decode.prompt, decode.namespace_root) == (begin.prompt, begin.namespace_root)
    assert (stage.releases, len(serving())) == ([], 1)
    stage["d0"].say(prompt={"host": 12})
    await until(lambda: stage.releases == [AttemptId(begin.id)])
    stage["d0"].say(tokens("bc", 1))
    await client.has("abc")
    stage["d0"].say(tokens("d", 3, finish_reason=LENGTH))
    await client.has("abcd")
    assert client.complete is None, "a worker has the last word"
    stage["d0"].say(ends=True)
    complete = await client.completed()
    assert client.chunks == [chunk("a"), chunk("bc"), chunk("d", ended=pb.Choice(finish_reason=LENGTH))]
    assert (complete.timeline.prefill_worker, complete.timeline.decode_worker) == ("p0", "d0")
    complete.ClearField("timeline")
    assert complete == pb.Complete(
        choices=[pb.Choice(index=0, finish_reason=LENGTH)],
        usage=pb.Usage(prompt_tokens=12, completion_tokens=4, cached_tokens=tiers_to_pb({"device": 4, "redis": 2})),
        seed=1,
    )
    assert (stage["p0"].aborts, stage["d0"].aborts) == ([], [])
    assert len(stage.releases) == 1


async def test_the_end_at_the_first_token(stage: Stage) -> None:
    client = stage.open()
    begin = await stage.begun("p0")
    stage["p0"].say(tokens("a", 0, finish_reason=STOP, stop_token_id=97), prompt={}, ends=True)
    assert (await client.completed()).choices[0].stop_token_id == 97
    await until(lambda: stage.releases == [AttemptId(begin.id)])
    assert stage["d0"].begins == []


async def test_without_prefill_workers() -> None:
    async with stage_of("d0") as stage:
        client = stage.open()
        assert list((await stage.begun("d0")).choices) == [so_far("")]
        stage["d0"].say(prompt={"host": 3})
        stage["d0"].say(tokens("ab", 0, finish_reason=LENGTH), ends=True)
        complete = await client.completed()
        assert complete.usage.cached_tokens == tiers_to_pb({"host": 3})
        assert complete.timeline.prefill_worker == ""
        assert stage.releases == []


async def test_usage_is_what_prefill_saw_whatever_decode_fetches(stage: Stage) -> None:
    client = await stage.prefilled()
    stage["d0"].say(tokens("b", 1, finish_reason=LENGTH), prompt={"host": 12}, ends=True)
    assert (await client.completed()).usage.cached_tokens == tiers_to_pb({"device": 4, "redis": 2})


async def test_usage_is_what_the_attempt_saw_that_led_to_tokens(stage: Stage) -> None:
    client = stage.open()
    await stage.begun("p0")
    stage["p0"].say(prompt={"host": 12}, error=LOST)
    await stage.begun("p1")
    stage["p1"].say(tokens("a", 0, finish_reason=LENGTH), prompt={"redis": 8}, ends=True)
    assert (await client.completed()).usage.cached_tokens == tiers_to_pb({"redis": 8})


@pytest.mark.parametrize(
    "error", [LOST, Cancelled("the server stops"), WireError("nonsense"), RequestExists("not quite gone")]
)
async def test_a_lost_prefill_worker_is_followed_by_another(stage: Stage, error: BatonError) -> None:
    client = stage.open()
    first = await stage.begun("p0")
    with stage.busy("p0"):
        stage["p0"].say(error=error)
        second = await stage.begun("p1")
    assert number_of(AttemptId(second.id)) > number_of(AttemptId(first.id))
    assert AttemptId(first.id) in stage.releases
    stage["p1"].say(tokens("a", 0, finish_reason=LENGTH), ends=True)
    assert (await client.completed()).timeline.prefill_worker == "p1"
    assert stage["p0"].aborts == [], "its worker has ended it"


async def test_workers_are_told_the_precedence_of_a_request(stage: Stage) -> None:
    """A prefill worker hears what its tenant was charged for output elsewhere; a decode worker counts that itself."""
    message = request(max_tokens=50)
    message.priority = -7
    first = Client(stage.cluster.open(message, 20.0))
    begin = await stage.begun("p0")
    assert (begin.weight, begin.priority, begin.output_cost) == (1.0, -7, 0.0)
    stage["p0"].say(tokens("a", 0), prompt={}, ends=True)
    await stage.begun("d0")
    stage["d0"].say(tokens("bc", 1))
    await first.has("abc")
    assert (stage["d0"].begins[0].priority, stage["d0"].begins[0].output_cost) == (-7, 0.0)
    second = stage.open()
    assert (await stage.begun("p0", 2)).output_cost == 6.0
    stage["p0"].say(tokens("x", 0, finish_reason=STOP, stop_token_id=97), prompt={}, ends=True)
    await second.completed()
    stage["d0"].say(tokens("", 3, finish_reason=LENGTH), ends=True)
    await first.completed()


async def test_a_prefill_worker_is_told_when_a_prompt_is_deferred() -> None:
    config = replace(CONFIG, limits=LatencyBounds(ttft_ms=2000.0))
    async with stage_of("p0", "d0", config=config) as stage:
        stage.cluster.router.members[WorkerId("p0")].prefill_token_s = 0.25
        client = stage.open(text="abcd")
        begin = await stage.begun("p0")
        assert begin.deferred_after_s == pytest.approx(1.0, abs=0.2), "two seconds, of which its four tokens take one"
        assert begin.deferred_until_s == pytest.approx(6.0, abs=0.2)
        stage["p0"].say(tokens("a", 0), prompt={}, ends=True)
        begin = await stage.begun("d0")
        assert (begin.deferred_after_s, begin.deferred_until_s) == (0.0, 0.0)
        stage["d0"].say(tokens("b", 1, finish_reason=LENGTH), ends=True)
        await client.completed()


async def test_a_prompt_at_another_worker_is_as_old_as_it_is_and_its_last_attempt_is_not_deferred() -> None:
    config = replace(CONFIG, limits=LatencyBounds(ttft_ms=2000.0))
    async with stage_of("p0", "p1", "d0", config=config) as stage:
        client, pool, until_s = stage.open(), (stage["p0"], stage["p1"]), list[float]()
        for number in range(MAX_ATTEMPTS):
            await until(lambda: sum(len(worker.begins) for worker in pool) == len(until_s) + 1)
            begins = (begin for worker in pool for begin in worker.begins)
            begin = max(begins, key=lambda one: number_of(AttemptId(one.id)))
            until_s.append(begin.deferred_until_s)
            worker = next(worker for worker in pool if begin in worker.begins)
            if number < MAX_ATTEMPTS - 1:
                await asyncio.sleep(0.1)
                worker.say(error=LOST)
        assert until_s[0] - until_s[1] == pytest.approx(0.1, abs=0.08)
        assert until_s[2] == 0.0, "other requests wait until its last attempt has ended"
        worker.say(tokens("a", 0, finish_reason=LENGTH), ends=True)
        await client.completed()


async def test_a_lost_decode_worker_is_followed_by_another_with_all_tokens_so_far(stage: Stage) -> None:
    client = await stage.prefilled()
    stage["d0"].say(tokens("bc", 1))
    stage["d0"].say(error=LOST)
    assert list((await stage.begun("d1")).choices) == [so_far("abc")]
    stage["d1"].say(tokens("d", 3, finish_reason=LENGTH), ends=True)
    await client.completed()
    assert client.text == "abcd"
    assert len(stage["p0"].begins) == 1


async def test_a_decode_worker_lost_before_any_token_leads_back_to_prefill() -> None:
    async with stage_of("d0", "d1") as stage:
        client = stage.open()
        await stage.begun("d0")
        await stage.enlist("d0", "d1", "p0")
        stage["d0"].say(error=LOST)
        await stage.begun("p0")
        stage["p0"].say(tokens("a", 0, finish_reason=LENGTH), ends=True)
        await client.completed()


LATE: list[dict[str, Any]] = [
    {"choices": [tokens("z", 1)]},
    {"choices": [tokens("z", 1, finish_reason=LENGTH)]},
    {"choices": [tokens("z", 9)]},
    {"prompt": {"host": 5}},
    {"ends": True},
    {"choices": [tokens("z", 1, finish_reason=LENGTH)], "ends": True},
    {"error": LOST},
    {"error": InvalidRequest("prompt", "is poison")},
]


def say_late(worker: ScriptedWorker, choices: list[worker_pb2.ChoiceTokens] | None = None, **news: Any) -> None:
    """Sends what an attempt still says: the first one at the request."""
    worker.say(*(choices or []), number=1, **news)


@pytest.mark.parametrize("late", LATE)
async def test_what_a_former_attempt_says_is_dropped(stage: Stage, late: dict[str, Any]) -> None:
    client = await stage.prefilled()
    with stage.busy("d0"):
        stage["d0"].say(tokens("c", 2))  # a gap ends the attempt here; its worker knows nothing of it yet
        await stage.begun("d1")
    say_late(stage["d0"], **late)
    await settle()
    assert client.text == "a"
    stage["d1"].say(tokens("b", 1, finish_reason=LENGTH), ends=True)
    await client.completed()
    assert client.text == "ab"


@pytest.mark.parametrize("late", LATE)
async def test_nothing_happens_after_the_end(stage: Stage, late: dict[str, Any]) -> None:
    client = await stage.prefilled()
    client.opened.stop(ENOUGH)
    say_late(stage["d0"], **late)
    assert await client.failed() is ENOUGH
    client.opened.stop(LOST)
    say_late(stage["d0"], **late)
    await settle()
    assert (client.error, client.complete, client.text) == (ENOUGH, None, "a")


async def test_a_request_under_a_former_id_gets_nothing_of_what_the_former_one_is_told(stage: Stage) -> None:
    """A client may use its id again at once, and a worker may still speak of the first."""
    first = await stage.prefilled(request_id="mine")
    first.opened.stop(ENOUGH)
    await first.failed()
    second = stage.open("mine", text="another prompt")
    await stage.begun("p0", 2)
    stage["p0"].say(tokens("A", 0), ends=True)
    await stage.begun("d0", 2)
    say_late(stage["d0"], [tokens("z", 1)])
    say_late(stage["d0"], error=InvalidRequest("prompt", "is poison"))
    stage["d0"].say(tokens("B", 1, finish_reason=LENGTH), ends=True)
    await second.completed()
    assert second.text == "AB"
    assert len(set(map(AttemptId, (begin.id for begin in stage["d0"].begins)))) == 2


async def test_tokens_that_do_not_follow_end_the_attempt(stage: Stage) -> None:
    client = await stage.prefilled()
    begin = stage["d0"].begins[0]
    with stage.busy("d0"):
        stage["d0"].say(tokens("b", 1), tokens("d", 3))
        assert list((await stage.begun("d1")).choices) == [so_far("ab")]
    await until(lambda: stage["d0"].aborts == [AttemptId(begin.id)])
    stage["d1"].say(tokens("", 2, finish_reason=LENGTH), ends=True)
    await client.completed()


async def test_a_prefill_that_skips_the_first_token_is_done_again(stage: Stage) -> None:
    client = stage.open()
    await stage.begun("p0")
    with stage.busy("p0"):
        stage["p0"].say(tokens("b", 1))
        await stage.begun("p1")
    stage["p1"].say(tokens("a", 0, finish_reason=LENGTH), ends=True)
    await client.completed()


async def test_an_attempt_that_its_worker_ends_too_early_is_made_again(stage: Stage) -> None:
    client = await stage.prefilled()
    with stage.busy("d0"):
        stage["d0"].say(ends=True)
        await stage.begun("d1")
    stage["d1"].say(tokens("b", 1, finish_reason=LENGTH), ends=True)
    await client.completed()


async def test_a_worker_lost_after_the_last_token_is_not_missed(stage: Stage) -> None:
    client = await stage.prefilled()
    stage["d0"].say(tokens("b", 1, finish_reason=LENGTH))
    await client.has("ab")
    stage["d0"].say(error=LOST)
    assert (await client.completed()).usage.completion_tokens == 2
    assert stage["d1"].begins == []


async def decoding(stage: Stage) -> ScriptedWorker:
    """Returns the worker at which the only open request decodes, once there is one."""
    workers = (stage["d0"], stage["d1"])
    await until(lambda: any(worker.open_calls for worker in workers))
    (worker,) = (worker for worker in workers if worker.open_calls)
    return worker


async def test_attempts_come_to_an_end_and_the_prompt_is_not_tried_again(stage: Stage) -> None:
    client = await stage.prefilled()
    for _ in range(MAX_ATTEMPTS):
        (await decoding(stage)).say(error=LOST)
    assert isinstance(await client.failed(), AttemptsExhausted)
    assert len(stage["d0"].begins) + len(stage["d1"].begins) == MAX_ATTEMPTS
    again = stage.open()
    assert isinstance(await again.failed(), AttemptsExhausted)
    assert len(stage["p0"].begins) == 1
    other = stage.open(text="another prompt")
    await stage.begun("p0", 2)
    other.opened.stop(ENOUGH)


async def test_attempts_that_lead_somewhere_do_not_count(stage: Stage) -> None:
    client = await stage.prefilled()
    for number in range(8):
        worker = await decoding(stage)
        worker.say(tokens("x" * MIN_PROGRESS, 1 + number * MIN_PROGRESS))
        worker.say(error=LOST)
    await decoding(stage)
    client.opened.stop(ENOUGH)
    await client.failed()
    assert len(client.text) == 1 + 8 * MIN_PROGRESS


async def test_a_worker_that_gives_the_request_back_is_not_lost(stage: Stage) -> None:
    client = await stage.prefilled()
    for _ in range(8):
        (await decoding(stage)).say(error=WorkerLeaving("it drains"))
    await decoding(stage)
    client.opened.stop(ENOUGH)
    assert await client.failed() is ENOUGH


async def test_an_error_of_the_request_ends_it(stage: Stage) -> None:
    client = await stage.prefilled()
    stage["d0"].say(tokens("b", 1), error=InvalidRequest("prompt", "is poison"))
    error = await client.failed()
    assert isinstance(error, InvalidRequest)
    assert (error.message, client.text) == ("prompt: is poison", "ab")
    assert stage["d1"].begins == []


async def test_a_choice_that_a_stop_string_ends_is_ended_at_its_worker(stage: Stage) -> None:
    client = stage.open(n=3, stop=["yz"])
    await stage.begun("p0")
    stage["p0"].say(tokens("a", 0), tokens("b", 0, index=1), tokens("c", 0, index=2), prompt={}, ends=True)
    begin = await stage.begun("d0")
    stage["d0"].say(tokens("yz", 1, index=1), tokens("d", 1, index=2, finish_reason=LENGTH), prompt={"host": 12})
    await until(lambda: bool(stage["d0"].ended_choices))
    assert stage["d0"].ended_choices == [(AttemptId(begin.id), 1)]
    stage["d0"].say(tokens("yz", 1), ends=True)
    assert [one.stop_string for one in (await client.completed()).choices] == ["yz", "yz", ""]
    assert stage["d0"].ended_choices == [(AttemptId(begin.id), 1)]


async def test_a_stop_string_across_workers_ends_the_attempt_at_the_last(stage: Stage) -> None:
    client = await stage.prefilled(stop=["xyz"])
    stage["d0"].say(tokens("bx", 1))
    stage["d0"].say(error=LOST)
    assert list((await stage.begun("d1")).choices) == [so_far("abx")]
    stage["d1"].say(tokens("yzef", 3))
    complete = await client.completed()
    assert complete.choices[0] == pb.Choice(finish_reason=STOP, stop_string="xyz")
    assert (client.text, complete.usage.completion_tokens) == ("ab", 5)
    await until(lambda: stage["d1"].aborts)


async def test_only_choices_that_go_on_are_decoded(stage: Stage) -> None:
    client = stage.open(n=2)
    await stage.begun("p0")
    stage["p0"].say(tokens("a", 0), tokens("b", 0, index=1, finish_reason=STOP, stop_token_id=98), ends=True)
    assert list((await stage.begun("d0")).choices) == [so_far("a")]
    stage["d0"].say(tokens("c", 1, finish_reason=LENGTH), ends=True)
    complete = await client.completed()
    assert [choice.finish_reason for choice in complete.choices] == [LENGTH, STOP]
    assert complete.usage.completion_tokens == 3


# What is tried alone


async def two_lost_twice(stage: Stage) -> tuple[Client, Client]:
    """Two requests that have lost two workers each: the first is tried alone, the second waits for that."""
    first, second = stage.open("first", text="the first prompt"), stage.open("second", text="the second prompt")
    for _ in range(MAX_ATTEMPTS - 1):
        for request_id in ("first", "second"):
            await lose(stage["d0"], request_id)
    await until(lambda: is_open(stage["d0"], "first"))
    await settle()
    assert not is_open(stage["d0"], "second")
    return first, second


async def lose(worker: ScriptedWorker, request_id: str, error: BatonError = LOST) -> None:
    """Ends the next attempt at a request there with an error that says nothing of the request."""
    await until(lambda: is_open(worker, request_id))
    worker.say(request_id=request_id, error=error)


def is_open(worker: ScriptedWorker, request_id: str) -> bool:
    begins = worker.begins_of(request_id)
    return bool(begins) and worker.has_open(AttemptId(begins[-1].id))


async def test_what_may_be_the_last_attempt_waits_while_another_is_tried_alone() -> None:
    async with stage_of("d0") as stage:
        first, second = await two_lost_twice(stage)
        stage["d0"].say(request_id="first", error=LOST)
        assert isinstance(await first.failed(), AttemptsExhausted)
        await until(lambda: is_open(stage["d0"], "second"))
        stage["d0"].say(tokens("a", 0, finish_reason=LENGTH), request_id="second", ends=True)
        await second.completed()


async def test_a_turn_alone_ends_as_soon_as_it_leads_somewhere() -> None:
    async with stage_of("d0") as stage:
        first, second = await two_lost_twice(stage)
        stage["d0"].say(tokens("x" * (MIN_PROGRESS - 1), 0), request_id="first")
        await settle()
        assert not is_open(stage["d0"], "second")
        stage["d0"].say(tokens("x", MIN_PROGRESS - 1), request_id="first")
        await until(lambda: is_open(stage["d0"], "second"))
        stage["d0"].say(request_id="first", error=LOST)
        await until(lambda: len(stage["d0"].begins_of("first")) == MAX_ATTEMPTS + 1)
        for client in (first, second):
            client.opened.stop(ENOUGH)


async def test_a_request_that_waits_to_be_tried_alone_keeps_nothing_from_others() -> None:
    async with stage_of("p0", "d0") as stage:
        clients = [stage.open("first", text="the first prompt"), stage.open("second", text="the second prompt")]
        for _ in range(MAX_ATTEMPTS - 1):
            for request_id in ("first", "second"):
                await lose(stage["p0"], request_id, WireError("nonsense"))
        await until(lambda: is_open(stage["p0"], "first"))
        stage["p0"].say(tokens("a", 0), request_id="first", ends=True)
        await stage.begun("d0")
        stage["d0"].say(prompt={})
        await until(lambda: stage.cluster.router.holds.check() == [])
        assert stage.cluster.router.members[WorkerId("p0")].num_choices == 0
        clients[0].opened.stop(ENOUGH)
        await until(lambda: is_open(stage["p0"], "second"))
        clients[1].opened.stop(ENOUGH)


async def test_the_last_attempt_is_not_spent_on_a_worker_that_is_dead_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "PROBE_TIMEOUT_S", 0.05)
    async with stage_of("d0", "d1", "d2", "d3") as stage:
        for name in ("d0", "d1", "d2"):
            stage[name].answers = False
        client = stage.open("first")
        await lose(stage["d0"], "first")
        await lose(stage["d1"], "first")
        await until(lambda: is_open(stage["d3"], "first"))
        assert stage["d2"].begins == []
        client.opened.stop(ENOUGH)


# A request that ends alone


async def two_on_one_line(stage: Stage, **sampling: Any) -> tuple[OpenRequest, Client]:
    """A request that is not read, and one that is; both decode at d0."""
    unread = stage.cluster.open(request(max_tokens=50, **sampling))
    await stage.begun("d0")
    other = stage.open("other", text="another prompt")
    await stage.begun("d0", 2)
    return unread, other


@pytest.mark.parametrize("ends", [False, True])
async def test_a_request_whose_outbox_is_full_ends_alone(ends: bool) -> None:
    """Also where the update that finds no room is the last one."""
    config = replace(CONFIG, settings=replace(CONFIG.settings, max_buffered_tokens=2))
    async with stage_of("d0", config=config) as stage:
        unread, other = await two_on_one_line(stage, n=3)
        first = request_of(AttemptId(stage["d0"].begins[0].id))
        endings: dict[str, Any] = {"finish_reason": LENGTH} if ends else {}
        gained = [tokens("a", 0, index=index, **endings) for index in range(3)]
        stage["d0"].say(*gained, request_id=first, ends=ends)
        stage["d0"].say(tokens("b", 0, finish_reason=LENGTH), request_id="other", ends=True)
        await other.completed()
        assert other.text == "b"
        client = Client(unread)
        assert isinstance(await client.failed(), Overloaded)
        ended = [pb.Choice(index=index, finish_reason=LENGTH) if ends else None for index in range(2)]
        assert client.chunks == [chunk("a", ended=ended[0]), chunk("a", index=1, ended=ended[1])]


@pytest.mark.parametrize("ends", [False, True])
async def test_a_bug_in_what_becomes_of_an_update_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    accept = ChoiceStreams.accept

    def stumble(answer: ChoiceStreams, gained: Any) -> Any:
        if gained and gained[0].token_ids[0] == ord("!"):
            raise KeyError("a bug")
        return accept(answer, gained)

    monkeypatch.setattr(ChoiceStreams, "accept", stumble)
    async with stage_of("d0") as stage:
        unread, other = await two_on_one_line(stage)
        stage["d0"].say(tokens("!", 0), request_id=request_of(AttemptId(stage["d0"].begins[0].id)), ends=ends)
        stage["d0"].say(tokens("b", 0, finish_reason=LENGTH), request_id="other", ends=True)
        await other.completed()
        error = await Client(unread).failed()
        assert "internal error, incident" in str(error)
        assert stage.cluster.port.lost == []


# A stop at every await

Reach = Callable[[Stage, pytest.MonkeyPatch], AbstractAsyncContextManager[Client]]
"""Brings a request to where it waits, and keeps it there."""


@asynccontextmanager
async def not_begun(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    yield stage.open()


@asynccontextmanager
async def tokenizing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    has_begun, may_end = threading.Event(), threading.Event()

    def wait(*arguments: Any) -> Sequence[int]:
        has_begun.set()
        assert may_end.wait(10)
        return encode(*arguments)

    monkeypatch.setattr("router.requests.prompt.encode", wait)
    client = stage.open(text="x" * (MAX_TINY_LEN + 1))
    await until(has_begun.is_set)
    yield client
    may_end.set()


@asynccontextmanager
async def waiting_for_the_tokenizer(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    async with tokenizing(stage, monkeypatch) as first:
        yield stage.open(text="x" * (MAX_TINY_LEN + 2))
        first.opened.stop(ENOUGH)


@asynccontextmanager
async def waiting_for_room(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    holds, keys = stage.cluster.router.holds, [BlockKey(number.to_bytes(32, "big")) for number in range(900)]
    async with holds.hold(AttemptId("of another/1"), keys, ""):
        client = stage.open()
        await until(lambda: holds.budgets[""].num_waiting)
        yield client


@asynccontextmanager
async def prefilling(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    client = stage.open()
    await stage.begun("p0")
    yield client


@asynccontextmanager
async def waiting_for_a_decode_worker(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    await stage.enlist("p0")
    client = stage.open()
    await stage.begun("p0")
    stage["p0"].say(tokens("a", 0), prompt={}, ends=True)
    await client.has("a")
    yield client


@asynccontextmanager
async def fetching(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    yield await stage.prefilled()


@asynccontextmanager
async def streaming(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    client = await stage.prefilled()
    stage["d0"].say(tokens("b", 1), prompt={})
    await client.has("ab")
    yield client


@asynccontextmanager
async def in_a_second_attempt(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    client = await stage.prefilled()
    stage["d0"].say(error=LOST)
    await stage.begun("d1")
    yield client


@asynccontextmanager
async def being_tried_alone(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    await stage.enlist("d0")
    first, second = await two_lost_twice(stage)
    yield first
    second.opened.stop(ENOUGH)


@asynccontextmanager
async def waiting_to_be_tried_alone(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    await stage.enlist("d0")
    first, second = await two_lost_twice(stage)
    yield second
    first.opened.stop(ENOUGH)


PLACES: dict[Reach, str] = {
    not_begun: "prefill.call",  # its task begins before the deadline is noticed
    tokenizing: "router.tokenize",
    waiting_for_the_tokenizer: "router.wait_tokenizer",
    waiting_for_room: "router.wait_room",
    prefilling: "prefill.call",
    waiting_for_a_decode_worker: "router.wait_decode",
    fetching: "decode.call",
    streaming: "decode.call",
    in_a_second_attempt: "decode.call",
    being_tried_alone: "decode.call",
    waiting_to_be_tried_alone: "router.wait_isolated",
}
"""The places, and their names in a timeline."""


@pytest.fixture(params=PLACES, ids=lambda reach: reach.__name__)
def reach(request: pytest.FixtureRequest) -> Reach:
    place: Reach = request.param
    return place


async def test_a_stop_ends_it_wherever_it_is(stage: Stage, reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    async with reach(stage, monkeypatch) as client:
        client.opened.stop(ENOUGH)
        assert await client.failed() is ENOUGH


async def test_the_first_reason_counts(stage: Stage, reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    async with reach(stage, monkeypatch) as client:
        client.opened.stop(ENOUGH)
        client.opened.stop(LOST)
        await asyncio.sleep(0)
        client.opened.stop(LOST)
        stage.cluster.router.dispatcher.stop()
        assert await client.failed() is ENOUGH


async def test_a_router_that_stops_says_so(stage: Stage, reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    async with reach(stage, monkeypatch) as client:
        stage.cluster.router.dispatcher.stop()
        error = await client.failed()
        assert (type(error), str(error)) == (RouterLeaving, "the router is stopping")


async def test_the_deadline_ends_it_wherever_it_is(stage: Stage, reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline passes as soon as the request is where it is to be: the loop's clock goes on by a minute."""
    loop, shift_s = asyncio.get_running_loop(), [0.0]
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + shift_s[0])
    async with reach(stage, monkeypatch) as client:
        shift_s[0] = 60.0
        error = await client.failed()
        assert isinstance(error, DeadlineExceeded)
        advice = "give a longer one, or see `baton status`"
        assert error.message == f"the deadline of 20 s passed at {PLACES[reach]}: {advice}"


async def test_it_is_over_at_once_whatever_it_waits_for(
    stage: Stage, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing on the way out waits: a few turns of the loop, in which no other task need do anything."""
    async with reach(stage, monkeypatch) as client:
        client.opened.stop(ENOUGH)
        for _ in range(3):
            await asyncio.sleep(0)
        assert isinstance(await anext_error(client.opened), Cancelled)


async def anext_error(opened: OpenRequest) -> BaseException | None:
    """What the next reading of the outbox raises, if it needs no waiting."""
    reading = asyncio.ensure_future(anext(opened.outbox))
    await asyncio.sleep(0)
    assert reading.done()
    return reading.exception()


@pytest.mark.parametrize("is_stopped_first", [True, False])
async def test_a_stop_keeps_its_reason_where_a_timeout_runs_out_with_it(is_stopped_first: bool) -> None:
    """The wait for a decode worker runs out in the same turn of the loop: both cancel one task, in either order."""
    wait_s = 0.05
    config = replace(CONFIG, settings=replace(CONFIG.settings, max_worker_wait_s=wait_s))
    async with stage_of("p0", config=config) as stage:
        client = stage.open()
        await stage.begun("p0")
        stage["p0"].say(tokens("a", 0), ends=True)
        await client.has("a")
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + (0.0 if is_stopped_first else 1.5 * wait_s), client.opened.stop, ENOUGH)
        time.sleep(2 * wait_s)  # noqa: ASYNC251  the loop finds both timers due
        assert await client.failed() is ENOUGH


async def gone_wrong(num_turns: int) -> None:
    """Stops a request that loses two decode workers, after so many turns of the loop."""
    async with running(1, 3) as cluster:
        for name in ("d0", "d1"):
            cluster.faults[name].fail_after = 2
        opened = cluster.open(request(max_tokens=6, n=2))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        opened.stop(ENOUGH)
        client = Client(opened)
        await until(lambda: client.error or client.complete)
        assert client.complete or client.error is ENOUGH
        await cluster.come_to_rest()
        assert serving() == []


async def in_one_pool(num_turns: int) -> None:
    """Stops one of two requests on one decode worker; the other has all its tokens."""
    async with running(0, 1) as cluster:
        opened = cluster.open(request(max_tokens=6))
        other = Client(cluster.open(request(max_tokens=6, seed=2)))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        opened.stop(ENOUGH)
        assert (await other.completed()).usage.completion_tokens == 6


@pytest.mark.parametrize("scenario", [gone_wrong, in_one_pool], ids=lambda one: one.__name__)
async def test_a_stop_at_any_turn_of_the_loop(scenario: Callable[[int], Awaitable[None]]) -> None:
    for num_turns in range(80):
        await scenario(num_turns)


async def test_a_token_before_the_scores_of_the_prompt_is_the_workers_fault(stage: Stage) -> None:
    client = stage.open(prompt_logprobs=0)
    await until(lambda: stage["p0"].begins)
    assert stage["p0"].begins[0].num_scored == 1
    stage["p0"].say(tokens("a", 0), ends=True)
    await until(lambda: len(stage["p0"].begins) + len(stage["p1"].begins) == 2)
    assert (client.text, stage["d0"].begins, stage["d1"].begins) == ("", [], [])
    client.opened.stop(ENOUGH)
    assert await client.failed() == ENOUGH
