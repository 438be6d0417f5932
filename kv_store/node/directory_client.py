"""The directory of a node's arena, as its other processes see it: over a Unix socket."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from kv_store.breaker import Breaker
from kv_store.node.directory_connection import DirectoryConnection
from kv_store.node.directory_port import EpochChanged
from wire.directory import (
    Abandon,
    Block,
    Check,
    Commit,
    Count,
    DirectoryInfo,
    DirectoryStatus,
    Flags,
    GetExisting,
    GetInfo,
    GetStatus,
    Hold,
    Lease,
    MarkCold,
    Problems,
    Refused,
    ReleaseHolds,
    ReleaseLease,
    RenewHolds,
    Reservation,
    Reserve,
    TakeLease,
    WithdrawBlocks,
)
from wire.errors import StoreError, WireError
from wire.ids import BlockKey, RequestId
from wire.keys import BlockName

T = TypeVar("T")


class DirectoryClient:
    """A DirectoryPort. Thread-safe; each call is answered or has failed within `timeout_s`.

    A failed call is not repeated; the next one connects anew. After three failures in a row calls fail at once, but
    for one every two seconds.
    """

    def __init__(self, path: str, timeout_s: float = 2.0) -> None:
        self._connection = DirectoryConnection(path)
        self._timeout_s = timeout_s
        self._breaker = Breaker(time.monotonic)
        self._epoch: str | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def info(self) -> DirectoryInfo:
        return self._ask(GetInfo(), DirectoryInfo)

    def attach(self) -> DirectoryInfo:
        with self._line() as deadline:
            info = self._connection.connect(deadline)
            self._epoch = info.epoch
            return info

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._ask_any(GetExisting(list(keys)), Flags).values

    def reserve(self, writer: str, names: Sequence[BlockName], hold: Hold | None) -> Reservation:
        return self._ask(Reserve(writer, list(names), hold), Reservation)

    def commit(self, writer: str, blocks: Sequence[Block], hold: Hold | None) -> int:
        return self._ask(Commit(writer, list(blocks), hold), Count).value

    def abandon(self, writer: str) -> int:
        return self._ask(Abandon(writer), Count).value

    def lease(self, reader: str, keys: Sequence[BlockKey], ttl_s: float) -> Lease:
        return self._ask(TakeLease(reader, list(keys), ttl_s), Lease)

    def release(self, lease_id: int) -> bool:
        return self._ask(ReleaseLease(lease_id), Flags).values == [True]

    def withdraw(self, blocks: Sequence[Block]) -> int:
        return self._ask(WithdrawBlocks(list(blocks)), Count).value

    def renew(self, request_ids: Sequence[RequestId], ttl_s: float) -> int:
        return self._ask_any(RenewHolds(list(request_ids), ttl_s), Count).value

    def release_holds(self, request_ids: Sequence[RequestId]) -> int:
        return self._ask_any(ReleaseHolds(list(request_ids)), Count).value

    def mark_cold(self, keys: Sequence[BlockKey]) -> int:
        return self._ask_any(MarkCold(list(keys)), Count).value

    def status(self) -> DirectoryStatus:
        return self._ask_any(GetStatus(), DirectoryStatus)

    def check(self) -> list[str]:
        return self._ask_any(Check(), Problems).lines

    def _ask(self, request: object, kind: type[T]) -> T:
        """For what is about slots: they are those of one epoch."""
        with self._line() as deadline:
            epoch = self._connection.connect(deadline).epoch
            self._epoch = self._epoch or epoch
            answer = self._connection.exchange(request, deadline) if epoch == self._epoch else None
        if answer is None:
            raise EpochChanged("the directory has restarted")
        return _as(kind, answer)

    def _ask_any(self, request: object, kind: type[T]) -> T:
        """For what is about keys and requests: whichever directory is there may answer."""
        with self._line() as deadline:
            self._connection.connect(deadline)
            answer = self._connection.exchange(request, deadline)
        return _as(kind, answer)

    @contextmanager
    def _line(self) -> Iterator[float]:
        """The connection to oneself until the deadline that this gives; StoreError for whatever goes wrong on it."""
        deadline = time.monotonic() + self._timeout_s
        if not self._lock.acquire(timeout=self._timeout_s):
            raise StoreError("too many calls to the directory")
        try:
            if not self._breaker.allows():
                raise StoreError("the directory is left alone for now")
            yield deadline
            self._breaker.succeeded()
        except (OSError, WireError) as error:
            self._breaker.failed()
            self._connection.close()
            raise StoreError(f"the directory does not answer: {error}") from error
        finally:
            self._lock.release()


def _as(kind: type[T], answer: object) -> T:
    if isinstance(answer, Refused):
        raise StoreError(answer.message)
    if not isinstance(answer, kind):
        raise StoreError(f"{type(answer).__name__} in answer, not {kind.__name__}")
    return answer
