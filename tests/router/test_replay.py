"""What follows a lost attempt, as tables; turns of requests that are tried alone; prompts that are not tried again."""

import asyncio

import pytest

from router.requests.replay import (
    MAX_ATTEMPTS,
    MIN_PROGRESS,
    AttemptHistory,
    IsolatedRetries,
    NextStep,
    Quarantine,
    next_step,
)
from wire.errors import (
    AttemptsExhausted,
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PromptReturned,
    RequestExists,
    StoreError,
    Unavailable,
    WireError,
    WorkerLeaving,
)
from wire.ids import BlockKey, QualifiedId

A, B, C = (QualifiedId(name) for name in "abc")
LOST = Unavailable("the worker is dead")
LEFT = WorkerLeaving("it drains")
MOVED = PromptReturned("another worker computes it sooner")


@pytest.mark.parametrize(
    ("error", "num_in_vain", "step"),
    [
        *[(error, 0, NextStep.RETRY) for error in (LOST, LEFT, MOVED, Cancelled("it stops"), WireError("a gap"))],
        (RequestExists("not quite gone"), 0, NextStep.RETRY),
        (LOST, MAX_ATTEMPTS - 2, NextStep.RETRY),
        (LOST, MAX_ATTEMPTS - 1, NextStep.RETRY_ALONE),
        (WireError("a gap"), MAX_ATTEMPTS - 1, NextStep.RETRY_ALONE),
        (LEFT, MAX_ATTEMPTS - 1, NextStep.RETRY_ALONE),
        (LOST, MAX_ATTEMPTS, NextStep.GIVE_UP),
        *[
            (error, num_in_vain, NextStep.FAIL)
            for num_in_vain in (0, MAX_ATTEMPTS - 1, MAX_ATTEMPTS)
            for error in (
                InvalidRequest("prompt", "is poison"),
                DeadlineExceeded("too late"),
                Overloaded("full"),
                StoreError("broken"),
                ModelNotFound("another"),
                AttemptsExhausted("enough"),
                BatonError("a bug"),
            )
        ],
    ],
    ids=lambda value: getattr(value, "name", None) or (value if isinstance(value, int) else type(value).__name__),
)
def test_what_follows_an_attempt(error: BatonError, num_in_vain: int, step: NextStep) -> None:
    assert next_step(error, AttemptHistory(2, num_in_vain)) is step


@pytest.mark.parametrize(
    ("before", "error", "num_tokens", "after"),
    [
        (AttemptHistory(), LOST, 0, AttemptHistory(2, 1, 0)),
        (AttemptHistory(2, 1, 0), LOST, 0, AttemptHistory(3, 2, 0)),
        (AttemptHistory(2, 1, 0), LOST, MIN_PROGRESS - 1, AttemptHistory(3, 2, MIN_PROGRESS - 1)),
        (AttemptHistory(2, 1, 0), LOST, MIN_PROGRESS, AttemptHistory(3, 0, MIN_PROGRESS)),
        (AttemptHistory(2, 1, 5), LOST, 4 + MIN_PROGRESS, AttemptHistory(3, 2, 4 + MIN_PROGRESS)),
        (AttemptHistory(2, 1, 5), LOST, 5 + MIN_PROGRESS, AttemptHistory(3, 0, 5 + MIN_PROGRESS)),
        (AttemptHistory(2, 1, 0), LEFT, 0, AttemptHistory(3, 1, 0)),
        (AttemptHistory(2, 1, 0), LEFT, MIN_PROGRESS, AttemptHistory(3, 0, MIN_PROGRESS)),
        (AttemptHistory(2, 1, 0), MOVED, 0, AttemptHistory(3, 1, 0, is_moved=True)),
        (AttemptHistory(2, 1, 0, is_moved=True), LOST, 0, AttemptHistory(3, 2, 0)),
    ],
    ids=[
        "the first in vain",
        "the second in vain",
        "too few tokens",
        "enough tokens",
        "too few of its own",
        "enough of its own",
        "given back",
        "given back with enough tokens",
        "returned for another worker",
        "lost after that",
    ],
)
def test_attempts_in_vain_are_counted_in_a_row(
    before: AttemptHistory, error: BatonError, num_tokens: int, after: AttemptHistory
) -> None:
    assert before.after(error, num_tokens) == after


