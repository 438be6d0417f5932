"""A node's host tier: slots for blocks, in memory that every process of the node maps.

The file is `num_slots` slots of `block_bytes`, then a page with the geometry. All memory is allocated and touched at
creation, so that a full machine is an error at start and not a SIGBUS later.
"""

import errno
import logging
import mmap
import os
import struct
import weakref
from contextlib import suppress
from pathlib import Path

import psutil

from wire.errors import ConfigError, StoreError
from wire.ids import SlotId
from wire.layout import PAGE_ALIGNMENT

_MAGIC = b"BATONKV1"
_TRAILER = struct.Struct("<8sQQ")
_STEP_BYTES = 32 << 20
"""Other threads stand still during a step, such as the event loop of the node's service, or of a worker that serves."""
POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE, which `mmap` does not name; it takes 0.2 s a GiB where touching each page takes 0.4."""
GPU_CONTROLS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))

log = logging.getLogger(__name__)


class Arena:
    """Slots by number. `path` is None for an anonymous arena."""

    def __init__(self, memory: mmap.mmap, block_bytes: int, num_slots: int, path: Path | None) -> None:
        self.block_bytes = block_bytes
        self.num_slots = num_slots
        self.path = path
        self._memory = memory
        self._view = memoryview(memory)
        self._unpin: weakref.finalize[..., Arena] | None = None
        address = _pin(memory, block_bytes * num_slots)
        if address is not None:
            # Memory that is unmapped while it is pinned cannot be pinned again at its address.
            self._unpin = weakref.finalize(self, _unpin, address)
            self._unpin.atexit = False

    @classmethod
    def create(cls, path: str, block_bytes: int, num_slots: int) -> "Arena":
        """Makes the file, readable for this user only, and touches all its pages.

        Raises ConfigError if it does not fit, or if the file exists.
        """
        size = _size(block_bytes, num_slots)
        free = psutil.virtual_memory().available
        if size > free:  # /dev/shm may claim to be larger than the memory that is left
            raise ConfigError(f"an arena of {size} bytes does not fit: {free} bytes of memory are free")
        descriptor = _make(path)
        try:
            memory = _allocate(descriptor, size)
        except BaseException as error:
            os.unlink(path)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise ConfigError(f"an arena of {size} bytes does not fit: {os.strerror(error.errno)}") from error
            raise
        finally:
            os.close(descriptor)
        _TRAILER.pack_into(memory, block_bytes * num_slots, _MAGIC, block_bytes, num_slots)
        return cls(memory, block_bytes, num_slots, Path(path))

    @classmethod
    def open(cls, path: str) -> "Arena":
        """Maps an arena that another process has made. Raises StoreError if there is none."""
        try:
            with open(path, "r+b") as file:
                memory = _map(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise StoreError("the arena cannot be mapped", reason=str(error)) from error
        geometry = _geometry(memory)
        if geometry is None:
            memory.close()
            raise StoreError("the file is not an arena")
        return cls(memory, *geometry, Path(path))

    @staticmethod
    def discard(path: str) -> None:
        """Removes the file of a dead owner's arena and frees its memory, even if other processes still map it.

        These read zeros from now on, and their writes reach no later arena. Does nothing if there is no file. Memory
        that a process has pinned for a GPU stays until that process closes it.
        """
        try:
            with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                memory.madvise(mmap.MADV_REMOVE)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:  # empty, or not in shared memory
            log.warning("the memory of arena %s stays until nobody maps it: %s", path, error)
        Path(path).unlink(missing_ok=True)

    @staticmethod
    def identity(path: str) -> tuple[int, int, bytes] | None:
        """Returns inode, size and last page of the file at a path, which never change; None without a file."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            file = os.fstat(descriptor)
            return file.st_ino, file.st_size, os.pread(descriptor, PAGE_ALIGNMENT, file.st_size - PAGE_ALIGNMENT)
        except OSError:  # shorter than a page, or no file at all
            return None
        finally:
            os.close(descriptor)

    @classmethod
    def anonymous(cls, block_bytes: int, num_slots: int) -> "Arena":
        """Makes an arena without a file."""
        return cls(mmap.mmap(-1, _size(block_bytes, num_slots)), block_bytes, num_slots, None)

    def slot(self, slot: SlotId, num_slots: int = 1) -> memoryview:
        """Views the `block_bytes` bytes of a slot, and of the slots behind it. Not to be used after `close`."""
        if not 0 <= slot <= self.num_slots - num_slots:
            raise StoreError(f"slot {slot} of an arena of {self.num_slots}")
        return self._view[slot * self.block_bytes : (slot + num_slots) * self.block_bytes]

    def close(self) -> None:
        """Unmaps the arena, or leaves that to the last view of a slot that is still in use."""
        if self._unpin is not None:
            self._unpin()
        self._view.release()
        try:
            self._memory.close()
        except BufferError:
            log.debug("a slot of arena %s is still in use", self.path)

    def unlink(self) -> None:
        """Removes the file, if it is there, and frees its memory; processes that still map it read zeros."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            with suppress(OSError, ValueError):  # not in shared memory, or closed: it goes with its last mapping
                self._memory.madvise(mmap.MADV_REMOVE)


def _size(block_bytes: int, num_slots: int) -> int:
    return block_bytes * num_slots + PAGE_ALIGNMENT


def _geometry(memory: mmap.mmap) -> tuple[int, int] | None:
    """Reads block size and number of slots from the file's last page; None if the file is not an arena."""
    if len(memory) < PAGE_ALIGNMENT:
        return None
    magic, block_bytes, num_slots = _TRAILER.unpack_from(memory, len(memory) - PAGE_ALIGNMENT)
    return (block_bytes, num_slots) if (magic, _size(block_bytes, num_slots)) == (_MAGIC, len(memory)) else None


def _make(path: str) -> int:
    try:
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError as error:
        raise ConfigError(f"the arena's file cannot be made: {os.strerror(error.errno or 0)}") from error


def _allocate(descriptor: int, size: int) -> mmap.mmap:
    """Takes the memory from the system step by step; then maps it."""
    for start in range(0, size, _STEP_BYTES):
        os.posix_fallocate(descriptor, start, min(_STEP_BYTES, size - start))
    return _map(descriptor, size)


def _map(descriptor: int, size: int) -> mmap.mmap:
    """Maps all pages of a file in this process, step by step. size: 0 for the file's. Raises OSError, ValueError."""
    memory = mmap.mmap(descriptor, size)
    for start in range(0, len(memory), _STEP_BYTES):
        try:
            memory.madvise(POPULATE_WRITE, start, _STEP_BYTES)
        except OSError:  # a kernel before 5.14
            _ = memory[start : start + _STEP_BYTES : PAGE_ALIGNMENT]
    return memory


def _pin(memory: mmap.mmap, size: int) -> int | None:
    """Pins the memory for a GPU's DMA, and returns its address; None if it cannot, which makes copies slower."""
    if not any(control.exists() for control in GPU_CONTROLS):
        return None
    import torch  # here, since the node's service needs it for nothing else, and starts a second sooner without

    from kernels.accelerator import present_accelerator

    accelerator = present_accelerator()
    if accelerator is None:
        return None
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    fault = accelerator.pin(address, size)
    if fault is not None:
        log.warning("an arena of %d bytes could not be pinned (%s): copies to the GPU will be slower", size, fault)
        return None
    return address


def _unpin(address: int) -> None:
    from kernels.accelerator import present_accelerator

    if (accelerator := present_accelerator()) is not None:
        accelerator.unpin(address)
