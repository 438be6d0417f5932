"""Connections to services of other processes: a circuit breaker, and reads of an exact number of bytes."""

from collections.abc import Callable


def receive_exactly(receive_some: Callable[[memoryview], int], into: memoryview) -> memoryview:
    """Fills `into`, by as many reads as needed, and returns it.

    receive_some: fills the start of a view, as `socket.recv_into` does, and raises OSError after a timeout. Raises
    ConnectionError if the peer closes.
    """
    left = into
    while left:
        num_received = receive_some(left)
        if not num_received:
            raise ConnectionError("the other side has hung up")
        left = left[num_received:]
    return into


class Breaker:
    """A circuit breaker: opens after `max_errors` errors in a row, then admits a call every `probe_every_s`.

    Around each call: `allows()` before, then `succeeded()` or `failed()`. `clock` is monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float], max_errors: int = 3, probe_every_s: float = 2.0) -> None:
        self._clock = clock
        self._max_errors = max_errors
        self._probe_every_s = probe_every_s
        self._num_errors = 0
        self._next_probe = 0.0

    @property
    def is_open(self) -> bool:
        return self._num_errors >= self._max_errors

    def allows(self) -> bool:
        """Returns whether to call now. While open, True means a probe; the next probe follows after `probe_every_s`."""
        if not self.is_open:
            return True
        if self._clock() < self._next_probe:
            return False
        self._next_probe = self._clock() + self._probe_every_s
        return True

    def succeeded(self) -> None:
        self._num_errors = 0

    def failed(self) -> None:
        self._num_errors += 1
        self._next_probe = self._clock() + self._probe_every_s
