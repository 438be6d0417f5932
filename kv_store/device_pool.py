"""A worker's pages of KV, on its device."""

import mmap
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch

from kernels.accelerator import accelerator_of
from kernels.backend import Int4, KVPages
from kernels.cpu.checksums import KEYS, WORD_BYTES, num_pieces
from kv_store.frame import checksum_of, checksum_of_sums
from kv_store.ledger import Ledger
from kv_store.node.arena import POPULATE_WRITE
from wire.ids import PageId
from wire.layout import KVLayout

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int4": torch.uint8,
}
COPIED_AT_ONCE = 64
Fence = torch.Event | None
"""The work that a device had in its queue at a moment; None of a CPU, whose work is done."""
DEFAULT_OPEN = 256
"""Open blocks of an int4 pool: for 128 sequences, and 2,048 tokens of prompts in a step."""


class DevicePool:
    """`num_pages` pages of `layout.payload_bytes`, contiguous in one zeroed buffer, and their ledger.

    With int4 a page that is not full has an open block; there are at most `num_open`.
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device, num_open: int = DEFAULT_OPEN) -> None:
        self.layout = layout
        self.ledger = Ledger[PageId](num_pages)
        self._pages = _zeros(num_pages * layout.payload_bytes, device).view(num_pages, layout.payload_bytes)
        self._free_open = [*range(min(num_open, num_pages))] if layout.has_open_blocks else []
        self._page_to_open: dict[PageId, int] = {}
        self.kv = view_pages(self._pages, layout, len(self._free_open))
        self._stream = torch.Stream(device) if device.type != "cpu" else None
        self._memory = self._pages.numpy() if device.type == "cpu" else None
        has_sums = device.type != "cpu" and layout.payload_bytes % WORD_BYTES == 0
        self._sums = _DeviceSums(self._pages) if has_sums else None

    @property
    def num_open(self) -> int:
        return len(self._page_to_open)

    @property
    def num_openable(self) -> int:
        """Counts the further pages that may be open at once."""
        return self.ledger.num_pages if self.kv.int4 is None else len(self._free_open)

    def open(self, pages: Sequence[PageId]) -> None:
        """Opens at most `num_openable` pages for writing; with int4 each gets an open block."""
        if self.kv.int4 is not None and pages:
            places = [self._free_open.pop() for _ in pages]
            self._page_to_open.update(zip(pages, places, strict=True))
            pairs, device = torch.tensor([pages, places]), self._pages.device
            if device.type != "cpu":
                pairs = pairs.pin_memory().to(device, non_blocking=True)
            self.kv.int4.page_to_open.index_put_((pairs[0],), pairs[1].int())

    def close(self, pages: Sequence[PageId]) -> None:
        """Closes full or free pages: takes back their open blocks."""
        if self._page_to_open:
            places = (self._page_to_open.pop(page, None) for page in pages)
            self._free_open += [place for place in places if place is not None]

    @property
    def num_copied_at_once(self) -> int:
        """Counts the most pages of `begin_checksums`: in host memory 1, whose bytes are still in the CPU's cache."""
        return 1 if self._memory is not None else COPIED_AT_ONCE

    def page_bytes(self, page: PageId) -> torch.Tensor:
        """Views a page as `uint8[layout.payload_bytes]`."""
        return self._pages[page]

    def fence(self) -> Fence:
        """Notes the work queued so far on the calling thread's stream, for `follow`. Does not block.

        The computing thread calls it before another thread copies to or from pages that it has used.
        """
        if self._stream is None:
            return None
        fence = torch.Event(self._stream.device)
        fence.record(torch.accelerator.current_stream(self._stream.device))
        return fence

    def follow(self, fence: Fence) -> None:
        """Makes later copies wait for the work before a fence, and for none behind it. Does not block."""
        if self._stream is not None and fence is not None:
            self._stream.wait_event(fence)

    def write_pages(self, first: PageId, data: memoryview) -> None:
        """Begins to copy whole payloads of host memory, unchanged until a wait, to the pages from `first` on."""
        last = first + max(1, len(data) // self.layout.payload_bytes)
        if self._memory is None:
            self._copy(self._pages[first:last].view(-1), _as_tensor(data))
        else:
            _copy_bytes(self._memory[first:last].reshape(-1), np.frombuffer(data, np.uint8))

    def new_payload(self) -> memoryview:
        """Makes host memory for the payload of a block, pinned if there is a device."""
        is_pinned = self._memory is None
        return torch.zeros(self.layout.payload_bytes, dtype=torch.uint8, pin_memory=is_pinned).numpy().data

    def read_pages(self, first: PageId, into: memoryview) -> None:
        """Begins to copy the pages from `first` on to whole payloads of writable host memory, complete after a wait."""
        last = first + max(1, len(into) // self.layout.payload_bytes)
        if self._memory is None:
            self._copy(_as_tensor(into), self._pages[first:last].view(-1))
        else:
            _copy_bytes(np.frombuffer(into, np.uint8), self._memory[first:last].reshape(-1))

    def begin_in(
        self, copies: Iterable[tuple[PageId, memoryview]], pages: Sequence[PageId]
    ) -> Callable[[], list[bytes]]:
        """Begins to copy payloads to at most `num_copied_at_once` pages, as `write_pages` does, and to sum these.

        Returns the function that waits, and returns the pages' checksums; call it before the next but one `begin_in` or
        `begin_out`.
        """
        for page, data in copies:
            self.write_pages(page, data)
        return self.begin_checksums(pages)

    def begin_out(
        self, copies: Iterable[tuple[PageId, memoryview]], pages: Sequence[PageId]
    ) -> Callable[[], list[bytes]]:
        """Begins to copy pages to payloads, and to sum them; returns as `begin_in` does."""
        for page, into in copies:
            self.read_pages(page, into)
        return self.begin_checksums(pages)

    def begin_checksums(self, pages: Sequence[PageId]) -> Callable[[], list[bytes]]:
        """Begins to sum pages, behind all running copies; returns as `begin_in` does."""
        if self._sums is None:
            self.wait()
            return [checksum_of(self._pages[page].cpu().numpy().data) for page in pages].copy
        with self._stream or nullcontext():
            return self._sums.begin(pages)

    def wait(self) -> None:
        """Waits for all running copies; a pool in host memory has none."""
        if self._stream is not None:
            self._stream.synchronize()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begins a copy between host and device; from memory that is not pinned it is complete on return."""
        _require_equal(target.numel(), source.numel())
        with self._stream or nullcontext():
            target.copy_(source, non_blocking=True)


class _DeviceSums:
    """The sums of pages of a device, `uint8 [num_pages, payload_bytes]`, in two batches of COPIED_AT_ONCE at once."""

    def __init__(self, pages: torch.Tensor) -> None:
        self._pages = pages.view(torch.int64)
        self._accelerator = accelerator_of(pages.device)
        self._keys = torch.frombuffer(bytearray(KEYS), dtype=torch.int32).to(pages.device)
        chosen = torch.empty(2, COPIED_AT_ONCE, dtype=torch.int32, device=pages.device)
        sums = self._pages.new_empty(2, COPIED_AT_ONCE, num_pieces(self._pages.shape[1]), 2)
        here = (torch.empty_like(one, device="cpu").pin_memory() for one in (chosen, sums))
        events = [torch.Event(pages.device) for _ in range(2)]
        self._buffers = cycle(zip(chosen, sums, *here, events, strict=True))

    def begin(self, pages: Sequence[PageId]) -> Callable[[], list[bytes]]:
        """Begins a batch on the current stream; returns the function that waits for it, and for all before it."""
        front = slice(len(pages))
        chosen, sums, chosen_here, sums_here, event = next(self._buffers)
        chosen_here[front] = torch.tensor(pages, dtype=torch.int32)
        chosen[front].copy_(chosen_here[front], non_blocking=True)
        self._accelerator.sum_pages(self._pages, chosen[front], self._keys, sums[front])
        sums_here[front].copy_(sums[front], non_blocking=True)
        event.record()
        return partial(checksums_after, event, sums_here[front])


def checksums_after(event: torch.Event, sums: torch.Tensor) -> list[bytes]:
    """Waits for a batch, and returns the checksums of its sums."""
    event.synchronize()
    return [checksum_of_sums(one.data) for one in sums.numpy()]


def view_pages(pages: torch.Tensor, layout: KVLayout, num_open: int = 0) -> KVPages:
    """Views pages `uint8 [num_pages, layout.payload_bytes]` as KV, with `num_open` zeroed open blocks of int4."""
    if layout.has_open_blocks:
        return _view_int4(pages, layout, num_open)
    heads = pages.view(len(pages), layout.num_layers, 2, layout.num_kv_heads, layout.head_bytes)
    dtype = _DTYPES[layout.quantization if layout.is_quantized else layout.dtype]
    data = heads[..., : layout.data_bytes].view(dtype).unflatten(-1, (layout.block_size, layout.head_dim))
    return KVPages(data, heads[..., layout.data_bytes :].view(torch.bfloat16) if layout.is_quantized else None)


def _view_int4(pages: torch.Tensor, layout: KVLayout, num_open: int) -> KVPages:
    num_layers, _, num_kv_heads, block_size, head_dim = layout.shape
    key_bytes, head_bytes = layout.key_bytes, layout.key_bytes + layout.head_bytes
    heads = pages.view(len(pages), num_layers, num_kv_heads, head_bytes)
    data = heads.as_strided(
        (len(pages), num_layers, 2, num_kv_heads, block_size, head_dim // 2),
        (heads.stride(0), heads.stride(1), key_bytes, head_bytes, head_dim // 2, 1),
    )
    open_bytes = num_open * replace(layout, quantization="none").payload_bytes
    opened = _zeros(open_bytes, pages.device).view(_DTYPES[layout.dtype])
    page_to_open = torch.zeros(len(pages), dtype=torch.int32, device=pages.device)
    key_scales = heads[..., layout.data_bytes : key_bytes].view(torch.bfloat16)
    scales = heads[..., key_bytes + layout.data_bytes :].view(torch.bfloat16)
    return KVPages(data, scales, Int4(key_scales, opened.view(num_open, *layout.shape), page_to_open))


def _copy_bytes(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    """Copies within host memory on this thread: torch would wake threads that compete with the engine's."""
    _require_equal(target.size, source.size)
    np.copyto(target, source)


def _require_equal(num_target_bytes: int, num_source_bytes: int) -> None:
    if num_target_bytes != num_source_bytes:
        raise ValueError(f"{num_source_bytes} bytes do not fill a target of {num_target_bytes}")


def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Makes a zeroed buffer; on a CPU in huge pages, if available, for a sequence's pages are far apart.

    Touches all of it: else the first use of each page would wait for the system, 0.25 s in all for 90 MB.
    """
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, POPULATE_WRITE):
        with suppress(OSError):  # a kernel without it
            memory.madvise(advice)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _as_tensor(data: memoryview) -> torch.Tensor:
    """Wraps memory as `uint8`. Read-only memory is copied, as torch has no tensors over it."""
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
