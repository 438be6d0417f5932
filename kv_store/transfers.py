"""Copies between an engine's pages and the store, beside the engine: it starts them, and polls for their ends.

An engine brackets each in `begin_transfer` and `end_transfer` of its own ledger; nothing here touches that.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from kv_store.block_store import BlockStore
from wire.ids import PageId, RequestId
from wire.keys import BlockName
from wire.tier import Tier

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FetchDone:
    """The first `len(tiers)` blocks asked for are in their pages. With an `error`, none are."""

    ticket: int
    tiers: list[Tier] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class PublishDone:
    """`num_resident` of the blocks given are in the host tier. With an `error`, none may be."""

    ticket: int
    num_resident: int = 0
    error: str | None = None


@dataclass(frozen=True)
class WithdrawDone:
    """The blocks are found nowhere in the store any more. With an `error`, some may be."""

    ticket: int
    error: str | None = None


Done = FetchDone | PublishDone | WithdrawDone

_CLOSE_TIMEOUT_S = 10.0


class Transfers(Protocol):
    """No call blocks. Each ticket started is handed over by `poll` exactly once."""

    @property
    def pending(self) -> int:
        """Tickets started and not yet handed over."""

    def start_fetch(self, ticket: int, names: Sequence[BlockName], pages: Sequence[PageId]) -> None: ...

    def start_publish(
        self, ticket: int, names: Sequence[BlockName], pages: Sequence[PageId], hold: RequestId | None
    ) -> None: ...

    def start_withdraw(self, ticket: int, names: Sequence[BlockName]) -> None: ...

    def poll(self) -> list[Done]: ...

    def close(self) -> None:
        """Starts nothing more and ends what is under way, within bounds."""


class _DoneAtOnce:
    """What transfers without a thread share: each is done when it is started."""

    def __init__(self) -> None:
        self._done: list[Done] = []

    @property
    def pending(self) -> int:
        return len(self._done)

    def poll(self) -> list[Done]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        self._done.clear()


class InlineTransfers(_DoneAtOnce):
    """Does the work on the caller's thread; `poll` hands it over. An error of the store is raised at the start."""

    def __init__(self, store: BlockStore) -> None:
        super().__init__()
        self._store = store

    def start_fetch(self, ticket: int, names: Sequence[BlockName], pages: Sequence[PageId]) -> None:
        self._store.fence()
        self._done.append(FetchDone(ticket, self._store.fetch(names, pages).tiers))

    def start_publish(
        self, ticket: int, names: Sequence[BlockName], pages: Sequence[PageId], hold: RequestId | None
    ) -> None:
        self._store.fence()
        self._done.append(PublishDone(ticket, self._store.publish(names, pages, hold).num_resident))

    def start_withdraw(self, ticket: int, names: Sequence[BlockName]) -> None:
        self._store.withdraw(names)
        self._done.append(WithdrawDone(ticket))


class NoStore(_DoneAtOnce):
    """For an engine without a store: finds nothing, publishes nothing."""

    def start_fetch(self, ticket: int, names: Sequence[BlockName], pages: Sequence[PageId]) -> None:
        self._done.append(FetchDone(ticket))

    def start_publish(
        self, ticket: int, names: Sequence[BlockName], pages: Sequence[PageId], hold: RequestId | None
    ) -> None:
        self._done.append(PublishDone(ticket))

    def start_withdraw(self, ticket: int, names: Sequence[BlockName]) -> None:
        self._done.append(WithdrawDone(ticket))


class ThreadTransfers:
    """Does the work in order on one thread of its own, and calls `wake` from there after each; `close` ends it.

    max_pending: beyond it a transfer is refused at once, and found done with an error.
    """

    def __init__(self, store: BlockStore, wake: Callable[[], None], max_pending: int = 4096) -> None:
        self._store = store
        self._wake = wake
        self._max_pending = max_pending
        self._num_pending = 0
        self._jobs: SimpleQueue[Callable[[], Done] | None] = SimpleQueue()
        self._done: deque[Done] = deque()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="transfers", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        return self._num_pending

    def start_fetch(self, ticket: int, names: Sequence[BlockName], pages: Sequence[PageId]) -> None:
        def fetch() -> Done:
            try:
                return FetchDone(ticket, self._store.fetch(names, pages).tiers)
            except Exception as error:  # an engine waits for each ticket, with its pages: all of them are answered
                log.exception("a fetch failed by a fault of its own; its blocks are computed instead")
                return FetchDone(ticket, error=repr(error))

        self._start(fetch, FetchDone(ticket, error="too many transfers"))

    def start_publish(
        self, ticket: int, names: Sequence[BlockName], pages: Sequence[PageId], hold: RequestId | None
    ) -> None:
        def publish() -> Done:
            try:
                return PublishDone(ticket, self._store.publish(names, pages, hold).num_resident)
            except Exception as error:  # as above
                log.exception("a publish failed by a fault of its own; its blocks are missing for others")
                return PublishDone(ticket, error=repr(error))

        self._start(publish, PublishDone(ticket, error="too many transfers"))

    def start_withdraw(self, ticket: int, names: Sequence[BlockName]) -> None:
        def withdraw() -> Done:
            try:
                self._store.withdraw(names)
                return WithdrawDone(ticket)
            except Exception as error:  # as above
                return WithdrawDone(ticket, error=repr(error))

        self._start(withdraw, WithdrawDone(ticket, error="too many transfers"))

    def poll(self) -> list[Done]:
        done = [self._done.popleft() for _ in range(len(self._done))]
        self._num_pending -= len(done)
        return done

    def close(self) -> None:
        self._is_closing.set()
        self._jobs.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _start(self, job: Callable[[], Done], refused: Done) -> None:
        self._store.fence()
        self._num_pending += 1
        if self._num_pending > self._max_pending:
            self._done.append(refused)
        else:
            self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._is_closing.is_set():
            self._done.append(job())
            self._wake()
