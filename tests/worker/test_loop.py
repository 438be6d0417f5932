import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import NoReturn

import pytest
import torch

from engine.core import EngineCore
from engine.events import Event, Failed, Fetched, Finished
from engine.model.batch import Batch, CausalModel
from engine.model.hash_model import HashModel
from engine.request import ChoiceSoFar, EngineRequest
from kernels.backend import KVPages
from tests.harness.engines import ROOT, make_core
from tests.harness.fake_clock import FakeClock
from tests.harness.known_model import LAYOUT
from tests.harness.one_worker import PROMPT, VOCAB_SIZE, greedy
from wire.errors import BatonError, InvalidRequest, Unavailable
from wire.ids import AttemptId
from wire.sampling import FinishReason
from worker.loop import (
    MAX_FAILED_STEPS,
    MAX_IDLE_S,
    Abort,
    Add,
    Command,
    Consult,
    EndChoice,
    Inbox,
    StepReport,
    WorkerLoop,
)

TIMEOUT_S = 20.0
MAX_TURNS = 10_000
ORACLE = HashModel(LAYOUT, VOCAB_SIZE)


class WatchedInbox(Inbox):
    """Remembers how long its taker was ready to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits_s: list[float] = []

    def take(self, timeout_s: float) -> list[Command]:
        self.waits_s.append(timeout_s)
        return super().take(timeout_s)


class SlowModel(HashModel):
    """Each step takes a second of a clock that stands still otherwise."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(LAYOUT, VOCAB_SIZE)
        self._clock = clock

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        self._clock.now += 1.0
        return super().forward(batch, kv)


class Driver:
    """A loop whose turns the test makes, and what it delivers."""

    def __init__(self, model: CausalModel | None = None, clock: Callable[[], float] | None = None) -> None:
        self.core = make_core(model or HashModel(LAYOUT, VOCAB_SIZE))
        self.inbox = WatchedInbox()
        self.broken = threading.Event()
        self.clock = clock or FakeClock()
        self.loop = WorkerLoop(self.core, self.inbox, self._take, self.broken.set, self.clock)
        self.turns: list[StepReport] = []
        self._changed = threading.Condition()

    def begin(self, name: str, max_tokens: int = 20, prompt: tuple[int, ...] = PROMPT) -> AttemptId:
        request = EngineRequest(
            attempt_id=AttemptId(f"{name}/1"),
            root=ROOT,
            prompt_ids=prompt,
            sampling=greedy(max_tokens),
            choices=(ChoiceSoFar(0),),
        )
        assert self.loop.put(Add(request))
        return request.attempt_id

    def has_ended(self, attempt: AttemptId) -> bool:
        return attempt in self.aborted or any(
            isinstance(event, Finished | Failed) and event.attempt_id == attempt for event in self.events
        )

    @property
    def events(self) -> list[Event]:
        return [event for turn in self.turns for event in (*turn.events, *turn.output.events)]

    @property
    def aborted(self) -> dict[AttemptId, BatonError | None]:
        """Attempts without a further event, with the failure that ended them, if one did."""
        return {attempt: turn.failure for turn in self.turns for attempt in turn.aborted}

    def turn_until_ended(self, *attempts: AttemptId) -> None:
        for _ in range(MAX_TURNS):
            if all(map(self.has_ended, attempts)):
                return
            self.loop.run_once()
        raise AssertionError("it does not end")

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """For a loop that turns on its own thread."""
        with self._changed:
            assert self._changed.wait_for(holds, TIMEOUT_S)

    def tokens(self, attempt: AttemptId) -> list[int]:
        pairs = [pair for turn in self.turns for pair in zip(turn.output.choices, turn.output.token_ids, strict=True)]
        return [token_id for choice, token_id in pairs if choice.attempt_id == attempt]

    def check(self) -> list[str]:
        answer: Future[list[str]] = Future()
        assert self.loop.put(Consult(EngineCore.check, answer))
        self.loop.run_once()
        return answer.result(0.0)

    def _take(self, turn: StepReport) -> None:
        with self._changed:
            self.turns.append(turn)
            self._changed.notify()


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def threaded() -> Iterator[Driver]:
    driver = Driver()
    driver.loop.start()
    yield driver
    assert driver.loop.stop(TIMEOUT_S)


