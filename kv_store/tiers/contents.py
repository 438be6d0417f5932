"""Lists of the blocks in a node's tiers, by namespace, and their clearing; in pages of keys, so that no call is long.

    ListableTier.key_pages ─▶ describe ─▶ the blocks of a Selection ─▶ clear, where that is asked for

Stores know tenants and models only by the digest of their namespace root; no token, text or root is read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kv_store.node.directory_port import DirectoryPort
from wire.ids import BlockKey
from wire.tier import StoredBlock, Tier

PAGE_BLOCKS = 256


class HasBytes(Protocol):
    """A value of a known size."""

    @property
    def num_bytes(self) -> int: ...


Sized = TypeVar("Sized", bound=HasBytes)


@dataclass(frozen=True)
class Selection:
    """Blocks to count or clear. keys: limits them to these keys, empty for all. namespaces: likewise."""

    keys: tuple[BlockKey, ...] = ()
    namespaces: frozenset[bytes] = frozenset()


class ListableTier(Protocol):
    """A tier that can list its blocks. Each call, and each step of `key_pages`, raises StoreError if it fails."""

    tier: Tier

    def key_pages(self) -> Iterator[Sequence[BlockKey]]:
        """Yields the keys of all blocks in short pages; blocks that come or go meanwhile may be missing."""

    def describe(self, keys: Sequence[BlockKey]) -> list[StoredBlock]:
        """Describes the stored blocks among these, without counting a use."""

    def clear(self, keys: Sequence[BlockKey]) -> None:
        """Deletes blocks."""


def find(tier: ListableTier, selection: Selection) -> Iterator[list[StoredBlock]]:
    """Yields the selected blocks of a tier, page by page."""
    pages = iter(_pages(selection.keys)) if selection.keys else tier.key_pages()
    for keys in pages:
        found = tier.describe(keys)
        yield [one for one in found if not selection.namespaces or one.namespace in selection.namespaces]


def clear(tier: ListableTier, selection: Selection) -> Iterator[list[StoredBlock]]:
    """Clears the selected blocks of a tier, and yields them, page by page."""
    for blocks in find(tier, selection):
        tier.clear([one.key for one in blocks])
        yield blocks


def beyond(oldest: Sequence[Sized], max_bytes: float) -> list[Sized]:
    """Lists the blocks or files to evict, the oldest first, so that the others have at most `max_bytes`."""
    num_bytes, victims = sum(one.num_bytes for one in oldest), list[Sized]()
    for one in oldest:
        if num_bytes <= max_bytes:
            break
        victims.append(one)
        num_bytes -= one.num_bytes
    return victims


class HostTier:
    """A directory's arena as a ListableTier."""

    tier = Tier.HOST

    def __init__(self, directory: DirectoryPort) -> None:
        self._directory = directory

    def key_pages(self) -> Iterator[Sequence[BlockKey]]:
        for first in range(0, self._directory.records.status().counts.total, PAGE_BLOCKS):
            yield self._directory.contents.keys(first, PAGE_BLOCKS)

    def describe(self, keys: Sequence[BlockKey]) -> list[StoredBlock]:
        return self._directory.contents.describe(keys)

    def clear(self, keys: Sequence[BlockKey]) -> None:
        self._directory.contents.clear(keys)

    def sweep(self, shares: Mapping[bytes, float]) -> None:
        """Does nothing: an arena evicts at each write."""


def _pages(keys: Sequence[BlockKey]) -> list[Sequence[BlockKey]]:
    return [keys[first : first + PAGE_BLOCKS] for first in range(0, len(keys), PAGE_BLOCKS)]
