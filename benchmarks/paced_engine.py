"""An engine that computes nothing: each step waits for the next beat of its clock, and gives every choice a token."""

import time

from engine.events import ChoiceId, EngineStats, Fetched, Finished, Scheduled, Started, StepOutput, TierTokens
from engine.request import EngineRequest
from wire.ids import RequestId
from wire.sampling import FinishReason
from wire.tier import BlockCounts

_TOKEN = ord("a")
_STATS = EngineStats(BlockCounts(0, 0, 0, 0, 0, 0), *[0] * 9)


class PacedEngine:
    """The part of EngineCore that a worker's loop uses. Requests of one choice only."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._positions: dict[RequestId, int] = {}
        self._requests: dict[RequestId, EngineRequest] = {}

    @property
    def can_step(self) -> bool:
        return bool(self._requests)

    def add(self, request: EngineRequest) -> None:
        self._requests[request.request_id] = request

    def abort(self, request_id: RequestId) -> None:
        self._requests.pop(request_id, None)
        self._positions.pop(request_id, None)

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
        request_id = request.request_id
        if request_id not in self._positions:
            output.before += (Scheduled(request_id, 0), Fetched(request_id, 0, TierTokens()), Started(request_id, 0))
        position = self._positions.get(request_id, 0)
        self._positions[request_id] = position + 1
        output.choices.append(ChoiceId(request_id, 0))
        output.positions.append(position)
        output.token_ids.append(_TOKEN)
        if position + 1 == request.sampling.max_tokens:
            self.abort(request_id)
            output.after.append(Finished(request_id, 0, FinishReason.LENGTH))