def test_requests_run_to_their_end(driver: Driver) -> None:
    attempts = [driver.begin(f"request {number}", prompt=PROMPT[number:]) for number in range(3)]
    driver.turn_until_ended(*attempts)
    assert [driver.tokens(one) for one in attempts] == [ORACLE.oracle(PROMPT[number:], 20) for number in range(3)]
    assert not driver.aborted
    assert (driver.loop.stats.generated_tokens, driver.loop.num_attempts) == (60, 0)


def test_a_turn_makes_one_delivery_of_what_is_new_about_all(driver: Driver) -> None:
    attempts = [driver.begin(f"request {number}", prompt=PROMPT[number:]) for number in range(3)]
    driver.turn_until_ended(*attempts)
    assert len(driver.turns) <= driver.loop.num_steps
    assert [request.attempt_id for request in driver.turns[0].added] == attempts
    assert {choice.attempt_id for choice in driver.turns[-1].output.choices} == set(attempts)


def test_a_turn_without_news_is_not_delivered(driver: Driver) -> None:
    driver.inbox.ring()
    driver.loop.run_once()
    assert (driver.loop.num_steps, driver.turns) == (1, [])


def test_a_thread_runs_requests_to_their_end(threaded: Driver) -> None:
    attempt = threaded.begin("r")
    threaded.wait_until(lambda: threaded.has_ended(attempt))
    assert threaded.tokens(attempt) == ORACLE.oracle(PROMPT, 20)


def test_waits_for_commands_only_while_there_is_nothing_to_do(driver: Driver) -> None:
    driver.turn_until_ended(driver.begin("r"))
    driver.inbox.ring()
    driver.loop.run_once()
    assert driver.inbox.waits_s[0] == MAX_IDLE_S
    assert set(driver.inbox.waits_s[1:-1]) == {0.0}
    assert driver.check() == []
    assert driver.inbox.waits_s[-1] == MAX_IDLE_S


def test_a_step_counts_for_what_it_computes_and_not_for_the_fetch_before() -> None:
    clock = FakeClock()
    driver = Driver(SlowModel(clock), clock)
    arrived_s = clock()
    driver.turn_until_ended(driver.begin("r", max_tokens=5))
    computed = [turn for turn in driver.turns if turn.output.token_ids]
    assert [turn.began_s - arrived_s for turn in computed] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [turn.ended_s - turn.began_s for turn in computed] == [1.0] * 5
    assert any(isinstance(event, Fetched) for turn in driver.turns for event in turn.output.before)


def test_an_aborted_attempt_leaves_before_the_next_step(driver: Driver) -> None:
    attempt = driver.begin("r", max_tokens=3000)
    while not driver.tokens(attempt):
        driver.loop.run_once()
    num_tokens = len(driver.tokens(attempt))
    driver.loop.put(Abort(attempt))
    driver.loop.run_once()
    assert driver.aborted == {attempt: None}
    assert driver.tokens(attempt) == ORACLE.oracle(PROMPT, num_tokens)
    assert not driver.core.has_requests


def test_aborting_what_has_ended_does_no_harm(driver: Driver) -> None:
    attempt = driver.begin("r")
    driver.turn_until_ended(attempt)
    num_events = len(driver.events)
    driver.loop.put(Abort(attempt))
    driver.loop.run_once()
    assert len(driver.events) == num_events


def test_an_attempt_may_follow_an_aborted_one_of_its_id(driver: Driver) -> None:
    driver.begin("r", max_tokens=3000)
    driver.loop.put(Abort(AttemptId("r/1")))
    attempt = driver.begin("r")
    driver.loop.run_once()
    assert [request.sampling.max_tokens for request in driver.turns[0].added] == [3000, 20]
    while driver.core.has_requests:
        driver.loop.run_once()
    assert driver.tokens(attempt) == ORACLE.oracle(PROMPT, 20)


def test_an_ended_choice_is_told_once(driver: Driver) -> None:
    attempt = driver.begin("r", max_tokens=3000)
    while not driver.tokens(attempt):
        driver.loop.run_once()
    for _ in range(2):
        driver.loop.put(EndChoice(attempt, 0))
        driver.loop.run_once()
    assert [event for event in driver.events if isinstance(event, Finished)] == [
        Finished(attempt, 0, FinishReason.STOP)
    ]


