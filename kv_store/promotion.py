"""Blocks of far tiers on their way to a device, through the arena, where the next reader finds them."""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from kv_store.node.directory_port import DirectoryPort
from kv_store.tiers.cold_tier import BlockSource
from wire.directory import Block
from wire.ids import SlotId
from wire.names import BlockName
from wire.tier import COLD_TIERS, Tier


@dataclass(frozen=True)
class _FarBlock:
    """A block, its source, the slot reserved for it if there was room, and the memory for its payload."""

    name: BlockName
    source: BlockSource
    slot: SlotId | None
    payload: memoryview


class Promotion:
    """The far blocks of one fetch. `read` and `commit` once, in this order; a writer that fails abandons its slots.

    names, sources: the blocks in order, and which source has each. payload: views the payload of a slot; of None,
    memory for one block at a time.
    """

    def __init__(
        self,
        directory: DirectoryPort,
        writer: str,
        names: Sequence[BlockName],
        sources: Sequence[BlockSource],
        payload: Callable[[SlotId | None], memoryview],
    ) -> None:
        self._directory = directory
        self._writer = writer
        slots = directory.reserve(writer, names, None).slots if names else []
        placed = zip(names, sources, slots, strict=True)
        self._blocks = [_FarBlock(name, source, slot, payload(slot)) for name, source, slot in placed]
        self._promoted: list[tuple[Tier, Block]] = []

    def read(self, is_late: Callable[[], bool]) -> Generator[tuple[Tier, memoryview], None, None]:
        """Yields tier and verified payload of each block, up to the first that is missing.

        is_late: whether computing is quicker than reading the next block.
        """
        with ExitStack() as stack:
            checksums = {
                source: stack.enter_context(closing(self._read_from(source)))
                for source in dict.fromkeys(block.source for block in self._blocks)
            }
            for block in self._blocks:
                checksum = None if is_late() else next(checksums[block.source], None)
                if checksum is None:
                    return
                if block.slot is not None:
                    self._promoted.append((block.source.tier, Block(block.slot, block.name, checksum)))
                yield block.source.tier, block.payload

    def commit(self) -> None:
        """Commits the blocks that were read, and gives back the other slots."""
        if self._promoted:
            self._directory.commit(self._writer, [block for _, block in self._promoted], None)
        for tier in COLD_TIERS:  # other nodes may lose theirs
            keys = [block.name.key for source, block in self._promoted if source is tier]
            if keys:
                self._directory.mark_cold(tier, keys)
        if self._blocks:
            self._directory.abandon(self._writer)

    def _read_from(self, source: BlockSource) -> Generator[bytes, None, None]:
        wanted = [block for block in self._blocks if block.source is source]
        return source.get([block.name for block in wanted], [block.payload for block in wanted])
