"""The store as an engine sees it below its own pages: it finds, fetches and writes blocks by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_store.node.messages import DirectoryStatus, KeepHint
from kv_store.prefix.plan import FRONT, Needs, Read
from kv_store.tiers.contents import ListableTier
from wire.block_names import BlockName
from wire.ids import AttemptId, PageId
from wire.tier import Disposition, FarStatus, Tier


@dataclass(frozen=True, kw_only=True)
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
class Reading:
    """The disposition of each block of a fetch, in order; the blocks that were read fill the first pages.

    later: a step of the plan that is left for `BlockStore.read`.
    """

    blocks: Sequence[Disposition] = ()
    later: Read | None = None

    @property
    def tiers(self) -> list[Tier]:
        """The tiers of the blocks that were read."""
        return [block for block in self.blocks if isinstance(block, Tier)]


NOTHING = Reading()


class BlockStore(Protocol):
    """Blocks by name, below an engine's pages. Blocking; one thread fetches, writes and purges.

    A failed tier is a miss, never an error.
    """

    def fence(self) -> None:
        """Puts later copies after the work queued so far. For the thread that computes, before each transfer."""

    def fetch(
        self, names: Sequence[BlockName], pages: Sequence[PageId], peers: Sequence[str] = (), needs: Needs = FRONT
    ) -> Reading:
        """Copies blocks of one prompt that prove good, and are worth it, into the caller's own pages, as planned.

        They are a front of `names`; with `needs.starts`, the blocks up to the last that can be used. The pages suffice
        for these. peers: addresses of the block ports of other nodes to ask, in this order.
        """

    def read(self, step: Read, pages: Sequence[PageId]) -> Reading:
        """Carries out a step that `fetch` has left, up to the first block that is gone or spoilt, without causes."""

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
