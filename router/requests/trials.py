"""Requests that are tried for the last time, one after another."""

import asyncio
from collections import OrderedDict

from wire.ids import RequestId


class Trials:
    """At most one request at a time is on trial.

    Of those that were on two workers when these died, one may be what they died of. Tried together, a third death would
    end them all; tried one by one, it ends the one.
    """

    def __init__(self) -> None:
        self._turns: OrderedDict[RequestId, asyncio.Event] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    async def begin(self, request_id: RequestId) -> None:
        """Returns when it is this request's turn; its caller bounds the wait."""
        turn = self._turns.setdefault(request_id, asyncio.Event())
        self._let_first_go()
        await turn.wait()

    def end(self, request_id: RequestId) -> None:
        """The request is no longer tried alone, or no longer waits for that. May be called for any, at any time."""
        self._turns.pop(request_id, None)
        self._let_first_go()

    def _let_first_go(self) -> None:
        for turn in self._turns.values():
            turn.set()
            return
