"""The seam between a process that maps the arena and the arena's directory.

A method declared here is the call itself: its name and its arguments, of the declared types, cross the socket, as
msgpack behind a length. A call is `[name of the method, argument, ...]`; its answer is `[True, value]`, or
`[False, message]` for a refusal. A dataclass is the list of its fields. Each value that arrives is checked against its
declared type before it is used.

Times are durations in seconds, counted by the directory's monotonic clock from arrival.
"""

# mypy: disable-error-code="empty-body"
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import msgpack

from kv_store.node.event_log import EventCursor, EventPage
from wire.block_names import BlockName
from wire.errors import StoreError, WireError
from wire.ids import AttemptId, BlockKey, SlotId
from wire.tier import FarStatus, LedgerCounts, MissRun, StoredBlock, Tier
from wire.typed_reader import Read, by_place, fields_of, reader_of

MAX_TTL_S = 3600.0
MAX_WAIT_S = 10.0


def check_ttl(ttl_s: float) -> None:
    """Raises WireError for a time to live that is not positive or too long."""
    if not 0 < ttl_s <= MAX_TTL_S:
        raise WireError(f"a time to live of {ttl_s} s")


def check_keep(keep_s: float) -> None:
    """Raises WireError for a time to keep that is below 0 or no number."""
    if not 0 <= keep_s < math.inf:
        raise WireError(f"a time to keep of {keep_s} s")


def check_session(session: bytes) -> None:
    """Checks that a session is empty or a digest. Raises WireError."""
    if len(session) not in (0, 32):
        raise WireError(f"a session of {len(session)} bytes")


def check_wait(wait_s: float) -> None:
    """Raises WireError for a wait that is negative, no number, or too long."""
    if not 0 <= wait_s <= MAX_WAIT_S:
        raise WireError(f"a wait of {wait_s} s")


TtlS = Annotated[float, check_ttl]
WaitS = Annotated[float, check_wait]
KeepS = Annotated[float, check_keep]
SessionDigest = Annotated[bytes, check_session]
ClientName = Annotated[str, "a name that a process gives to one of its writers or readers"]


@dataclass(frozen=True)
class Hold:
    """A claim of a request on blocks; it ends `ttl_s` after its last renewal."""

    attempt_id: AttemptId
    ttl_s: TtlS


@dataclass(frozen=True)
class KeepHint:
    """A request's hint about its KV: the session that it belongs to, and the time that it should outlive its use.

    namespace: the digest of the request's root. session: as `wire.block_names.session_of` makes it; empty for none.
    keep_s: 0 where the session needs nothing more of it; None where the request does not say.
    """

    namespace: bytes
    session: SessionDigest
    keep_s: KeepS | None


@dataclass(frozen=True)
class Block:
    """A slot, the block in it, and the xxh3-128 of its payload."""

    slot: SlotId
    name: BlockName
    checksum: bytes


@dataclass(frozen=True)
class Entry:
    """The slot of a found block, and the xxh3-128 that its payload must have."""

    slot: SlotId
    checksum: bytes


@dataclass(frozen=True)
class DirectoryInfo:
    """The arena's place and geometry. An epoch is drawn at each start: slots of another epoch mean nothing."""

    epoch: str
    arena_path: str
    num_slots: int
    block_bytes: int


@dataclass(frozen=True)
class Reservation:
    """A slot to write for each name, or None if the block is there or no room is left; `num_resident` are there."""

    slots: list[SlotId | None]
    num_resident: int


@dataclass(frozen=True)
class Lease:
    """An entry for each key, or None. The slots keep their blocks until the release or the end of the lease."""

    lease_id: int
    entries: list[Entry | None]


@dataclass(frozen=True)
class DirectoryStatus:
    """Hits and misses count keys that readers asked for. cold: the tiers as the node's service finds them, writing."""

    counts: LedgerCounts
    num_leases: int
    num_holds: int
    num_kept: int
    epoch: str
    hits: int
    misses: int
    evictions: int
    cold: list[FarStatus]


MAX_MESSAGE_BYTES = 16 << 20
LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class ServiceCall:
    """A method of the service, its arguments, and the declared type of each."""

    method: str
    arguments: list[Any]
    hints: tuple[Any, ...]


