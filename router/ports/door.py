"""Who may send the router a message: bounds on what is on its way, before it is known what it is."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from router.requests.dispatch import Dispatcher
from wire.errors import Overloaded

MAX_ARRIVING = 64
"""Calls whose message is not there yet: each may hold as much memory as a message may have bytes."""
RETRY_AFTER_S = 1.0


class Door:
    """Of one port. Messages for the method with the path `generate` come in only where there is room for a request."""

    def __init__(self, dispatcher: Dispatcher, generate: str) -> None:
        self._dispatcher = dispatcher
        self._generate = generate
        self.num_arriving = 0

    @contextmanager
    def arriving(self, method: str) -> Iterator[None]:
        """While a message for that path is waited for. Raises Overloaded at once."""
        with self._dispatcher.arriving() if method == self._generate else nullcontext():
            if self.num_arriving >= MAX_ARRIVING:
                raise Overloaded("as many messages are on their way as may be", RETRY_AFTER_S)
            self.num_arriving += 1
            try:
                yield
            finally:
                self.num_arriving -= 1
