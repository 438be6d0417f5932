"""Whether the engine's thread still turns."""

import asyncio
from collections.abc import Callable

LOOK_EVERY_S = 0.5
MAX_SILENCE_S = 120.0
"""Enough for a step of 2048 tokens of a small model on two busy cores."""


class EngineWatch:
    """Compares the number of turns that the engine's thread has finished with what it was at the last look.

    Silence is counted in looks and not by a clock: what stops or starves the whole process holds up the count as well,
    and the process is not taken for one that hangs.
    """

    def __init__(self, num_turns: Callable[[], int], max_silence_s: float) -> None:
        self.silent_s = 0.0
        self._num_turns = num_turns
        self._max_silence_s = max_silence_s
        self._num_turns_seen = num_turns()

    async def wait_for_silence(self) -> None:
        """Returns once the engine has not finished a turn for `max_silence_s`."""
        while self.silent_s < self._max_silence_s:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """To be called every LOOK_EVERY_S."""
        num_turns = self._num_turns()
        self.silent_s = self.silent_s + LOOK_EVERY_S if num_turns == self._num_turns_seen else 0.0
        self._num_turns_seen = num_turns
