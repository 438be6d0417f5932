"""The seam between a process that maps the arena and the arena's directory: three ports of declared calls.

`kv_store.node.messages` has the values of the calls, `kv_store.node.service` the way in which they cross the socket.
Each call raises StoreError if it cannot be carried out, and is bounded in time.
"""

# mypy: disable-error-code="empty-body"
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from kv_store.node.event_log import EventCursor, EventPage
from kv_store.node.messages import (
    Block,
    DirectoryInfo,
    DirectoryStatus,
    Hold,
    HoldRoom,
    KeepHint,
    Lease,
    NumBlocks,
    Reservation,
    TtlS,
)
from kv_store.node.service import Calls, ClientName, ServiceCodec, WaitS, declared
from wire.block_names import BlockName
from wire.errors import StoreError
from wire.ids import AttemptId, BlockKey
from wire.tier import MissRun, StoredBlock, Tier


class EpochChanged(StoreError):
    """The directory has restarted; earlier slot numbers are void."""


class RecordsPort(Calls):
    """The calls about a directory's blocks that claim no slot."""

    @declared
    def exists(self, keys: Sequence[BlockKey], /) -> list[bool]:
        """Returns for each key whether its block is in the arena."""

    @declared
    def keep(self, keys: Sequence[BlockKey], hint: KeepHint, /) -> int:
        """Notes the blocks that a session's request has used, in order; returns the number of kept blocks.

        Blocks that only the session's last request used are evicted before others. Ignores blocks outside the hint's
        namespace.
        """

    @declared
    def why(self, keys: Sequence[BlockKey], parents: Sequence[bytes], /) -> list[MissRun]:
        """Finds the causes of a prompt's full blocks that a lookup has not found, in order.

        parents: the key of the block before each; empty for the first block under a root. BEHIND: the arena has the
        block. ELSEWHERE: evicted, but a cold tier got a copy. Runs count blocks as tokens.
        """

    @declared
    def mark_cold(self, tier: Tier, stored: Sequence[BlockKey], lost: Sequence[BlockKey], /) -> int:
        """Notes copies of blocks in a cold tier, so that their loss here costs less; counts the blocks found.

        lost: keys that the tier no longer has; keys without a noted copy are ignored.
        """

    @declared
    def events(self, after: EventCursor, /) -> EventPage:
        """Lists at most `MAX_PAGE_BLOCKS` events of full blocks after a place, maybe none; does not wait.

        For a place in another epoch, or before the log, comes CLEARED, then a snapshot. Of cold tiers it lists only
        copies of blocks that are, or recently were, in the arena, and their loss once noticed.
        """

    @declared
    def wait_for_events(self, after: EventCursor, wait_s: WaitS, /) -> bool:
        """Waits up to `wait_s` until there are events after a place; returns whether there are.

        May return False earlier. Does not block other calls or connections.
        """

    @declared
    def status(self) -> DirectoryStatus: ...

    @declared
    def check(self) -> list[str]:
        """Lists violated invariants; empty if none."""


class ContentsPort(Calls):
    """The calls that list the blocks of an arena, tails included, and clear them."""

    @declared
    def keys(self, first_slot: int, num_slots: int, /) -> list[BlockKey]:
        """Lists the keys of the blocks in some slots, tails included."""

    @declared
    def describe(self, keys: Sequence[BlockKey], /) -> list[StoredBlock]:
        """Describes the arena's blocks among these, without counting a use."""

    @declared
    def clear(self, keys: Sequence[BlockKey], /) -> int:
        """Unindexes and counts blocks for the operator. A reader's lease and a request's hold keep the slot."""


class DirectoryPort(Calls):
    """The calls of a directory that claim slots, or free them; `records` and `contents` have the others.

    Calls belong to the epoch seen at the first contact or the last `attach`. In another epoch they raise EpochChanged,
    except `CALLS_OF_ANY_EPOCH`.
    """

    @cached_property
    def records(self) -> RecordsPort:
        return RecordsPort(self._ask)

    @cached_property
    def contents(self) -> ContentsPort:
        return ContentsPort(self._ask)

    @declared
    def attach(self) -> DirectoryInfo:
        """Joins the directory's present epoch. The caller maps its arena before any other call."""

    @declared
    def reserve(self, reservation_id: ClientName, names: Sequence[BlockName], hold: Hold | None, /) -> Reservation:
        """Reserves slots for missing blocks; with `hold`, holds the present blocks.

        A slot is the reservation's, without a time limit, until its commit or abandon, or the death of its process. A
        process gives its ids itself: a new reservation under an id gives back the uncommitted slots of the id's last.
        """

    @declared
    def commit(self, reservation_id: ClientName, blocks: Sequence[Block], hold: Hold | None, /) -> int:
        """Indexes written blocks; counts the given keys that are indexed now. The first writer of a key wins.

        Ignores a slot that is not reserved under this id for this block.
        """

    @declared
    def abandon(self, reservation_id: ClientName, /) -> int:
        """Gives back and counts the slots of a reservation, which its process must no longer write."""

    @declared
    def lease(self, reader: ClientName, keys: Sequence[BlockKey], ttl_s: TtlS, /) -> Lease:
        """Finds blocks and leases their slots for `ttl_s`. A read counts only if `release` confirms the lease."""

    @declared
    def release(self, lease_id: int, /) -> bool:
        """Ends a lease; returns False if it had expired: the bytes read under it may be another block's."""

    @declared
    def reject(self, blocks: Sequence[Block], /) -> int:
        """Unindexes corrupt blocks if slot and checksum are still theirs, and counts them."""

    @declared
    def delete(self, keys: Sequence[BlockKey], /) -> int:
        """Unindexes blocks, whatever their bytes, and counts them."""

    @declared
    def renew(self, attempt_ids: Sequence[AttemptId], ttl_s: TtlS, /) -> list[AttemptId]:
        """Prolongs the holds of attempts to `ttl_s` seconds from now; returns the attempts without a hold.

        Ends a hold that was taken while holds had a quarter of the arena, once cold tiers have all its blocks.
        """

    @declared
    def release_holds(self, attempt_ids: Sequence[AttemptId], /) -> int:
        """Ends the holds of requests, and counts the requests that held a block."""

    @declared
    def share_room(self, router: ClientName, num_blocks: NumBlocks, ttl_s: TtlS, /) -> HoldRoom:
        """Notes the blocks that a router's holds take or will take, for `ttl_s`; returns what other routers' take.

        num_blocks: 0 if the router has no holds and waits for none.
        """


def carry_out(directory: DirectoryPort, method: str, arguments: Sequence[Any]) -> Any:
    """Carries out a call by the port that declares it."""
    ports: dict[type, Calls] = {RecordsPort: directory.records, ContentsPort: directory.contents}
    owner = next((owner for port, owner in ports.items() if method in vars(port)), directory)
    return getattr(owner, method)(*arguments)


class Greeting:
    """The first call on a connection. The directory serves only a client's connection with the highest number."""

    def hello(self, protocol_version: int, client_id: str, connection: int, /) -> DirectoryInfo:
        """Introduces a client."""


CALLS = ServiceCodec(DirectoryPort, RecordsPort, ContentsPort)
CALLS_OF_ANY_EPOCH = frozenset(
    (
        *("attach", "exists", "delete", "renew", "release_holds", "share_room", "mark_cold"),
        *("events", "wait_for_events", "status", "check", "keys", "describe", "clear"),
    )
)
GREETING = ServiceCodec(Greeting)
