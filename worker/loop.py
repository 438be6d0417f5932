"""The thread that owns the engine: take commands, step, hand tokens and events to jobs, deliver their updates."""

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.core import EngineCore
from engine.events import Abandoned, Event, Failed, Finished, StepOutput
from wire.errors import BatonError, Unavailable
from wire.ids import AttemptId
from wire.sampling import FinishReason
from worker.inbox import Ask, Begin, Call, Command, EndChoice, Inbox, Withdraw
from worker.job import Job
from worker.update import NOTHING_NEW, ChoiceTokens, End, Update

log = logging.getLogger(__name__)

ENGINE_NICENESS = 10
"""Where cores are few, threads that only pass tokens on come before threads that compute them."""
MAX_IDLE_S = 1.0
MAX_FAILED_STEPS = 4
"""Steps that fail, with no token in between, until the engine is given up: then it is not the requests."""


@dataclass
class Deliveries:
    """The outcome of a turn: an update for each call, and holds that are over."""

    updates: dict[Call, Update] = field(default_factory=dict)
    released: list[AttemptId] = field(default_factory=list)


class WorkerLoop:
    """The driver of an engine. Any thread may use `begin`, `withdraw`, `end_choice` and `ask`, which do not block.

    A request that the engine fails ends alone. A step that fails ends all attempts with Unavailable, so that the router
    tries elsewhere, and the loop goes on if the engine's books are in order.

    deliver: takes the outcome of a turn, on the engine's thread; must not block.
    on_broken: runs on the engine's thread, after the last delivery, if the loop broke.
    is_broken: the engine's books are wrong, or it fails again and again; this process is of no use any more.
    num_turns: turns so far, at least one every MAX_IDLE_S, unless a step takes longer or hangs.
    """

    def __init__(
        self,
        engine: EngineCore,
        inbox: Inbox,
        deliver: Callable[[Deliveries], None],
        on_broken: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_running = True
        self.is_broken = False
        self.stats = engine.stats()
        self.num_turns = 0
        self._engine = engine
        self._inbox = inbox
        self._deliver = deliver
        self._on_broken = on_broken
        self._clock = clock
        self._begun: dict[AttemptId, Begin] = {}
        self._commands: deque[Command] = deque()
        self._deliveries = Deliveries()
        self._has_more_to_do = False
        self._num_failed_steps = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def num_begun(self) -> int:
        """Attempts that have not ended."""
        return len(self._begun)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends all attempts and the thread; returns False if a step takes longer than `timeout_s`."""
        self.is_running = False
        self._inbox.ring()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Gives the loop up, though its thread may hang: it takes no command any more, and winds up should it go on."""
        self._break()
        self._inbox.close()

    def begin(self, call: Call, job: Job) -> None:
        """Starts an attempt. Raises Unavailable if the loop has ended."""
        if not self._inbox.put(Begin(call, job)):
            raise Unavailable("the worker has stopped")

    def withdraw(self, call: Call, error: BatonError) -> None:
        """Ends an attempt before the next step. Does nothing if it has ended."""
        self._inbox.put(Withdraw(call, error))

    def end_choice(self, call: Call, index: int) -> None:
        """Ends a choice of an attempt before the next step, as a stop token does. Does nothing if it has ended."""
        self._inbox.put(EndChoice(call, index))

    def ask(self, question: Callable[[EngineCore], list[str]]) -> Future[list[str]]:
        """Puts a question to the engine between two steps. Raises Unavailable if the loop has ended."""
        answer: Future[list[str]] = Future()
        if not self._inbox.put(Ask(question, answer)):
            raise Unavailable("the worker has stopped")
        return answer

    def turn(self) -> None:
        """Obeys commands, steps the engine once, and delivers the outcome. Blocks up to MAX_IDLE_S without work."""
        self._commands += self._inbox.take(0.0 if self._has_more_to_do else MAX_IDLE_S)
        try:
            while self._commands:
                self._obey(self._commands.popleft())
            began_s = self._clock()
            output = self._engine.step()
            self._pass_on(output, began_s)
            self._has_more_to_do = output.is_news or self._engine.can_step
            if output.token_ids:
                self._num_failed_steps = 0
        except Exception as error:  # of whatever the model's step may raise; the thread has to outlive it
            self._recover(error)
        self.stats = self._engine.stats()
        self._hand_over()
        self.num_turns += 1

    def run_one(self) -> bool:
        """Makes a turn while the loop runs; then answers all that waits for it, and returns False."""
        try:
            if self.is_running:
                self.turn()
                return True
        except Exception:  # a bug of ours outside of a step: nothing may go on waiting for this thread
            log.critical("the engine's thread has failed", exc_info=True)
            self._break()
        self._wind_up()
        if self.is_broken:
            self._on_broken()
        return False

    def _run(self) -> None:
        os.nice(ENGINE_NICENESS)  # of this thread and the threads that it starts
        while self.run_one():
            pass

    def _obey(self, command: Command) -> None:
        match command:
            case Begin(call, job):
                self._begun[call.id] = command
                try:
                    self._engine.add(job.request)
                except BatonError as error:
                    self._note(command, job.take(Failed(call.id, error), self._clock()))
            case Withdraw(call, error):
                begun = self._begun.get(call.id)
                if begun is not None and begun.call is call:
                    self._engine.abort(call.id)
                    self._note(begun, begun.job.withdraw(error))
            case EndChoice(call, index):
                begun = self._begun.get(call.id)
                if begun is not None and begun.call is call and self._engine.end(call.id, index):
                    self._tell(Finished(call.id, index, FinishReason.STOP), self._clock())
            case Ask():
                command.put_to(self._engine)

    def _pass_on(self, output: StepOutput, began_s: float) -> None:
        """Hands the tokens and events of one step to their jobs.

        Events before the run happened when the step began; tokens, and the events that followed, just now.
        """
        for event in output.before:
            self._tell(event, began_s)
        if not (output.token_ids or output.after):
            return
        now_s = self._clock()
        for place, (choice, position, token_id) in enumerate(
            zip(output.choices, output.positions, output.token_ids, strict=True)
        ):
            begun = self._begun.get(choice.attempt_id)
            if begun is not None:
                logprobs = (output.logprobs[place],) if place in output.logprobs else ()
                tokens = ChoiceTokens(choice.index, position, (token_id,), logprobs)
                self._note(begun, begun.job.gain(tokens, now_s))
        for event in output.after:
            self._tell(event, now_s)

    def _tell(self, event: Event, now_s: float) -> None:
        begun = self._begun.get(event.attempt_id)
        if begun is not None:
            self._note(begun, begun.job.take(event, now_s))
        elif isinstance(event, Abandoned):
            self._deliveries.released.append(event.attempt_id)

    def _note(self, begun: Begin, update: Update) -> None:
        """Joins an update to its call's update for delivery."""
        if update is NOTHING_NEW:
            return
        call, updates = begun.call, self._deliveries.updates
        updates[call] = updates[call].followed_by(update) if call in updates else update
        if update.releases_hold:
            self._deliveries.released.append(call.id)
        if update.end is not None:
            del self._begun[call.id]

    def _hand_over(self) -> None:
        deliveries, self._deliveries = self._deliveries, Deliveries()
        if deliveries.updates or deliveries.released:
            self._deliver(deliveries)

    def _recover(self, failure: Exception) -> None:
        incident = secrets.token_hex(8)
        log.error("incident %s: a step failed", incident, exc_info=failure)
        self._num_failed_steps += 1
        self._has_more_to_do = bool(self._commands)
        problems = self._withdraw_all(Unavailable(f"a step of the worker failed, incident {incident}"))
        problems += self._check()
        if problems or self._num_failed_steps == MAX_FAILED_STEPS:
            log.critical("incident %s: the engine is given up: %s", incident, "; ".join(problems) or "it fails on")
            self._break()

    def _withdraw_all(self, error: BatonError) -> list[str]:
        """Ends every attempt, whatever state the engine is in; returns the problems."""
        problems = []
        for begun in list(self._begun.values()):
            try:
                self._engine.abort(begun.call.id)
            except Exception:  # every caller has to be answered
                log.exception("not taken out of the engine", extra={"attempt_id": begun.call.id})
                problems.append("a request cannot be taken out of the engine")
            self._note(begun, begun.job.withdraw(error))
        return problems

    def _check(self) -> list[str]:
        try:
            return self._engine.check()
        except Exception as error:  # books that cannot be read are wrong
            return [f"the engine's check fails: {type(error).__name__}"]

    def _break(self) -> None:
        self.is_broken = True
        self.is_running = False

    def _wind_up(self) -> None:
        """Closes the inbox, and answers every command and attempt."""
        stopped = Unavailable("the worker has stopped")
        self._inbox.close()
        self._commands += self._inbox.take(0.0)
        self._withdraw_all(stopped)
        for command in self._commands:
            if isinstance(command, Begin):
                self._deliveries.updates[command.call] = Update(end=End(stopped))
            elif isinstance(command, Ask):
                command.refuse(stopped)
        self._hand_over()
