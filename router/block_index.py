"""The index of blocks in nodes' arenas, fed by their events: how much of a prompt each node has. Pure."""

import logging
from collections.abc import Sequence

from wire.ids import BlockKey
from wire.layout import KVLayout, Window
from wire.pb import worker_pb2
from wire.tier import EventKind, Tier

_KEY_BYTES = 8
_MASK = (1 << 60) - 1
"""The bits of a key that the index keeps: a longer integer takes half as much memory again. A collision costs a miss.
"""

log = logging.getLogger(__name__)


class BlockIndex:
    """The index of blocks in nodes' arenas. It is a hint for placement: workers look blocks up themselves.

    It takes 75 to 150 bytes a block: a dict of integers, which garbage collection does not traverse.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._window = Window(layout)
        self._nodes: dict[str, _NodeBlocks] = {}

    def cursor(self, node_id: str) -> worker_pb2.EventCursor:
        """Returns the place after the node's last page; without an epoch if a snapshot must come first."""
        node = self._nodes.get(node_id)
        return worker_pb2.EventCursor() if node is None else node.cursor

    def take(self, page: worker_pb2.EventPage) -> None:
        """Takes the node's next page. Forgets the node if that does not continue its last, or says that it is gone."""
        node = self._nodes.setdefault(page.node_id, _NodeBlocks())
        if page.after != node.cursor:
            log.warning("block events of node %r are lost, doubled or old: a snapshot follows", page.node_id)
        if page.after != node.cursor or not page.cursor.epoch:
            del self._nodes[page.node_id]
        else:
            node.take(page)

    def break_off(self, node_id: str) -> None:
        """Leaves a node out of placement until its next page."""
        if node_id in self._nodes:
            self._nodes[node_id].is_broken = True

    def clear(self) -> None:
        """Forgets all nodes; their snapshots come again."""
        self._nodes.clear()

    def match(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """Counts, for known nodes, the leading blocks of a prompt that the node has or that no later token reads."""
        known = {node_id: node for node_id, node in self._nodes.items() if node.is_known}
        marks = [mark_of(key) for key in keys] if known else []
        return {node_id: self._num_usable(node.blocks, marks) for node_id, node in known.items()}

    def marks(self, node_id: str) -> set[int] | None:
        """Returns `mark_of` each block of a node; None unless all its blocks are known."""
        node = self._nodes.get(node_id)
        return {*node.blocks} if node is not None and node.is_known else None

    def _num_usable(self, blocks: dict[int, None], marks: Sequence[int]) -> int:
        """Counts the leading blocks after which the next token finds all that its window, with sinks, sees."""
        num_first = len(marks) if self._window.layout.window is None else self._window.num_sink_blocks
        missing = next((place for place, mark in enumerate(marks[:num_first]) if mark not in blocks), None)
        if missing is not None or self._window.layout.window is None:
            return len(marks) if missing is None else missing
        place = end = len(marks)
        while place > self._window.first_block(end * self._window.layout.block_size):
            place -= 1
            end = end if marks[place] in blocks else place
        return end


class _NodeBlocks:
    """The blocks of one arena, by the events received."""

    def __init__(self) -> None:
        self.blocks: dict[int, None] = {}
        self.cursor = worker_pb2.EventCursor()
        self.is_broken = False

    @property
    def is_known(self) -> bool:
        """Whether a snapshot is complete, and events come."""
        return bool(self.cursor.epoch) and not self.cursor.slot and not self.is_broken

    def take(self, page: worker_pb2.EventPage) -> None:
        for events in page.events:
            if events.tier == Tier.HOST:
                self._change(events)
        self.cursor = page.cursor
        self.is_broken = False

    def _change(self, events: worker_pb2.BlockEvents) -> None:
        marks = [mark_of(key) for key in events.keys]
        if events.kind == EventKind.STORED:
            self.blocks.update(dict.fromkeys(marks))
        elif events.kind == EventKind.REMOVED:
            for mark in marks:
                self.blocks.pop(mark, None)
        else:
            self.blocks = {}


def mark_of(key: bytes) -> int:
    return int.from_bytes(key[:_KEY_BYTES], "little") & _MASK
