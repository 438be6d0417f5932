"""Where prefixes were sent: a guess at which worker still has which blocks. A wrong guess costs time only."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from wire.ids import BlockKey, WorkerId


class PrefixMap:
    """Block key to the workers that were given it, the `max_keys` used last."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._workers: OrderedDict[BlockKey, set[WorkerId]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def record(self, keys: Sequence[BlockKey], worker: WorkerId) -> None:
        """The blocks of a prompt were sent to a worker. A prompt's end is forgotten before its start."""
        for key in reversed(keys):
            self._workers.setdefault(key, set()).add(worker)
            self._workers.move_to_end(key)
        while len(self._workers) > self._max_keys:
            self._workers.popitem(last=False)

    def match(self, keys: Iterable[BlockKey]) -> dict[WorkerId, int]:
        """For each worker, how many of the leading blocks it was sent. Workers with none are left out."""
        matches: dict[WorkerId, int] = {}
        going: set[WorkerId] | None = None
        for num_blocks, key in enumerate(keys, start=1):
            holders = self._workers.get(key, set())
            going = holders if going is None else going & holders
            if not going:
                break
            matches.update(dict.fromkeys(going, num_blocks))
        return matches