def test_what_the_engine_refuses_ends_with_its_error(driver: Driver) -> None:
    driver.begin("r", max_tokens=1 << 20)
    driver.loop.run_once()
    (failed,) = (event for event in driver.events if isinstance(event, Failed))
    assert isinstance(failed.error, InvalidRequest)


def test_a_failed_step_ends_all_requests_and_no_more(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = [driver.begin(f"request {number}", max_tokens=3000) for number in range(2)]
    while not driver.tokens(attempts[1]):
        driver.loop.run_once()
    with monkeypatch.context() as patch:
        patch.setattr(EngineCore, "step", _fail)
        driver.loop.run_once()
    assert [type(driver.aborted[one]) for one in attempts] == [Unavailable, Unavailable]
    assert driver.check() == []
    assert (driver.loop.is_running, driver.loop.is_broken) == (True, False)


def test_wrong_books_after_a_failed_step_break_the_loop(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = driver.begin("r", max_tokens=3000)
    monkeypatch.setattr(EngineCore, "check", _fail)
    monkeypatch.setattr(EngineCore, "step", _fail)
    driver.loop.run_once()
    assert isinstance(driver.aborted[attempt], Unavailable)
    assert (driver.loop.is_running, driver.loop.is_broken) == (False, True)


def test_a_broken_loop_ends_its_thread_says_so_and_takes_nothing(
    threaded: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineCore, "check", _fail)
    monkeypatch.setattr(EngineCore, "step", _fail)
    threaded.inbox.ring()
    assert threaded.broken.wait(TIMEOUT_S)
    assert not threaded.loop.put(Abort(AttemptId("r/1")))


def test_an_engine_that_fails_on_is_given_up(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCore, "step", _fail)
    for number in range(MAX_FAILED_STEPS):
        assert driver.loop.is_running
        attempt = driver.begin(str(number))
        driver.turn_until_ended(attempt)
        assert isinstance(driver.aborted[attempt], Unavailable)
    assert driver.loop.is_broken


def test_tokens_between_failed_steps_are_a_sign_of_health(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2 * MAX_FAILED_STEPS):
        with monkeypatch.context() as patch:
            patch.setattr(EngineCore, "step", _fail)
            driver.turn_until_ended(driver.begin(f"a{number}"))
        driver.turn_until_ended(driver.begin(f"b{number}"))
    assert driver.loop.is_running


def test_a_request_that_cannot_be_aborted_ends_and_breaks_the_loop(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = driver.begin("r", max_tokens=3000)
    driver.loop.run_once()
    monkeypatch.setattr(EngineCore, "abort", _fail)
    driver.loop.put(Abort(attempt))
    driver.loop.run_once()
    assert isinstance(driver.aborted[attempt], Unavailable)
    assert driver.loop.is_broken


def test_stopping_ends_everything(threaded: Driver) -> None:
    attempt = threaded.begin("r", max_tokens=3000)
    threaded.wait_until(lambda: bool(threaded.tokens(attempt)))
    assert threaded.loop.stop(TIMEOUT_S)
    assert isinstance(threaded.aborted[attempt], Unavailable)
    assert not threaded.loop.put(Consult(EngineCore.check, Future()))
    assert not threaded.broken.is_set()


def test_what_is_in_the_inbox_at_the_end_is_answered(driver: Driver) -> None:
    attempt = driver.begin("r")
    answer: Future[list[str]] = Future()
    driver.loop.put(Consult(EngineCore.check, answer))
    driver.loop.abandon()
    driver.loop.start()
    assert driver.loop.stop(TIMEOUT_S)
    (last,) = driver.turns
    assert ([request.attempt_id for request in last.added], type(last.failure)) == ([attempt], Unavailable)
    assert isinstance(answer.exception(TIMEOUT_S), Unavailable)


def test_an_error_of_a_check_is_raised_where_it_is_asked(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = driver.begin("r")
    with monkeypatch.context() as patch:
        patch.setattr(EngineCore, "check", _fail)
        with pytest.raises(RuntimeError):
            driver.check()
    driver.turn_until_ended(attempt)
    assert driver.tokens(attempt) == ORACLE.oracle(PROMPT, 20)


def _fail(*_: object) -> NoReturn:
    raise RuntimeError("out of memory")
