"""Copies between an engine's pages and the store, beside the engine, which begins them and polls for their ends.

An engine brackets each copy in `begin_transfer` and `end_transfer` of its ledger, which nothing here touches.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from queue import PriorityQueue
from typing import ClassVar, Protocol

from kv_store.block_store import NOTHING, BlockStore, ReadResult
from kv_store.device_pool import Fence
from kv_store.node.messages import KeepHint
from kv_store.prefix.plan import FRONT, Needs, Read
from wire.block_names import BlockName
from wire.ids import AttemptId, PageId

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, eq=False)
class Transfer(ABC):
    """An order about named blocks and pages. Orders are compared by identity. patience: later orders that pass it."""

    patience: ClassVar[int] = 0
    names: Sequence[BlockName]
    pages: Sequence[PageId] = ()

    @abstractmethod
    def run(self, store: BlockStore) -> "Done":
        """Carries out the order. Blocks. Raises the errors of the store."""


@dataclass(frozen=True, eq=False)
class Fetch(Transfer):
    """An order to fill pages with blocks of the store. peers, needs: see `BlockStore.fetch`.

    step: a step, or part of it, that an earlier fetch has left, in place of a new plan.
    """

    peers: Sequence[str] = ()
    needs: Needs = FRONT
    step: Read | None = None

    def run(self, store: BlockStore) -> "Done":
        if self.step is not None:
            return Done(self, store.read(self.step, self.pages))
        return Done(self, store.fetch(self.names, self.pages, self.peers, self.needs))


@dataclass(frozen=True, eq=False)
class Prefetch(Transfer):
    """An order to fill pages that no sequence waits for, so that others pass it. peers: see `BlockStore.fetch`.

    is_wanted: tells, when the order's time comes, whether it still is of use.
    """

    patience = 16
    peers: Sequence[str] = ()
    is_wanted: Callable[[Transfer], bool] = lambda _: True

    def run(self, store: BlockStore) -> "Done":
        return Done(self, store.fetch(self.names, self.pages, self.peers) if self.is_wanted(self) else NOTHING)


@dataclass(frozen=True, eq=False)
class WriteThrough(Transfer):
    """An order to copy pages into the store, under the hold of an attempt if there is one.

    told: functions to call, on the thread of the copies, once the store has all of the blocks.
    """

    hold: AttemptId | None = None
    told: Sequence[Callable[[], None]] = ()

    def run(self, store: BlockStore) -> "Done":
        num_resident = store.write_through(self.names, self.pages, self.hold)
        for tell in self.told if num_resident == len(self.names) else ():
            tell()
        return Done(self, num_resident=num_resident)


@dataclass(frozen=True, eq=False)
class Purge(Transfer):
    """An order to delete blocks from every tier. peers: see `BlockStore.purge`."""

    peers: Sequence[str] = ()

    def run(self, store: BlockStore) -> "Done":
        store.purge(self.names, self.peers)
        return Done(self)


@dataclass(frozen=True, eq=False)
class Keep(Transfer):
    """An order to pass on a hint about blocks that a request has used. It moves nothing, and follows earlier writes."""

    hint: KeepHint = field(kw_only=True)

    def run(self, store: BlockStore) -> "Done":
        store.keep(self.names, self.hint)
        return Done(self)


@dataclass(frozen=True)
class Done:
    """The end of a transfer. With an `error`, a fetch filled no page, and other orders may have done nothing.

    num_resident: blocks of a write that the host tier has.
    """

    transfer: Transfer
    reading: ReadResult = NOTHING
    num_resident: int = 0
    error: str | None = None


class Transfers(Protocol):
    """The seam of transfers. No call blocks, except `close` within bounds; `poll` returns each end exactly once."""

    @property
    def pending(self) -> int:
        """Transfers begun, whose end `poll` has not returned yet."""

    def begin(self, transfer: Transfer) -> None:
        """Takes an order. For the computing thread: work that it has queued so far comes first."""

    def poll(self) -> list[Done]: ...

    def close(self) -> None:
        """Begins nothing more, and ends the running transfer."""


class NoStore:
    """The Transfers of an engine without a store, which find and write nothing."""

    def __init__(self) -> None:
        self._done: list[Done] = []

    @property
    def pending(self) -> int:
        return len(self._done)

    def begin(self, transfer: Transfer) -> None:
        self._done.append(Done(transfer))

    def poll(self) -> list[Done]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        self._done.clear()


class InlineTransfers(NoStore):
    """Transfers on the caller's thread; `begin` raises an error of the store."""

    def __init__(self, store: BlockStore) -> None:
        super().__init__()
        self._store = store

    def begin(self, transfer: Transfer) -> None:
        self._store.follow(self._store.fence())
        self._done.append(transfer.run(self._store))


class ThreadTransfers:
    """Transfers on one thread, between `start` and `close`, in order but for prefetches; it calls `wake` after each.

    Each waits for the computing thread's work before its own order, and for none that was queued behind that.
    max_pending: bound on waiting transfers; a further transfer ends at once, with an error.
    """

    def __init__(self, store: BlockStore, wake: Callable[[], None], max_pending: int = 4096) -> None:
        self._store = store
        self._wake = wake
        self._max_pending = max_pending
        self.pending = 0
        self._orders: PriorityQueue[tuple[int, int, Transfer | None, Fence]] = PriorityQueue()
        self._numbers = count()
        self._done: deque[Done] = deque()
        self.is_closing = False
        self._thread = threading.Thread(target=self._run, name="transfers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self, transfer: Transfer) -> None:
        self.pending += 1
        if self.pending > self._max_pending:
            self._done.append(Done(transfer, error="too many transfers"))
        else:
            patience = transfer.patience
            self._orders.put((next(self._numbers) + patience, patience, transfer, self._store.fence()))

    def run_one(self) -> bool:
        """Carries out the next order; blocks until there is an order. Returns False once closed."""
        *_, transfer, fence = self._orders.get()
        if transfer is None or self.is_closing:
            return False
        self._done.append(self._end_of(transfer, fence))
        self._wake()
        return True

    def poll(self) -> list[Done]:
        done = [self._done.popleft() for _ in range(len(self._done))]
        self.pending -= len(done)
        return done

    def close(self) -> None:
        self.is_closing = True
        self._orders.put((-1, 0, None, None))
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _end_of(self, transfer: Transfer, fence: Fence) -> Done:
        try:
            self._store.follow(fence)
            return transfer.run(self._store)
        except Exception as error:  # an engine waits for each transfer, with its pages: all of them are answered
            log.exception("a %s failed by a fault of its own; its blocks count as misses", type(transfer).__name__)
            return Done(transfer, error=repr(error))

    def _run(self) -> None:
        while self.run_one():
            pass
