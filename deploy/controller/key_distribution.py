"""The distribution of callers' keys, from the cluster's file to every part that admits callers."""

import asyncio
from collections.abc import Awaitable, Callable

from deploy.controller.supervised import EventLog, Tasks, persist
from deploy.local.key_file import LastKeys
from wire.errors import BatonError, ConfigError
from wire.trust.key_ring import NO_CALLER, KeyList


class KeyDistribution:
    """Reads the keys of the file and applies them, one change at a time; retries each second after a failure.

    `apply` returns once all parts use the keys, and raises BatonError otherwise. problem: the reason why the file's
    keys are not in force, else "".
    """

    def __init__(
        self, keys: LastKeys, apply: Callable[[KeyList], Awaitable[None]], tasks: Tasks, events: EventLog
    ) -> None:
        self._keys = keys
        self._apply = apply
        self._tasks = tasks
        self._events = events
        self._applying = asyncio.Lock()
        self.problem = ""

    def first(self) -> KeyList:
        """Returns the keys of the file; if it is unusable, the keys that the last controller read."""
        try:
            return self._keys.read()
        except ConfigError as error:
            recalled = self._keys.recall()
            what = "no caller comes in" if recalled == NO_CALLER else "the keys read last stay in force"
            self._begin_retrying(f"{error.message}: {what}")
            return recalled

    async def reload(self) -> None:
        """Waits until the keys of the file are in force. Raises ConfigError or Unavailable, and goes on trying."""
        try:
            await self._distribute()
        except BatonError as error:
            self._begin_retrying(f"{error.message}: not every part goes by the keys in the file")
            raise

    async def _distribute(self) -> None:
        async with self._applying:  # no part gets the keys of an earlier reading after a later one's
            listed = self._keys.read()
            await self._apply(listed)
            self.problem = ""
            self._events.note(f"{sum(not key.is_revoked for key in listed.keys)} keys are in force")

    def _begin_retrying(self, problem: str) -> None:
        is_begun, self.problem = bool(self.problem), problem
        if not is_begun:
            self._tasks.begin(persist("going by the file of keys", self._distribute, self._events))
