"""The decisions of supervision: a process is dead, or silent for too long; how long its next start waits. Pure."""

from enum import Enum

PROBE_EVERY_S = 1.0
MAX_SILENCE_S = 30.0
MAX_GAP_S = 5.0
MAX_BACKOFF_S = 30.0


class Liveness(Enum):
    """The outcome of one probe of a process."""

    ANSWERING = "answering"
    SILENT = "silent"
    DEAD = "dead"


class FailureDetector:
    """The silence of one process. Has no clock of its own.

    Silence grows with each probe in vain, by the time since the one before. No gap between probes counts for more than
    MAX_GAP_S: after a longer gap the prober itself was stopped, and perhaps the processes that it probes with it, as
    when a laptop sleeps.
    """

    def __init__(self) -> None:
        self._silent_s = 0.0
        self._probed_in_vain_s: float | None = None

    def judge(self, liveness: Liveness, now_s: float) -> str | None:
        """Returns the reason to give the process up, in words, or None. `now_s` is of one monotonic clock."""
        if liveness is Liveness.DEAD:
            return "was lost"
        if liveness is Liveness.ANSWERING:
            self._silent_s, self._probed_in_vain_s = 0.0, None
            return None
        if self._probed_in_vain_s is not None:
            self._silent_s += min(now_s - self._probed_in_vain_s, MAX_GAP_S)
        self._probed_in_vain_s = now_s
        return f"was silent for {self._silent_s:.0f} s, and is ended" if self._silent_s > MAX_SILENCE_S else None


def backoff_s(num_failures: int) -> float:
    """Returns the pause before the next start: 1 s after the first failure, doubled by each further, 30 s at most."""
    return min(MAX_BACKOFF_S, 2.0 ** max(0, num_failures - 1))
