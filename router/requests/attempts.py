"""How often a request was tried, and whether that leads anywhere. Pure."""

from wire.errors import BatonError, WorkerLeaving

MAX_ATTEMPTS = 3
MIN_PROGRESS = 16


class Attempts:
    """Attempts at one request, by number from 1. One that brought fewer than `MIN_PROGRESS` tokens was in vain.

    Only those in vain, one after another, say that the request itself may be what workers die of: a long request may
    outlive any number of them. A worker that gives a request back because it leaves has not died of it.
    """

    def __init__(self) -> None:
        self.number = 1
        self._num_in_vain = 0
        self._num_tokens_before = 0

    @property
    def num_begun(self) -> int:
        """Attempts made, the one under way included."""
        return self.number - 1 if self.are_exhausted else self.number

    @property
    def are_exhausted(self) -> bool:
        return self._num_in_vain >= MAX_ATTEMPTS

    @property
    def is_last(self) -> bool:
        """Whether the request is given up if this attempt is in vain too."""
        return self._num_in_vain == MAX_ATTEMPTS - 1

    def is_in_vain(self, num_tokens: int) -> bool:
        """Of the attempt under way, when the client has so many tokens."""
        return num_tokens - self._num_tokens_before < MIN_PROGRESS

    def begin_next(self, error: BatonError, num_tokens: int) -> None:
        """The attempt ended with this error, when the client had so many tokens."""
        if not self.is_in_vain(num_tokens):
            self._num_in_vain = 0
        elif not isinstance(error, WorkerLeaving):
            self._num_in_vain += 1
        self._num_tokens_before = num_tokens
        self.number += 1
