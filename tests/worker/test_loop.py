import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest
import torch

from decode_worker.job import DecodeJob
from engine.core import EngineCore
from engine.model.batch import Batch, Model
from engine.model.hash_model import HashModel
from engine.request import ChoiceSoFar, EngineRequest
from kernels.backend import KVPages
from tests.harness.engines import ROOT, make_core
from tests.harness.fake_clock import FakeClock
from tests.harness.known_model import LAYOUT
from tests.harness.one_worker import PROMPT, VOCAB_SIZE, greedy
from tests.worker.engine_events import end_of, outputs
from wire.errors import Cancelled, InvalidRequest, Unavailable
from wire.ids import AttemptId
from worker.inbox import Call, Command, Inbox
from worker.loop import MAX_FAILED_STEPS, MAX_IDLE_S, Deliveries, WorkerLoop
from worker.update import Update

TIMEOUT_S = 20.0
MAX_TURNS = 10_000
ORACLE = HashModel(LAYOUT, VOCAB_SIZE)


class Line:
    """Is sent nothing by a loop, which delivers with the call."""

    def send(self, attempt: AttemptId, update: Update) -> None:
        raise AssertionError("a loop sends nothing itself")


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

    def __init__(self, model: Model | None = None, clock: Callable[[], float] | None = None) -> None:
        self.core = make_core(model or HashModel(LAYOUT, VOCAB_SIZE))
        self.inbox = WatchedInbox()
        self.broken = threading.Event()
        self.clock = clock or FakeClock()
        self.loop = WorkerLoop(self.core, self.inbox, self._take, self.broken.set, self.clock)
        self.deliveries: list[set[Call]] = []
        self._delivered: dict[Call, list[Update]] = {}
        self._changed = threading.Condition()

    def begin(self, name: str, max_tokens: int = 20, prompt: tuple[int, ...] = PROMPT) -> Call:
        call = Call(AttemptId(f"{name}/1"), Line())
        request = EngineRequest(call.id, ROOT, prompt, greedy(max_tokens), (ChoiceSoFar(0),))
        self.loop.begin(call, DecodeJob(request, self.clock(), LAYOUT.block_size))
        return call

    def updates(self, call: Call) -> list[Update]:
        return self._delivered.get(call, [])

    def has_ended(self, call: Call) -> bool:
        return any(update.end is not None for update in self.updates(call))

    def turn_until_ended(self, *calls: Call) -> None:
        for _ in range(MAX_TURNS):
            if all(self.has_ended(call) for call in calls):
                return
            self.loop.turn()
        raise AssertionError("it does not end")

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """For a loop that turns on its own thread."""
        with self._changed:
            assert self._changed.wait_for(holds, TIMEOUT_S)

    def tokens(self, call: Call) -> list[int]:
        return outputs(self.updates(call)).get(0, [])

    def error(self, call: Call) -> Exception | None:
        return end_of(self.updates(call)).error

    def ask(self, question: Callable[[EngineCore], list[str]]) -> list[str]:
        answer = self.loop.ask(question)
        self.loop.turn()
        return answer.result(0.0)

    def _take(self, deliveries: Deliveries) -> None:
        with self._changed:
            self.deliveries.append(set(deliveries.updates))
            for call, update in deliveries.updates.items():
                self._delivered.setdefault(call, []).append(update)
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
    calls = [driver.begin(f"request {number}", prompt=PROMPT[number:]) for number in range(3)]
    driver.turn_until_ended(*calls)
    assert [driver.tokens(call) for call in calls] == [ORACLE.oracle(PROMPT[number:], 20) for number in range(3)]
    assert [driver.error(call) for call in calls] == [None] * 3
    assert (driver.loop.stats.generated_tokens, driver.loop.num_begun) == (60, 0)


def test_a_turn_makes_one_delivery_of_what_is_new_about_all(driver: Driver) -> None:
    calls = [driver.begin(f"request {number}", prompt=PROMPT[number:]) for number in range(3)]
    driver.turn_until_ended(*calls)
    assert len(driver.deliveries) <= driver.loop.num_turns
    assert driver.deliveries[-1] == set(calls)


def test_a_thread_runs_requests_to_their_end(threaded: Driver) -> None:
    call = threaded.begin("r")
    threaded.wait_until(lambda: threaded.has_ended(call))
    assert (threaded.tokens(call), threaded.error(call)) == (ORACLE.oracle(PROMPT, 20), None)


def test_waits_for_commands_only_while_there_is_nothing_to_do(driver: Driver) -> None:
    driver.turn_until_ended(driver.begin("r"))
    driver.inbox.ring()
    driver.loop.turn()
    assert driver.inbox.waits_s[0] == MAX_IDLE_S
    assert set(driver.inbox.waits_s[1:-1]) == {0.0}
    assert driver.ask(EngineCore.check) == []
    assert driver.inbox.waits_s[-1] == MAX_IDLE_S


def test_a_step_counts_for_what_it_computes_and_not_for_the_fetch_before() -> None:
    clock = FakeClock()
    driver = Driver(SlowModel(clock), clock)
    call = driver.begin("r", max_tokens=5)
    driver.turn_until_ended(call)
    assert [(span.name, span.duration_ms) for span in end_of(driver.updates(call)).spans] == [
        ("decode.queue", 0.0),
        ("decode.fetch", 0.0),
        ("decode.wait_turn", 0.0),
        ("decode.compute", 1000.0),
        ("decode.generate", 4000.0),
    ]


