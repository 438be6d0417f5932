"""When the tokens of one request come."""

from router.observe.metrics import RequestMetrics


class Pace:
    """Times are readings of one monotonic clock."""

    def __init__(self, metrics: RequestMetrics, arrived_s: float) -> None:
        self.first_token_s: float | None = None
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._last_s: dict[int, float] = {}

    @property
    def ttft_s(self) -> float | None:
        """From the request's arrival to its first token; None before."""
        return None if self.first_token_s is None else self.first_token_s - self._arrived_s

    def gained(self, choice: int, num_tokens: int, now_s: float) -> None:
        """A choice gained tokens. Those that come together share the time since the one before."""
        if not num_tokens:
            return
        if self.first_token_s is None:
            self.first_token_s = now_s
            self._metrics.first_token(now_s - self._arrived_s)
        last_s = self._last_s.get(choice)
        self._last_s[choice] = now_s
        self._metrics.tokens(num_tokens)
        if last_s is None:
            return
        for _ in range(num_tokens):
            self._metrics.inter_token((now_s - last_s) / num_tokens)