@dataclass(frozen=True)
class RefusedCall:
    """The service refused a call and changed nothing."""

    message: str


class ServiceCodec:
    """The public methods of classes as calls, each of a name of its own. Arguments are positional.

    `wire.typed_reader` lists the types that may be declared, and checks each value that arrives.
    """

    def __init__(self, *ports: type) -> None:
        self._hints = {
            name: get_type_hints(value, include_extras=True)
            for port in ports
            for name, value in vars(port).items()
            if callable(value) and not name.startswith("_")
        }
        self._answers = {name: reader_of(hints.pop("return"), by_place) for name, hints in self._hints.items()}
        self._arguments = {
            name: fields_of(hints.values(), lambda *values: [*values]) for name, hints in self._hints.items()
        }

    def encode_call(self, method: str, arguments: Sequence[Any]) -> bytes:
        """Encodes a call behind its length. WireError if longer than MAX_MESSAGE_BYTES."""
        return _framed([method, *arguments])

    def decode_call(self, body: bytes) -> ServiceCall:
        """Decodes a call without its length. WireError for bytes that are no call of this service."""
        call: ServiceCall = _checked(body, self._read_call)
        return call

    def encode_answer(self, answer: object) -> bytes:
        """Encodes an answer, or a `RefusedCall`, behind its length. WireError if longer than MAX_MESSAGE_BYTES."""
        return _framed([False, answer.message] if isinstance(answer, RefusedCall) else [True, answer])

    def decode_answer(self, method: str, body: bytes) -> Any:
        """Decodes the answer to a method, or a `RefusedCall`. WireError for bytes that are neither."""
        return _checked(body, lambda plain: self._read_answer(method, plain))

    def _read_call(self, plain: Any) -> ServiceCall:
        method, *values = plain
        return ServiceCall(method, self._arguments[method](values), tuple(self._hints[method].values()))

    def _read_answer(self, method: str, plain: Any) -> Any:
        is_answered, value = plain
        return self._answers[method](value) if _read_bool(is_answered) else RefusedCall(_read_str(value))


def body_len(length: bytes) -> int:
    """Counts the bytes that follow a message's length. WireError if no message is as long."""
    (num_bytes,) = LENGTH.unpack(length)
    if num_bytes > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {num_bytes} bytes")
    return int(num_bytes)


def _framed(message: list[Any]) -> bytes:
    body = bytes(msgpack.packb(message, default=_plain))
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(body)} bytes")
    return LENGTH.pack(len(body)) + body


def _checked(body: bytes, read: Read) -> Any:
    try:
        return read(msgpack.unpackb(body))
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise WireError("not a message of this protocol") from error


def _plain(value: Any) -> list[Any]:
    names = getattr(value, "__match_args__", None)  # a dataclass's fields, in order
    return list(value) if names is None else [getattr(value, name) for name in names]


_read_bool, _read_str = reader_of(bool, by_place), reader_of(str, by_place)


P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound="_Calls")


class EpochChanged(StoreError):
    """The directory has restarted; slot numbers from before are void."""


class _Calls:
    """Calls of a directory. Each raises StoreError if it cannot be carried out, and is bounded in time.

    A client carries each call to a directory; an owner on its side overrides each with its work.
    """

    def _ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        raise NotImplementedError(method)


