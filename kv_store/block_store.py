"""The store as an engine sees it below its own pages: it finds, fetches and writes blocks by name."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kv_store.costs import SplitRule
from kv_store.node.directory_port import DirectoryStatus, KeepHint
from kv_store.tiers.cold_tier import BlockSource
from kv_store.tiers.contents import ListableTier
from wire.block_names import BlockName
from wire.ids import AttemptId, PageId
from wire.tier import FarStatus, Miss, Tier


@dataclass(frozen=True)
class StoreStatus:
    """`directory` is None while it is out of reach. Counts since the start of this store.

    prefill_token_s: seconds of prefill a token, as fetches compare reads with; None before the first prompt.
    """

    directory: DirectoryStatus | None
    cold: Sequence[FarStatus]
    block_bytes: int
    num_corrupt: int = 0
    num_failed: int = 0
    prefill_token_s: float | None = None


@dataclass(frozen=True)
class Back:
    """Blocks of a prefix that a store has found, and left for `fetch_back`. sources: of each; None is the arena."""

    names: Sequence[BlockName]
    sources: Sequence[BlockSource | None]
    rule: SplitRule

    def part(self, start: int, stop: int) -> "Back":
        return replace(self, names=self.names[start:stop], sources=self.sources[start:stop])


@dataclass(frozen=True)
class Front:
    """The tier of each block that was copied, and the blocks left for later, if there are any."""

    tiers: list[Tier]
    back: Back | None = None


class BlockStore(Protocol):
    """Blocks by name, below an engine's pages. Blocking; one thread fetches, writes and purges.

    A failed tier is a miss, never an error.
    """

    def fence(self) -> None:
        """Puts later copies after the work queued so far. For the thread that computes, before each transfer."""

    def fetch(self, names: Sequence[BlockName], pages: Sequence[PageId], peers: Sequence[str] = ()) -> list[Tier]:
        """Copies the longest verified prefix of `names` into the caller's own pages; returns the tier of each block.

        peers: addresses of the block ports of other nodes to ask, in this order.
        """

    def fetch_front(self, names: Sequence[BlockName], pages: Sequence[PageId], peers: Sequence[str] = ()) -> Front:
        """Does what `fetch` does, but where blocks are better read from the end while the front is computed.

        Then it copies the first blocks of the host tier alone, and returns the other found ones.
        """

    def fetch_back(self, back: Back, pages: Sequence[PageId]) -> list[Tier]:
        """Copies blocks that `fetch_front` has found, up to the first that is gone or spoilt; returns their tiers."""

    def misses(self, names: Sequence[BlockName]) -> list[Miss]:
        """Finds why the last `fetch`, or `longest` before it, has not brought these blocks of one prompt."""

    def longest(self, names: Sequence[BlockName], starts: Sequence[int], peers: Sequence[str] = ()) -> slice:
        """Finds the blocks up to the last of `names` that can be used: all from starts[i] to i are here; or none.

        starts: for each name the first of the names that it needs, ascending. peers: as of `fetch`.
        """

    def write_through(self, names: Sequence[BlockName], pages: Sequence[PageId], hold: AttemptId | None) -> int:
        """Copies pages into the host tier where they are missing; with `hold`, keeps them for that request.

        Returns how many of the blocks are in the host tier now, of whichever writer.
        """

    def purge(self, names: Sequence[BlockName], peers: Sequence[str] = ()) -> None:
        """Deletes blocks from every tier, and from the arenas behind these block ports."""

    def keep(self, names: Sequence[BlockName], hint: KeepHint) -> None:
        """Notes a hint about blocks that a request has used; may do nothing."""


class StoreControl(Protocol):
    """Holds, status and checks of a node's store; moves no block. Blocking; safe beside a `BlockStore`'s thread.

    With the directory out of reach `renew` returns nothing, and `check` names it; neither raises.
    """

    def renew(self, attempt_ids: Sequence[AttemptId]) -> list[AttemptId]:
        """Prolongs the holds of requests; returns the requests that have none, or none any more."""

    def release_holds(self, attempt_ids: Sequence[AttemptId]) -> None:
        """Ends the holds of requests."""

    @property
    def listable_tiers(self) -> Sequence[ListableTier]:
        """The tiers whose blocks can be listed and cleared, nearest first."""

    def status(self) -> StoreStatus: ...

    def check(self) -> list[str]:
        """Lists violated invariants of the host tier; empty if none."""
