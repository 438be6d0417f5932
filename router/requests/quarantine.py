"""Prompts that are not tried again for a while, because workers seem to die of them."""

from collections import OrderedDict

from wire.ids import BlockKey


class Quarantine:
    """Prompts by the key of their last block, each for `ttl_s`; the `max_prompts` latest. Pure: times are given."""

    def __init__(self, ttl_s: float = 60.0, max_prompts: int = 1024) -> None:
        self._ttl_s = ttl_s
        self._max_prompts = max_prompts
        self._ends: OrderedDict[BlockKey, float] = OrderedDict()

    def add(self, prompt: BlockKey, now_s: float) -> None:
        """A request with this prompt was given up."""
        self._ends[prompt] = now_s + self._ttl_s
        self._ends.move_to_end(prompt)
        while len(self._ends) > self._max_prompts:
            self._ends.popitem(last=False)

    def holds(self, prompt: BlockKey, now_s: float) -> bool:
        return now_s < self._ends.get(prompt, now_s)
