"""The event loops of tests: one for each test, in a process whose grpc.aio has one poller for all of them."""

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")


class DeafLoop(asyncio.SelectorEventLoop):
    """A loop that drops what other threads call after its end.

    A poller of grpc.aio that meets a closed loop ends, and every later call in its process waits for ever.
    """

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise
            return asyncio.Handle(callback, args, self)


class LoopPolicy(asyncio.DefaultEventLoopPolicy):
    """Makes such loops."""

    def new_event_loop(self) -> DeafLoop:
        return DeafLoop()