def test_withdrawn_request_leaves_before_the_next_step(driver: Driver) -> None:
    call = driver.begin("r", max_tokens=3000)
    while not driver.tokens(call):
        driver.loop.turn()
    num_tokens = len(driver.tokens(call))
    driver.loop.withdraw(call, Cancelled("gone"))
    driver.loop.turn()
    assert isinstance(driver.error(call), Cancelled)
    assert driver.tokens(call) == ORACLE.oracle(PROMPT, num_tokens)
    assert not driver.core.has_requests


def test_withdrawing_what_has_ended_says_nothing(driver: Driver) -> None:
    call = driver.begin("r")
    driver.turn_until_ended(call)
    driver.loop.withdraw(call, Cancelled("late"))
    driver.inbox.ring()
    driver.loop.turn()
    assert driver.error(call) is None


def test_withdrawing_an_old_call_leaves_a_new_one_of_the_same_attempt_alone(driver: Driver) -> None:
    old = driver.begin("r", max_tokens=3000)
    driver.loop.withdraw(old, Cancelled("replaced"))
    new = driver.begin("r")
    driver.loop.withdraw(old, Cancelled("the line has ended"))
    driver.turn_until_ended(new)
    assert (driver.tokens(new), driver.error(new)) == (ORACLE.oracle(PROMPT, 20), None)


def test_what_the_engine_refuses_ends_with_its_error(driver: Driver) -> None:
    call = driver.begin("r", max_tokens=1 << 20)
    driver.loop.turn()
    assert isinstance(driver.error(call), InvalidRequest)


def test_a_failed_step_ends_all_requests_and_no_more(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [driver.begin(f"request {number}", max_tokens=3000) for number in range(2)]
    while not driver.tokens(calls[1]):
        driver.loop.turn()
    with monkeypatch.context() as patch:
        patch.setattr(EngineCore, "step", _fail)
        driver.loop.turn()
    assert [type(driver.error(call)) for call in calls] == [Unavailable, Unavailable]
    assert driver.ask(EngineCore.check) == []
    assert (driver.loop.is_running, driver.loop.is_broken) == (True, False)


def test_wrong_books_after_a_failed_step_break_the_loop(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    call = driver.begin("r", max_tokens=3000)
    monkeypatch.setattr(EngineCore, "check", _fail)
    monkeypatch.setattr(EngineCore, "step", _fail)
    driver.loop.turn()
    assert isinstance(driver.error(call), Unavailable)
    assert (driver.loop.is_running, driver.loop.is_broken) == (False, True)


def test_a_broken_loop_ends_its_thread_says_so_and_takes_nothing(
    threaded: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineCore, "check", _fail)
    monkeypatch.setattr(EngineCore, "step", _fail)
    threaded.inbox.ring()
    assert threaded.broken.wait(TIMEOUT_S)
    with pytest.raises(Unavailable):
        threaded.begin("r")


@pytest.mark.parametrize("fails", ["step", "pass on"])
def test_an_engine_that_fails_on_is_given_up(driver: Driver, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """Tokens that reach no request are no sign of health."""
    if fails == "step":
        monkeypatch.setattr(EngineCore, "step", _fail)
    else:
        monkeypatch.setattr(DecodeJob, "gain", _fail)
    for number in range(MAX_FAILED_STEPS):
        assert driver.loop.is_running
        call = driver.begin(str(number))
        driver.turn_until_ended(call)
        assert isinstance(driver.error(call), Unavailable)
    assert driver.loop.is_broken


def test_a_request_that_cannot_be_aborted_is_answered_and_breaks_the_loop(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = driver.begin("r", max_tokens=3000)
    driver.loop.turn()
    monkeypatch.setattr(EngineCore, "abort", _fail)
    driver.loop.withdraw(call, Cancelled("gone"))
    driver.loop.turn()
    assert isinstance(driver.error(call), Unavailable)
    assert driver.loop.is_broken


def test_stopping_answers_everything(threaded: Driver) -> None:
    call = threaded.begin("r", max_tokens=3000)
    threaded.wait_until(lambda: bool(threaded.tokens(call)))
    assert threaded.loop.stop(TIMEOUT_S)
    assert isinstance(threaded.error(call), Unavailable)
    with pytest.raises(Unavailable):
        threaded.loop.ask(EngineCore.check)
    assert not threaded.broken.is_set()


def test_what_is_in_the_inbox_at_the_end_is_answered(driver: Driver) -> None:
    call = driver.begin("r")
    answer = driver.loop.ask(EngineCore.check)
    driver.loop.abandon()
    driver.loop.start()
    assert driver.loop.stop(TIMEOUT_S)
    assert isinstance(driver.error(call), Unavailable)
    assert isinstance(answer.exception(TIMEOUT_S), Unavailable)


def test_an_error_of_a_question_is_raised_where_it_is_asked(driver: Driver) -> None:
    call = driver.begin("r")
    with pytest.raises(RuntimeError):
        driver.ask(_fail)
    driver.turn_until_ended(call)
    assert (driver.tokens(call), driver.error(call)) == (ORACLE.oracle(PROMPT, 20), None)


def _fail(*_: object) -> NoReturn:
    raise RuntimeError("out of memory")