def _carried(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Turns a declaration into the call itself."""

    @wraps(method)
    def call(self: C, /, *arguments: P.args, **_: P.kwargs) -> T:
        answer: T = self._ask(method.__name__, arguments)
        return answer

    return call


class RecordsPort(_Calls):
    """The calls about a directory's blocks that claim no slot."""

    @_carried
    def exists(self, keys: Sequence[BlockKey], /) -> list[bool]:
        """Returns for each key whether its block is in the arena."""

    @_carried
    def keep(self, keys: Sequence[BlockKey], hint: KeepHint, /) -> int:
        """Notes the blocks that a session's request has used, in their order; counts the kept ones.

        Blocks that the session's request before it used, and this one does not, are evicted before others. Blocks of
        another namespace than the hint's stay as they are.
        """

    @_carried
    def why(self, keys: Sequence[BlockKey], parents: Sequence[bytes], /) -> list[MissRun]:
        """Finds the causes of full blocks that a lookup has not found, of one prompt and in its order.

        parents: the key of the block before each; empty for the first one under a root. BEHIND for a block that the
        arena has; ELSEWHERE for an evicted one of which a cold tier was given a copy. Runs count blocks as tokens.
        """

    @_carried
    def mark_cold(self, tier: Tier, stored: Sequence[BlockKey], lost: Sequence[BlockKey], /) -> int:
        """Notes copies of blocks in a cold tier, so that their loss here costs less; counts the blocks found.

        lost: keys that the tier has no more; the ones whose copies are not known of are ignored.
        """

    @_carried
    def events(self, after: EventCursor, /) -> EventPage:
        """Lists events of full blocks behind a place, at once and at most `MAX_PAGE_BLOCKS`; it may list none.

        Of another epoch's place, or one that the log does not reach back to, all is CLEARED and a snapshot follows.
        Of cold tiers only copies of blocks that are, or were of late, in the arena are told, and their loss once it is
        noticed.
        """

    @_carried
    def wait_for_events(self, after: EventCursor, wait_s: WaitS, /) -> bool:
        """Waits up to `wait_s` until `events` has something behind a place, and returns whether it has.

        May return False earlier. Blocks neither other calls nor their connections.
        """

    @_carried
    def status(self) -> DirectoryStatus: ...

    @_carried
    def check(self) -> list[str]:
        """Lists violated invariants; empty if none."""


class ContentsPort(_Calls):
    """The calls that list the blocks of an arena, tails included, and clear them."""

    @_carried
    def keys(self, first_slot: int, num_slots: int, /) -> list[BlockKey]:
        """Lists the keys of the blocks in some slots, tails included."""

    @_carried
    def describe(self, keys: Sequence[BlockKey], /) -> list[StoredBlock]:
        """Describes the blocks that are in the arena, without counting a use."""

    @_carried
    def clear(self, keys: Sequence[BlockKey], /) -> int:
        """Unindexes and counts blocks for the operator. A reader's lease and a request's hold keep the slot."""


class DirectoryPort(_Calls):
    """The calls of a directory that claim slots, or free them; `records` and `contents` have the others.

    All but `CALLS_OF_ANY_EPOCH` go to one epoch, that of the first contact or of the last `attach`; EpochChanged if it
    is over.
    """

    @cached_property
    def records(self) -> RecordsPort:
        return _CarriedRecords(self._ask)

    @cached_property
    def contents(self) -> ContentsPort:
        return _CarriedContents(self._ask)

    @_carried
    def attach(self) -> DirectoryInfo:
        """Joins the directory's present epoch. The caller maps its arena before any other call."""

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


class _Carrier(_Calls):
    """Calls that go the same way as their directory's."""

    def __init__(self, ask: Callable[[str, tuple[Any, ...]], Any]) -> None:
        self._carry = ask

    def _ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return self._carry(method, arguments)


class _CarriedRecords(_Carrier, RecordsPort): ...


class _CarriedContents(_Carrier, ContentsPort): ...


def carry_out(directory: DirectoryPort, method: str, arguments: Sequence[Any]) -> Any:
    """Carries out a call by the port that declares it."""
    ports: dict[type, _Calls] = {RecordsPort: directory.records, ContentsPort: directory.contents}
    owner = next((owner for port, owner in ports.items() if method in vars(port)), directory)
    return getattr(owner, method)(*arguments)


class Greeting:
    """The first call on a connection. The directory serves a client's connection of the highest number only."""

    def hello(self, protocol_version: int, client_id: str, connection: int, /) -> DirectoryInfo:
        """Introduces a client."""


CALLS = ServiceCodec(DirectoryPort, RecordsPort, ContentsPort)
CALLS_OF_ANY_EPOCH = frozenset(
    (
        *("attach", "exists", "delete", "renew", "release_holds", "mark_cold"),
        *("events", "wait_for_events", "status", "check", "keys", "describe", "clear"),
    )
)
GREETING = ServiceCodec(Greeting)
