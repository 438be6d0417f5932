"""The cold tier in a folder, which outlives clusters and which nodes may share."""

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import cycle, islice
from math import inf
from mmap import mmap
from queue import SimpleQueue
from typing import Any, TypeVar

from kv_store.frame import FRONT_BYTES, HEAD_BYTES, namespace_of
from kv_store.tiers.cold_tier import FramedTier
from kv_store.tiers.contents import beyond
from kv_store.tiers.folder import SHARDS, Folder, Found, StoredFile
from wire.errors import ConfigError
from wire.ids import BlockKey
from wire.layout import KVLayout
from wire.tier import StoredBlock, Tier

MIN_BLOCKS = 8
_OPEN_TIMEOUT_S = 10.0
_WRITE_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 2.0
_FULL_FOR_S = 1.0
_RENEW_EVERY = 256
_BYTES_AHEAD = 4 << 20
_DESCRIBED = 32
"""Files that one call looks into, while reads of blocks wait."""
_REFUSALS = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EROFS: "read-only",
    errno.EACCES: "read-only",
    errno.EPERM: "read-only",
}
_PASSING = (errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.ETIMEDOUT)
T = TypeVar("T")

log = logging.getLogger(__name__)


class FilesTier(FramedTier):
    """A ColdTier that keeps the most recently used frames in at most `max_bytes` of a folder.

    The tier has a thread for file system calls, which never return if the mount hangs. The caller waits `timeout_s` for
    a read; while a call hangs, no other is made, and every read is a miss. A read fills memory of the tier, so that a
    late answer does no harm.

    Several nodes may use one folder: they take turns at making room, and each further node may exceed `max_bytes` by a
    twentieth. Raises ConfigError if files cannot be written to the folder, or too few blocks fit. A start does not fail
    for a mount that hangs, is read-only or is unreachable for now. A folder that is removed or replaced meanwhile costs
    one error, and is opened again. ttl_s: time to live since a block's last use, by this machine's clock; 0 for no end.
    """

    def __init__(
        self,
        folder: str,
        layout: KVLayout,
        mac_key: bytes,
        timeout_s: float,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        ttl_s: float = 0.0,
    ) -> None:
        super().__init__(Tier.FILES, layout, mac_key, clock)
        frame_bytes = self._seal.frame_bytes
        if max_bytes < MIN_BLOCKS * frame_bytes:
            raise ConfigError(f"files.max_bytes: it takes at least {MIN_BLOCKS * frame_bytes} for blocks of this model")
        self._timeout_s = timeout_s
        num_buffers = max(2, min(16, _BYTES_AHEAD // frame_bytes))
        self._buffers = [memoryview(mmap(-1, frame_bytes)) for _ in range(num_buffers)]  # on page boundaries: faster
        self._open = partial(Folder, folder, clock, ttl_s or inf)
        self._folder: Folder | None = None
        self._room = _Room(self._opened, self._evict, max_bytes, frame_bytes, clock)
        self._shares: Mapping[bytes, float] = {}
        self._owners: dict[str, bytes] = {}
        self._calls = _CallThread("files")
        self._hanging: Future[Any] | None = None
        self._begin_use(folder)

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._ask(lambda folder: self._note_found(keys, [*map(folder.has, keys)]), [False] * len(keys))

    def key_pages(self) -> Iterator[Sequence[BlockKey]]:
        for shard in SHARDS:
            keys = self._answer(self._ask(partial(_keys_of, shard), None))
            yield from (keys[first : first + _DESCRIBED] for first in range(0, len(keys), _DESCRIBED))

    def describe(self, keys: Sequence[BlockKey]) -> list[StoredBlock]:
        return self._answer(self._ask(partial(_describe, keys), None))

    def _remove(self, keys: Sequence[BlockKey]) -> bool:
        return self._ask(lambda folder: folder.remove(keys), False)

    def close(self) -> None:
        """Waits within a bound for calls under way; a thread whose call hangs keeps the folder open."""
        if all([self._calls.close(), self._room.close()]) and self._folder is not None:
            self._folder.close()

    def sweep(self, shares: Mapping[bytes, float]) -> None:
        self._shares = shares
        self._room.sweep()

    def _evict(self, folder: Folder, oldest: Sequence[StoredFile], num_bytes: int) -> int:
        """Removes expired files; then, until `num_bytes` are free, files beyond a share, then the oldest.

        Returns the number of bytes freed.
        """
        num_freed = 0
        victims = [file for file in oldest if folder.is_expired(file.used_ns)]
        num_expired = len(victims)
        if num_bytes > 0:
            victims += [*self._beyond_shares(folder, oldest), *oldest]
        for number, file in enumerate(dict.fromkeys(victims)):
            if number >= num_expired and num_freed >= num_bytes:
                break
            folder.remove_file(file)
            self._count("evicted")
            self._lost += [] if file.key is None else [file.key]
            num_freed += file.num_bytes
            if number % _RENEW_EVERY == 0:
                folder.lock.renew()
        return num_freed

    def _beyond_shares(self, folder: Folder, oldest: Sequence[StoredFile]) -> Iterator[StoredFile]:
        if self._shares:
            known = self._owners
            self._owners = {one.path: known.get(one.path) or _owner_of(one, folder) for one in oldest}
        for namespace, share in self._shares.items():
            own = [file for file in oldest if self._owners[file.path] == namespace]
            yield from beyond(own, share * self._room.max_bytes)

    def _begin_use(self, path: str) -> None:
        """Opens the folder and tries to write there. Raises ConfigError for permanent faults."""
        opening = self._calls.begin(lambda: self._opened().try_to_write())
        if not wait([opening], _OPEN_TIMEOUT_S).done:
            self._hanging = opening
            self._failed(TimeoutError(f"no answer within {_OPEN_TIMEOUT_S} s"))
        elif isinstance(error := opening.exception(), OSError):
            if error.errno not in _PASSING:
                self.close()
                raise _no_folder(path, error) from error
            self._failed(error)

    def _opened(self) -> Folder:
        """Opens the folder unless it is open. May hang. Raises OSError, once for a folder that was removed."""
        if self._folder is not None and not self._folder.is_at_its_path:
            log.warning("tier files: %s is gone, or another folder by now; it is opened again", self._folder.path)
            self._folder = None
            raise OSError(errno.ESTALE, "the folder is gone, or another one")
        self._folder = self._folder or self._open()
        return self._folder

    @property
    def _state(self) -> str:
        return "broken" if self._is_hanging else super()._state

    @property
    def _is_hanging(self) -> bool:
        return self._hanging is not None and not self._hanging.done()

    def _read(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> Generator[bytes | memoryview, None, None]:
        places = zip(keys, cycle(self._buffers), strict=False)
        reads = (self._begin(partial(_read, key, buffer)) for key, buffer in places)
        ahead = deque(islice(reads, len(self._buffers) - 1))
        for payload, buffer in zip(into, cycle(self._buffers), strict=False):
            found = self._end(ahead.popleft(), self._timeout_s, Found.NOTHING)
            if found is Found.NOTHING:
                return
            ahead.extend(islice(reads, 1))
            payload[:] = buffer[FRONT_BYTES:]
            yield buffer[:FRONT_BYTES] if found is Found.FILE else b""

    def _write(self, key: BlockKey, front: bytes, payload: memoryview) -> bool:
        if self._folder is None and not self._ask(lambda _: True, False):
            return False
        try:
            has_room = self._room.take()
        except OSError as error:
            self._failed(error)
            return False
        store = partial(self._store, key, front, payload)
        return has_room and self._end(self._begin(store), _WRITE_TIMEOUT_S, False)

    def _store(self, key: BlockKey, front: bytes, payload: memoryview, folder: Folder) -> bool:
        """Writes a file; returns False if the folder takes no files."""
        try:
            folder.write(key, front, payload)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._refused(_REFUSALS[error.errno], error)
            return False
        self._accepted()
        return True

    def _ask(self, call: Callable[[Folder], T], otherwise: T) -> T:
        return self._end(self._begin(call), self._timeout_s, otherwise)

    def _begin(self, call: Callable[[Folder], T]) -> Future[T] | None:
        """Begins a call, unless a call hangs or the last calls failed."""
        if self._is_hanging or not self._breaker.allows():
            return None
        return self._calls.begin(lambda: call(self._opened()))

    def _end(self, begun: Future[T] | None, timeout_s: float, otherwise: T) -> T:
        """Returns a call's answer, or `otherwise` if it was not begun, failed, or hangs."""
        if begun is None:
            return otherwise
        if not wait([begun], timeout_s).done:
            self._hanging = begun
            self._failed(TimeoutError(f"no answer within {timeout_s} s"))
            return otherwise
        try:
            answer = begun.result()
        except OSError as error:
            self._failed(error)
            return otherwise
        self._succeeded()
        return answer


class _Room:
    """The bytes that this process may write to a folder before it counts the files again and makes room.

    It counts on a separate thread, for that takes long in a large folder.
    """

    def __init__(
        self,
        folder: Callable[[], Folder],
        evict: Callable[[Folder, Sequence[StoredFile], int], int],
        max_bytes: int,
        frame_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        """evict: removes files of a folder, listed by age, until enough bytes are free; returns the bytes freed."""
        self._folder = folder
        self._evict = evict
        self.max_bytes = max_bytes
        self._frame_bytes = frame_bytes
        self._step_bytes = max(max_bytes // 20, frame_bytes)
        self._clock = clock
        self._calls = _CallThread("files-room")
        self._counting: Future[int] | None = None
        self._sweeping: Future[int] | None = None
        self._left_bytes = 0
        self._next_count = 0.0

    def take(self) -> bool:
        """Takes the bytes of a frame; waits for room within a bound; returns False without room. Raises OSError."""
        if self._left_bytes < self._frame_bytes and self._clock() >= self._next_count:
            self._count()
        if self._left_bytes < self._frame_bytes:
            return False
        self._left_bytes -= self._frame_bytes
        return True

    def sweep(self) -> None:
        """Begins to make room, unless it has begun."""
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = self._calls.begin(self._make_room)

    def close(self) -> bool:
        return self._calls.close()

    def _count(self) -> None:
        self._counting = self._counting or self._calls.begin(self._make_room)
        if wait([self._counting], _WRITE_TIMEOUT_S).done:
            counted, self._counting = self._counting, None
            self._next_count = self._clock() + _FULL_FOR_S
            self._left_bytes = counted.result()
            if self._left_bytes >= self._frame_bytes:
                self._next_count = 0.0

    def _make_room(self) -> int:
        """Removes expired files, and others if little room is left; returns the bytes that may be written."""
        folder = self._folder()
        files = list(folder.files())
        num_bytes = sum(file.num_bytes for file in files)
        oldest = sorted(files)
        is_full = num_bytes > self.max_bytes - self._step_bytes
        has_expired = bool(oldest) and folder.is_expired(oldest[0].used_ns)
        if (is_full or has_expired) and folder.lock.take():
            try:
                num_wanted = num_bytes - self.max_bytes + 2 * self._step_bytes if is_full else 0
                num_bytes -= self._evict(folder, oldest, num_wanted)
            finally:
                folder.lock.release()
        return max(0, min(self._step_bytes, self.max_bytes - num_bytes))


class _CallThread:
    """Calls in order on one thread, which may hang. It ends once it is closed, or with the process."""

    def __init__(self, name: str) -> None:
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._orders.put(partial(_settle, future, call))
        return future

    def close(self) -> bool:
        """Waits at most _CLOSE_TIMEOUT_S for the end of the thread; returns whether it has ended."""
        self._orders.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            order()


def _settle(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def _keys_of(shard: str, folder: Folder) -> list[BlockKey]:
    names = (file.path.partition("/")[2] for file in folder.shard_files(shard))
    return [BlockKey(bytes.fromhex(name)) for name in names if not name.startswith(".")]


def _owner_of(file: StoredFile, folder: Folder) -> bytes:
    """Reads the namespace of a frame; empty for an unfinished frame."""
    name = file.path.partition("/")[2]
    looked = None if name.startswith(".") else folder.look(BlockKey(bytes.fromhex(name)), HEAD_BYTES)
    return b"" if looked is None else namespace_of(looked[1])


def _describe(keys: Sequence[BlockKey], folder: Folder) -> list[StoredBlock]:
    found = [(key, *looked) for key in keys if (looked := folder.look(key, HEAD_BYTES)) is not None]
    return [StoredBlock(key, namespace_of(head), file.num_bytes, file.idle_s) for key, file, head in found]


def _read(key: BlockKey, into: memoryview, folder: Folder) -> Found:
    return folder.read(key, into)


def open_folder(path: str, clock: Callable[[], float] = time.monotonic) -> Folder:
    """Opens a folder for files. Raises ConfigError if files cannot be written there, or if it does not answer."""
    calls = _CallThread("files-open")
    try:
        folder = calls.begin(lambda: Folder(path, clock)).result(_OPEN_TIMEOUT_S)
        calls.begin(folder.try_to_write).result(_OPEN_TIMEOUT_S)
        return folder
    except OSError as error:
        raise _no_folder(path, error) from error
    finally:
        calls.close()


def _no_folder(path: str, error: OSError) -> ConfigError:
    reason = error.strerror or "it does not answer"
    return ConfigError(f"files.folder: {path} takes no files ({reason}): give another, or none")
