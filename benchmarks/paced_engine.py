"""An engine that computes nothing: each step waits for the next beat of its clock, and gives every choice a token."""

import time
from collections.abc import Collection

from engine.events import ChoiceId, EngineStats, Fetched, Finished, PromptTokens, Scheduled, Started, StepOutput
from engine.request import EngineRequest
from wire.ids import AttemptId
from wire.sampling import FinishReason
from wire.tier import LedgerCounts

_TOKEN = ord("a")
_STATS = EngineStats(LedgerCounts(0, 0, 0, 0, 0, 0), *[0] * 9)


class PacedEngine:
    """The part of EngineCore that a worker's loop uses. Requests of one choice only."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._positions: dict[AttemptId, int] = {}
        self._requests: dict[AttemptId, EngineRequest] = {}

    @property
    def attempts(self) -> Collection[AttemptId]:
        return self._requests.keys()

    @property
    def can_step(self) -> bool:
        return bool(self._requests)

    def add(self, request: EngineRequest) -> None:
        self._requests[request.attempt_id] = request

    def abort(self, attempt_id: AttemptId) -> None:
        self._requests.pop(attempt_id, None)
        self._positions.pop(attempt_id, None)

    def step(self) -> StepOutput:
        output = StepOutput()
        if self._requests:
            time.sleep(self._interval_s - time.monotonic() % self._interval_s)
        for request in list(self._requests.values()):
            self._turn(request, output)
        return output

    def stats(self) -> EngineStats:
        return _STATS

    def check(self) -> list[str]:
        return []

    def _turn(self, request: EngineRequest, output: StepOutput) -> None:
        attempt_id = request.attempt_id
        if attempt_id not in self._positions:
            output.before += (Scheduled(attempt_id, 0), Fetched(attempt_id, 0, PromptTokens()), Started(attempt_id, 0))
        position = self._positions.get(attempt_id, 0)
        self._positions[attempt_id] = position + 1
        output.choices.append(ChoiceId(attempt_id, 0))
        output.positions.append(position)
        output.token_ids.append(_TOKEN)
        if position + 1 == request.sampling.max_tokens:
            self.abort(attempt_id)
            output.after.append(Finished(attempt_id, 0, FinishReason.LENGTH))
