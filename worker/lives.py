"""The requests at an engine: each is told what happened to it, and what it wants of the engine is done."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core import EngineCore
from engine.events import Abandoned, Emitted, Event, Failed
from wire.errors import BatonError
from wire.ids import RequestId
from worker.call import Call
from worker.commands import Begin
from worker.instructions import AbortInEngine, AddToEngine, Close, Instruction, ReleaseHold, Send
from worker.lifecycle import Withdrawn

log = logging.getLogger(__name__)


@dataclass
class Deliveries:
    """What is wanted of others than the engine: replies to calls, in order, and holds to be released."""

    replies: list[tuple[Call, Send | Close]] = field(default_factory=list)
    released: list[RequestId] = field(default_factory=list)


class Lives:
    """At most one life for each request id. Belongs to the engine's thread."""

    def __init__(self, engine: EngineCore, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._lives: dict[RequestId, Begin] = {}
        self._deliveries = Deliveries()

    def begin(self, life: Begin) -> None:
        """Starts a life. What the engine refuses ends at once, with the engine's error."""
        self._lives[life.call.request_id] = life
        self._carry_out(life, life.lifecycle.start())

    def withdraw(self, call: Call, error: BatonError) -> None:
        """Ends the life that belongs to this very call. Does nothing if it has ended."""
        life = self._lives.get(call.request_id)
        if life is not None and life.call is call:
            self._tell_one(life, [Withdrawn(error)], self._clock())

    def withdraw_all(self, error: BatonError) -> list[str]:
        """Ends every life, whatever state the engine is in; returns what went wrong with it."""
        problems = []
        for life in list(self._lives.values()):
            try:
                self.withdraw(life.call, error)
            except Exception:  # every caller has to be answered
                log.exception("not taken out of the engine", extra={"request_id": life.call.request_id})
            if life.call.request_id in self._lives:
                problems.append("a request cannot be taken out of the engine")
                self._do(life, Close(error))
        return problems

    def tell(self, events: Sequence[Event], began_s: float) -> None:
        """Hands the events of one step to the lives they belong to.

        What was decided before the model ran, up to the first token, happened when the step began, the rest just now.
        """
        num_before = next((number for number, event in enumerate(events) if isinstance(event, Emitted)), len(events))
        self._tell_all(events[:num_before], began_s)
        self._tell_all(events[num_before:], self._clock())

    def _tell_all(self, events: Sequence[Event], now_s: float) -> None:
        by_request: dict[RequestId, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, own in by_request.items():
            if request_id in self._lives:
                self._tell_one(self._lives[request_id], own, now_s)
            elif Abandoned(request_id) in own:
                self._deliveries.released.append(request_id)

    def take_deliveries(self) -> Deliveries:
        """What has come together since the last time."""
        deliveries, self._deliveries = self._deliveries, Deliveries()
        return deliveries

    def _tell_one(self, life: Begin, events: Sequence[Event | Withdrawn], now_s: float) -> None:
        self._carry_out(life, life.lifecycle.handle(events, now_s))

    def _carry_out(self, life: Begin, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            self._do(life, instruction)

    def _do(self, life: Begin, instruction: Instruction) -> None:
        match instruction:
            case AddToEngine(request):
                try:
                    self._engine.add(request)
                except BatonError as error:
                    self._tell_one(life, [Failed(request.request_id, error)], self._clock())
            case AbortInEngine(request_id):
                self._engine.abort(request_id)
            case ReleaseHold(request_id):
                self._deliveries.released.append(request_id)
            case Send():
                self._deliveries.replies.append((life.call, instruction))
            case Close():
                del self._lives[life.call.request_id]
                self._deliveries.replies.append((life.call, instruction))
