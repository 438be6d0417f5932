import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import NoReturn

import pytest

from decode_worker.lifecycle import DecodeLifecycle
from engine.core import EngineCore
from engine.events import Event
from engine.model.hash_model import HashModel
from engine.request import ChoiceSoFar, EngineRequest
from tests.pair import ROOT, make_core
from tests.worker.workers import LAYOUT, PROMPT, VOCAB_SIZE, greedy
from wire.errors import BatonError, Cancelled, InvalidRequest, Unavailable
from wire.ids import RequestId
from worker.call import Call
from worker.commands import Command
from worker.inbox import Inbox
from worker.instructions import Close, Instruction, Send
from worker.lives import Deliveries
from worker.loop import MAX_IDLE_S, LoopState, WorkerLoop

TIMEOUT_S = 20.0
ORACLE = HashModel(LAYOUT, VOCAB_SIZE)


class WatchedInbox(Inbox[Command]):
    """Remembers how long its taker was ready to wait, and tells when it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits_s: list[float] = []
        self.idle = threading.Event()

    def take(self, timeout_s: float) -> list[Command]:
        self.waits_s.append(timeout_s)
        if timeout_s:
            self.idle.set()
        taken = super().take(timeout_s)
        self.idle.clear()
        return taken


class Driver:
    """A loop on its thread, and what it delivers."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.inbox = WatchedInbox()
        self.delivered: SimpleQueue[tuple[Call, Instruction]] = SimpleQueue()
        self.broken = threading.Event()
        self.loop = WorkerLoop(core, self.inbox, self._take, self.broken.set)

    def begin(self, name: str, max_tokens: int = 20, prompt: tuple[int, ...] = PROMPT) -> Call:
        call = Call(RequestId(name), 1)
        request = EngineRequest(call.request_id, ROOT, prompt, greedy(max_tokens), (ChoiceSoFar(0),))
        self.loop.begin(call, DecodeLifecycle(request, 0.0, LAYOUT.block_size))
        return call

    def until(self, call: Call, wanted: Callable[[Instruction], bool]) -> list[Instruction]:
        """Deliveries to a call up to the first that is wanted."""
        seen: list[Instruction] = []
        while not (seen and wanted(seen[-1])):
            receiver, instruction = self.delivered.get(timeout=TIMEOUT_S)
            if receiver is call:
                seen.append(instruction)
        return seen

    def until_closed(self, call: Call) -> tuple[list[int], BatonError | None]:
        seen = self.until(call, lambda instruction: isinstance(instruction, Close))
        updates = [instruction.update for instruction in seen if isinstance(instruction, Send)]
        assert isinstance(seen[-1], Close)
        return [token for update in updates for one in update.choices for token in one.token_ids], seen[-1].error

    def _take(self, deliveries: Deliveries) -> None:
        for reply in deliveries.replies:
            self.delivered.put(reply)


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver(make_core(HashModel(LAYOUT, VOCAB_SIZE)))
    driver.loop.start()
    yield driver
    assert driver.loop.stop(TIMEOUT_S)


def test_requests_run_to_their_end(driver: Driver) -> None:
    calls = [driver.begin(f"request {number}", prompt=PROMPT[number:]) for number in range(3)]
    first = driver.until_closed(calls[0])
    assert first == (ORACLE.oracle(PROMPT, 20), None)
    assert driver.loop.stats.generated_tokens <= 60


def test_waits_for_commands_while_there_is_nothing_to_do(driver: Driver) -> None:
    driver.until_closed(driver.begin("r"))
    assert driver.inbox.idle.wait(TIMEOUT_S)
    num_waits = len(driver.inbox.waits_s)
    assert driver.loop.ask(EngineCore.check).result(TIMEOUT_S) == []
    assert driver.inbox.idle.wait(TIMEOUT_S)
    assert driver.inbox.waits_s[num_waits - 1 :][:2] == [MAX_IDLE_S, MAX_IDLE_S]


