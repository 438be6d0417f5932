"""How long somebody has not answered."""

MAX_GAP_S = 5.0


class Silence:
    """Grows with each look in vain, by the time since the one before. Has no clock of its own.

    No gap between looks counts for more than MAX_GAP_S: after a longer one, whoever looks was stopped itself, and those
    it looks at may have been stopped with it, as when a laptop sleeps.
    """

    def __init__(self) -> None:
        self._total_s = 0.0
        self._looked_s: float | None = None

    def goes_on(self, now_s: float) -> float:
        """There was no answer now either: for how long there was none. `now_s` is of one monotonic clock."""
        if self._looked_s is not None:
            self._total_s += min(now_s - self._looked_s, MAX_GAP_S)
        self._looked_s = now_s
        return self._total_s
