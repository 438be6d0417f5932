"""The decisions of supervision: is a process dead, or silent for too long; the back-off of its next start. Pure."""

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

    Each failed probe adds the time since the probe before, at most MAX_GAP_S: in a longer gap the prober itself was
    stopped, perhaps with the probed processes, as when a laptop sleeps.
    """

    def __init__(self) -> None:
        self._silent_s = 0.0
        self._probed_in_vain_s: float | None = None

    def judge(self, liveness: Liveness, now_s: float) -> str | None:
        """Returns the reason to give the process up, in words, or None. now_s: reading of a monotonic clock."""
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
    """Returns the pause before the next start: 1 s after the first failure, doubled by each further, at most 30 s."""
    return min(MAX_BACKOFF_S, 2.0 ** max(0, num_failures - 1))
