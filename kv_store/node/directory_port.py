"""The seam between a process that maps the arena and the arena's directory.

A method declared here is the call itself: its name and its arguments, of the declared types, cross the socket.
"""

# mypy: disable-error-code="empty-body"
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from kv_store.node.codec import ServiceCodec
from wire.directory import Block, ClientName, DirectoryInfo, DirectoryStatus, Hold, Lease, Reservation, TtlS
from wire.errors import StoreError
from wire.ids import AttemptId, BlockKey
from wire.names import BlockName
from wire.tier import Tier

P = ParamSpec("P")
T = TypeVar("T")
_Method = Callable[Concatenate["DirectoryPort", P], T]


class EpochChanged(StoreError):
    """The directory has restarted; slot numbers from before are void."""


def _carried(method: _Method[P, T]) -> _Method[P, T]:
    """Turns a declaration into the call itself."""

    @wraps(method)
    def call(self: "DirectoryPort", /, *arguments: P.args, **_: P.kwargs) -> T:
        answer: T = self._ask(method.__name__, arguments)
        return answer

    return call


class DirectoryPort:
    """The calls of a directory. Each raises StoreError if it cannot be carried out, and is bounded in time.

    All but `CALLS_OF_ANY_EPOCH` go to one epoch, that of the first contact or of the last `attach`; EpochChanged if it
    is over. A client carries each call to a directory; a directory overrides each with its work.
    """

    def _ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        raise NotImplementedError(method)

    @_carried
    def info(self) -> DirectoryInfo:
        """Returns the arena's path and geometry."""

    @_carried
    def attach(self) -> DirectoryInfo:
        """Joins the directory's present epoch. The caller maps its arena before any other call."""

    @_carried
    def exists(self, keys: Sequence[BlockKey], /) -> list[bool]:
        """Returns for each key whether its block is in the arena."""

    @_carried
    def reserve(self, writer: ClientName, names: Sequence[BlockName], hold: Hold | None, /) -> Reservation:
        """Reserves slots for the blocks that are missing; with `hold`, holds the present ones.

        A slot is the writer's, without a time limit, until its commit or abandon, or the death of its process. A new
        reservation of a writer gives back the uncommitted slots of the one before.
        """

    @_carried
    def commit(self, writer: ClientName, blocks: Sequence[Block], hold: Hold | None, /) -> int:
        """Indexes written blocks; counts the given keys that are indexed now. The first writer of a key wins.

        Ignores a slot that this writer has not reserved for this block.
        """

    @_carried
    def abandon(self, writer: ClientName, /) -> int:
        """Gives back and counts a writer's reserved slots, to which it must not write any more."""

    @_carried
    def lease(self, reader: ClientName, keys: Sequence[BlockKey], ttl_s: TtlS, /) -> Lease:
        """Finds blocks and leases their slots for `ttl_s`. A read counts only if `release` confirms the lease."""

    @_carried
    def release(self, lease_id: int, /) -> bool:
        """Ends a lease. False if it had run out: the bytes read under it may be another block's."""

    @_carried
    def reject(self, blocks: Sequence[Block], /) -> int:
        """Unindexes corrupt blocks if slot and checksum are still theirs, and counts them."""

    @_carried
    def delete(self, keys: Sequence[BlockKey], /) -> int:
        """Unindexes blocks, whatever their bytes, and counts them."""

    @_carried
    def renew(self, attempt_ids: Sequence[AttemptId], ttl_s: TtlS, /) -> list[AttemptId]:
        """Prolongs the holds of attempts to `ttl_s` seconds from now; returns the attempts that hold no block.

        A hold that was taken while holds had a quarter of the arena ends here, once all its blocks are in cold tiers.
        """

    @_carried
    def release_holds(self, attempt_ids: Sequence[AttemptId], /) -> int:
        """Ends the holds of requests, and counts the requests that held a block."""

    @_carried
    def mark_cold(self, tier: Tier, keys: Sequence[BlockKey], /) -> int:
        """Notes copies of blocks in a cold tier, so that their loss here costs less; counts the blocks found."""

    @_carried
    def status(self) -> DirectoryStatus: ...

    @_carried
    def check(self) -> list[str]:
        """Lists the faults of the books; an empty list is a clean bill."""


class Greeting:
    """The first call on a connection. The directory serves a client's connection of the highest number only."""

    def hello(self, protocol_version: int, client_id: str, connection: int, /) -> DirectoryInfo:
        """Introduces a client."""


CALLS = ServiceCodec(DirectoryPort)
CALLS_OF_ANY_EPOCH = frozenset(("attach", "exists", "delete", "renew", "release_holds", "mark_cold", "status", "check"))
GREETING = ServiceCodec(Greeting)
