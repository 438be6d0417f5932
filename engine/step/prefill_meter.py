"""The meter of prefill, which reports the cost of computing."""

import time
from collections.abc import Callable

from engine.step.work import Work


class PrefillMeter:
    """A meter of prefill. report: called with tokens and seconds of steps with chunks; the store learns from it.

    A step without samples is not waited for, and may still run on the device: its tokens count in the next report of a
    step with samples and chunks.
    """

    def __init__(
        self,
        report: Callable[[int, float], None] = lambda num_tokens, took_s: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self._report = report
        self._num_tokens, self._took_s = 0, 0.0

    def note(self, work: Work, began_s: float, has_waited: bool) -> None:
        if work.chunks:
            self._num_tokens += work.num_tokens
            self._took_s += self.clock() - began_s
            if has_waited:
                self._report(self._num_tokens, self._took_s)
                self._num_tokens, self._took_s = 0, 0.0