class Turns:
    """Requests that ask for a turn alone, each in a task of its own that keeps it until `end`."""

    def __init__(self) -> None:
        self.isolated_retries = IsolatedRetries()
        self.has_turn: set[QualifiedId] = set()
        self._ends = {request_id: asyncio.Event() for request_id in (A, B, C)}
        self._tasks: dict[QualifiedId, asyncio.Task[None]] = {}

    async def ask(self, *request_ids: QualifiedId) -> None:
        for request_id in request_ids:
            self._tasks[request_id] = asyncio.create_task(self._be_alone(request_id))
        await self.settle()

    async def end(self, request_id: QualifiedId) -> None:
        self._ends[request_id].set()
        await self._tasks[request_id]
        await self.settle()

    async def cancel(self, request_id: QualifiedId) -> None:
        self._tasks[request_id].cancel()
        await asyncio.wait([self._tasks[request_id]])
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def _be_alone(self, request_id: QualifiedId) -> None:
        async with self.isolated_retries.alone(request_id):
            self.has_turn.add(request_id)
            await self._ends[request_id].wait()


class TestIsolatedRetries:
    async def test_one_after_another(self) -> None:
        turns = Turns()
        await turns.ask(A, B, C)
        assert turns.has_turn == {A}
        await turns.end(A)
        assert turns.has_turn == {A, B}
        await turns.end(B)
        assert turns.has_turn == {A, B, C}
        await turns.end(C)
        assert turns.isolated_retries.check() == []

    async def test_a_request_that_waits_may_go(self) -> None:
        turns = Turns()
        await turns.ask(A, B, C)
        await turns.cancel(B)
        assert turns.has_turn == {A}
        await turns.end(A)
        assert turns.has_turn == {A, C}
        await turns.end(C)
        assert turns.isolated_retries.check() == []

    async def test_a_request_that_is_cancelled_in_its_turn_lets_the_next_one_in(self) -> None:
        turns = Turns()
        await turns.ask(A, B)
        await turns.cancel(A)
        assert turns.has_turn == {A, B}
        await turns.end(B)
        assert turns.isolated_retries.check() == []

    async def test_a_request_cancelled_between_its_turn_and_its_next_step_lets_the_next_one_in(self) -> None:
        turns = Turns()
        await turns.ask(A, B, C)
        turns.isolated_retries.clear(A)
        await turns.cancel(B)
        assert turns.has_turn == {A, C}
        await turns.end(A)
        await turns.end(C)
        assert turns.isolated_retries.check() == []

    async def test_a_turn_is_over_as_soon_as_it_is_cleared(self) -> None:
        turns = Turns()
        await turns.ask(A, B)
        turns.isolated_retries.clear(C)
        assert turns.has_turn == {A}
        turns.isolated_retries.clear(A)
        turns.isolated_retries.clear(A)
        await turns.settle()
        assert turns.has_turn == {A, B}
        await turns.end(A)
        assert turns.isolated_retries.check() == ["request b is tried alone, or waits for it"]
        await turns.end(B)
        assert turns.isolated_retries.check() == []


def key(number: int) -> BlockKey:
    return BlockKey(bytes([number]))


class TestQuarantine:
    def test_holds_for_a_time(self) -> None:
        quarantine = Quarantine(ttl_s=10.0)
        quarantine.add(key(1), now_s=0.0)
        assert [quarantine.contains(key(number), now_s=9.9) for number in (1, 2)] == [True, False]
        assert not quarantine.contains(key(1), now_s=10.0)

    def test_holds_the_latest(self) -> None:
        quarantine = Quarantine(max_prompts=2)
        for number in (1, 2, 1, 3):
            quarantine.add(key(number), now_s=0.0)
        assert [quarantine.contains(key(number), now_s=1.0) for number in (1, 2, 3)] == [True, False, True]


def test_an_attempt_without_cache_is_followed_by_others_without() -> None:
    first = AttemptHistory(number=2, num_in_vain=1, num_tokens_before=40)
    again = first.without_cache()
    assert (first.reads_cache, again) == (True, AttemptHistory(3, 1, 40, reads_cache=False))
    assert not again.after(Unavailable("it died"), 41).reads_cache
