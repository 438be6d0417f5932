"""When to give up a process: it is dead, or has not answered for too long."""

from deploy.actors.worker_host import Life

LOOK_EVERY_S = 1.0
MAX_SILENCE_S = 30.0
MAX_GAP_S = 5.0


class Watch:
    """Of one process. Has no clock of its own.

    Silence grows with each look in vain, by the time since the one before. No gap between looks counts for more than
    MAX_GAP_S: after a longer one, whoever looks was stopped itself, and those it looks at may have been stopped with
    it, as when a laptop sleeps.
    """

    def __init__(self) -> None:
        self._silent_s = 0.0
        self._looked_in_vain_s: float | None = None

    def judge(self, life: Life, now_s: float) -> str | None:
        """What is wrong with it, in words, if it is to be given up. `now_s` is of one monotonic clock."""
        if life is Life.DEAD:
            return "was lost"
        if life is Life.ANSWERING:
            self._silent_s, self._looked_in_vain_s = 0.0, None
            return None
        if self._looked_in_vain_s is not None:
            self._silent_s += min(now_s - self._looked_in_vain_s, MAX_GAP_S)
        self._looked_in_vain_s = now_s
        return f"was silent for {self._silent_s:.0f} s, and is ended" if self._silent_s > MAX_SILENCE_S else None
