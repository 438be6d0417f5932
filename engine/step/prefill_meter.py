"""The meter of steps, from which the costs of prefill and of decoding are learned."""

import time
from collections.abc import Callable

from engine.schedule.batcher import StepCosts
from engine.step.work import Work
from kv_store.prefix.costs import MIN_TOKENS, Costs
from wire.tier import Duration

_DECODE_PRIOR_S = 0.01


class PrefillMeter:
    """A meter of steps: `learned` gets the cost of chunks, the time of decoding beside them left out.

    A step without samples is not waited for, and may still run on the device: its tokens count with the next step with
    samples and chunks, as do few tokens of prompts that go on.
    """

    def __init__(self, learned: Costs, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._learned = learned
        self._decode = Duration(_DECODE_PRIOR_S)
        self._num_tokens, self._took_s = 0, 0.0

    @property
    def costs(self) -> StepCosts:
        return StepCosts(self._decode.learned_s or 0.0, self._learned.prefill_token_s)

    def note(self, work: Work, began_s: float, has_waited: bool) -> None:
        took_s = self.clock() - began_s
        if not work.chunks:
            self._decode.learn(took_s)
            return
        self._num_tokens += sum(chunk.num_tokens for chunk in work.chunks)
        self._took_s += took_s - (self.costs.decode_s if work.num_rows else 0.0)
        if has_waited and (self._num_tokens >= MIN_TOKENS or any(chunk.is_sampled for chunk in work.chunks)):
            self._learned.note_prefill(self._num_tokens, self._took_s)
            self._num_tokens, self._took_s = 0, 0.0
