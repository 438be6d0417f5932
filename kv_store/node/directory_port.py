"""The seam between a process that maps the arena and the books of who may read and write what in it."""

from collections.abc import Sequence
from typing import Protocol

from wire.directory import Block, DirectoryInfo, DirectoryStatus, Hold, Lease, Reservation
from wire.errors import StoreError
from wire.ids import BlockKey, RequestId
from wire.keys import BlockName


class EpochChanged(StoreError):
    """The directory is not the one that slots were heard from: they mean nothing any more."""


class DirectoryPort(Protocol):
    """Every call raises StoreError if it cannot be carried out, and is bounded in time.

    Calls about slots are said to one epoch, that of the first contact or of the last `attach`; EpochChanged if it is
    over. Calls about keys and requests mean the same in any.
    """

    def info(self) -> DirectoryInfo:
        """The arena's place and geometry."""

    def attach(self) -> DirectoryInfo:
        """Goes on with the directory as it is now, whose arena is to be mapped before anything else is asked."""

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]: ...

    def reserve(self, writer: str, names: Sequence[BlockName], hold: Hold | None) -> Reservation:
        """Slots for the blocks that are not there; with `hold`, those that are there are held.

        A slot is the writer's until its commit or abandon, or the death of its process: it never runs out. A writer
        works on one batch at a time: what it has reserved before and not committed is given back here.
        """

    def commit(self, writer: str, blocks: Sequence[Block], hold: Hold | None) -> int:
        """Makes written blocks findable; how many of the keys given are now. The first writer of a key wins.

        A slot that is not reserved by this writer for this block is passed over.
        """

    def abandon(self, writer: str) -> int:
        """Gives back what a writer has reserved; how many slots that were. It must not write to them any more."""

    def lease(self, reader: str, keys: Sequence[BlockKey], ttl_s: float) -> Lease:
        """Where the blocks are. What is read counts only if `release` then says that the lease held all the time."""

    def release(self, lease_id: int) -> bool:
        """Ends a lease. False if it had run out: what was read under it may be anything."""

    def withdraw(self, blocks: Sequence[Block]) -> int:
        """Makes corrupt blocks unfindable, if they are still those; how many were."""

    def renew(self, request_ids: Sequence[RequestId], ttl_s: float) -> int: ...

    def release_holds(self, request_ids: Sequence[RequestId]) -> int: ...

    def mark_cold(self, keys: Sequence[BlockKey]) -> int:
        """Says that the cold tier has these blocks too, so that losing them here costs less."""

    def status(self) -> DirectoryStatus: ...

    def check(self) -> list[str]:
        """What is wrong with the books; nothing, if all is well."""
