"""The store below an engine's pages: it finds, fetches and writes blocks by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_store.device_pool import Fence
from kv_store.node.messages import DirectoryStatus, HoldRoom, KeepHint
from kv_store.prefix.plan import FRONT, Needs, Read
from kv_store.tiers.contents import ListableTier
from wire.block_names import BlockName
from wire.ids import AttemptId, PageId
from wire.tier import Disposition, FarStatus, Tier


@dataclass(frozen=True, kw_only=True)
class StoreStatus:
    """The state of a store, with counts since its start. directory: None while unreachable.

    prefill_token_s: seconds of prefill a token, which fetches compare with reads; None before the first prompt.
    """

    directory: DirectoryStatus | None
    cold: Sequence[FarStatus]
    block_bytes: int
    num_corrupt: int = 0
    num_failed: int = 0
    prefill_token_s: float | None = None


@dataclass(frozen=True)
class ReadResult:
    """The disposition of each block of a fetch, in order; read blocks fill the first pages.

    later: a step of the plan for `BlockStore.read`, if any.
    """

    blocks: Sequence[Disposition] = ()
    later: Read | None = None

    @property
    def tiers(self) -> list[Tier]:
        """The tiers of the blocks that were read."""
        return [block for block in self.blocks if isinstance(block, Tier)]


NOTHING = ReadResult()


class BlockStore(Protocol):
    """Blocks by name, below an engine's pages. Blocking; one thread fetches, writes and purges.

    A failed tier is a miss, never an error.
    """

    def fence(self) -> Fence:
        """Notes the work queued so far, for `follow`. For the computing thread, before each transfer."""

    def follow(self, fence: Fence) -> None:
        """Makes later copies wait for the work before a fence. Does not block."""

    def fetch(
        self, names: Sequence[BlockName], pages: Sequence[PageId], peers: Sequence[str] = (), needs: Needs = FRONT
    ) -> ReadResult:
        """Plans the read of a prompt's blocks, and copies verified blocks into the caller's pages.

        The read blocks are a front of `names`; with `needs.starts`, the needed blocks up to the last usable block.
        There are enough pages for these. peers: block ports of other nodes to ask, by address, in order.
        """

    def read(self, step: Read, pages: Sequence[PageId]) -> ReadResult:
        """Carries out a step that `fetch` has left, up to the first missing or damaged block, without causes."""

    def write_through(self, names: Sequence[BlockName], pages: Sequence[PageId], hold: AttemptId | None) -> int:
        """Copies pages to the host tier unless it has their blocks; with `hold`, holds them for that request.

        Returns how many of the blocks the host tier now has, from any writer.
        """

    def purge(self, names: Sequence[BlockName], peers: Sequence[str] = ()) -> None:
        """Deletes blocks from every tier, and from the arenas of these block ports."""

    def keep(self, names: Sequence[BlockName], hint: KeepHint) -> None:
        """Notes a hint about blocks that a request has used; may do nothing."""


class StoreControl(Protocol):
    """Holds, status and checks of a node's store, without moving blocks. Blocking; safe beside a `BlockStore`'s thread.

    If the directory is unreachable, `renew` returns nothing, and `check` says so; neither raises.
    """

    def renew(self, attempt_ids: Sequence[AttemptId]) -> list[AttemptId]:
        """Prolongs the holds of requests; returns the requests without a hold."""

    def release_holds(self, attempt_ids: Sequence[AttemptId]) -> None:
        """Ends the holds of requests."""

    def share_room(self, router: str, num_blocks: int) -> HoldRoom:
        """Tells what a router's holds take; returns what other routers' take: none if the directory is unreachable."""

    @property
    def listable_tiers(self) -> Sequence[ListableTier]:
        """The tiers whose blocks can be listed and cleared, nearest first."""

    def status(self) -> StoreStatus: ...

    def check(self) -> list[str]:
        """Lists violated invariants of the host tier; empty if none."""
