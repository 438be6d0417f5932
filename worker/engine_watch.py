"""A watch over the engine's thread."""

import asyncio
from collections.abc import Callable

LOOK_EVERY_S = 0.5
MAX_SILENCE_S = 120.0
"""Enough for a step of 2048 tokens of a small model on two busy cores."""


class EngineWatch:
    """A watch that compares the engine's number of finished turns with the number at its last look.

    It counts silence in looks and not by a clock: a stop of the whole process holds up the count as well, and does not
    pass for an engine that hangs.
    """

    def __init__(self, num_turns: Callable[[], int], max_silence_s: float) -> None:
        self.silent_s = 0.0
        self._num_turns = num_turns
        self._max_silence_s = max_silence_s
        self._num_turns_seen = num_turns()

    async def wait_for_silence(self) -> None:
        """Waits until the engine has not finished a turn for `max_silence_s`."""
        while self.silent_s < self._max_silence_s:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Compares once. Belongs in a loop of LOOK_EVERY_S."""
        num_turns = self._num_turns()
        self.silent_s = self.silent_s + LOOK_EVERY_S if num_turns == self._num_turns_seen else 0.0
        self._num_turns_seen = num_turns