def test_withdrawn_request_leaves_before_the_next_step(driver: Driver) -> None:
    call = driver.begin("r", max_tokens=3000)
    driver.until(call, lambda instruction: isinstance(instruction, Send))
    driver.loop.withdraw(call, Cancelled("gone"))
    assert driver.loop.ask(_requests).result(TIMEOUT_S) == []
    tokens, error = driver.until_closed(call)
    assert isinstance(error, Cancelled)
    assert tokens == ORACLE.oracle(PROMPT, len(tokens))


def test_withdrawing_an_old_call_leaves_a_new_one_of_the_same_id_alone(driver: Driver) -> None:
    old = driver.begin("r", max_tokens=3000)
    driver.loop.withdraw(old, Cancelled("replaced"))
    new = driver.begin("r")
    driver.loop.withdraw(old, Cancelled("the caller has gone"))
    assert driver.until_closed(new) == (ORACLE.oracle(PROMPT, 20), None)


def test_what_the_engine_refuses_is_closed_with_its_error(driver: Driver) -> None:
    _, error = driver.until_closed(driver.begin("r", max_tokens=1 << 20))
    assert isinstance(error, InvalidRequest)


def test_a_failed_step_ends_all_requests_and_no_more(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [driver.begin(f"request {number}", max_tokens=3000) for number in range(2)]
    driver.until(calls[1], lambda instruction: isinstance(instruction, Send))
    step = EngineCore.step

    def fail_once(core: EngineCore) -> list[Event]:
        monkeypatch.setattr(EngineCore, "step", step)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(EngineCore, "step", fail_once)
    assert [type(driver.until_closed(call)[1]) for call in calls] == [Unavailable, Unavailable]
    assert driver.loop.ask(EngineCore.check).result(TIMEOUT_S) == []
    assert driver.loop.state is LoopState.RUNNING


def test_wrong_books_after_a_failed_step_break_the_loop(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    call = driver.begin("r", max_tokens=3000)
    driver.until(call, lambda instruction: isinstance(instruction, Send))
    monkeypatch.setattr(EngineCore, "check", _fail)
    monkeypatch.setattr(EngineCore, "step", _fail)
    assert isinstance(driver.until_closed(call)[1], Unavailable)
    assert driver.broken.wait(TIMEOUT_S)
    assert driver.loop.state is LoopState.BROKEN
    with pytest.raises(Unavailable):
        driver.begin("another")


def test_a_request_that_cannot_be_aborted_is_answered_and_breaks_the_loop(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = driver.begin("r", max_tokens=3000)
    driver.until(call, lambda instruction: isinstance(instruction, Send))
    monkeypatch.setattr(EngineCore, "abort", _fail)
    driver.loop.withdraw(call, Cancelled("gone"))
    assert isinstance(driver.until_closed(call)[1], Unavailable)
    assert driver.broken.wait(TIMEOUT_S)


def test_stopping_answers_everybody(driver: Driver) -> None:
    call = driver.begin("r", max_tokens=3000)
    driver.until(call, lambda instruction: isinstance(instruction, Send))
    assert driver.loop.stop(TIMEOUT_S)
    assert isinstance(driver.until_closed(call)[1], Unavailable)
    with pytest.raises(Unavailable):
        driver.loop.ask(EngineCore.check)
    assert not driver.broken.is_set()


def test_an_error_of_a_question_is_the_askers(driver: Driver) -> None:
    call = driver.begin("r")
    with pytest.raises(RuntimeError):
        driver.loop.ask(_fail).result(TIMEOUT_S)
    assert driver.until_closed(call) == (ORACLE.oracle(PROMPT, 20), None)


def _requests(core: EngineCore) -> list[str]:
    return ["there is one"] if core.has_requests else []


def _fail(*_: object) -> NoReturn:
    raise RuntimeError("out of memory")
