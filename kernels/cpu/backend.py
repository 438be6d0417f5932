"""The launchers of the C++ kernels: tensors in, addresses and sizes out, at once or as a program for later.

The C interface of the kernels stands at the end of each .cpp file; SIGNATURES repeats it.
"""

import ctypes
import struct
import sys
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from kernels.backend import (
    Activation,
    Angles,
    AttentionVariant,
    Experts,
    Heads,
    Int4,
    KVPages,
    StepTensors,
    Tables,
    Weight,
)
from kernels.cpu import packed
from kernels.cpu.library import load_library, numerics, source_version
from kernels.quantized.matrix import Quantized, round_to_int4, round_to_int8
from kernels.routing import Gating, Routing
from kernels.torch_backend import list_experts


class ROWS(ctypes.c_int64):
    """Stands for the number of rows, which each run of a program sets."""


class SEQUENCES(ctypes.c_int64):
    """Stands for the number of sequences, set likewise."""


class DECODES(ctypes.c_int64):
    """Stands for the number of sequences with one row, set likewise."""


class SAMPLES(ctypes.c_int64):
    """Stands for the number of rows after `sample`, set likewise."""


Addressed = Tensor | ctypes.Structure
Argument = Addressed | int | float | None

DTYPE_TO_CODE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
WEIGHTS_TO_ROUND = {"int8": round_to_int8, "int4": round_to_int4}
KEPT_TO_CODE = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.uint8: 3}
"""Codes of page dtypes, as in dtypes.h; 0 stands for the compute dtype."""
UNBOUNDED = 2**31 - 1
"""The window of attention to all tokens."""
POINTER, SIZE, CODE, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
KERNELS: dict[str, list[type]] = {
    **{f"{layout}unpack_rows": [CODE, POINTER, POINTER, ROWS, SIZE, REAL, POINTER] for layout in ("", "packed_")},
    **{f"{layout}linear": [CODE, *[POINTER] * 5, ROWS, SIZE, SIZE] for layout in ("", "packed_")},
    **{f"{layout}linear_to_float": [CODE, *[POINTER] * 3, ROWS, SIZE, SIZE] for layout in ("", "packed_")},
    "rms_norm": [CODE, POINTER, SIZE, POINTER, CODE, REAL, POINTER, ROWS, SIZE, POINTER, SIZE],
    "gate": [CODE, CODE, POINTER, ROWS, SIZE, SIZE, POINTER],
    "soft_cap": [POINTER, REAL, ROWS, SIZE],
    "rotate_and_write": [
        *[CODE, POINTER, POINTER, POINTER, CODE, REAL, POINTER, POINTER, SIZE],
        *[ROWS, *[SIZE] * 3, POINTER, POINTER],
    ],
    "attention": [POINTER, SEQUENCES, DECODES],
    "route": [CODE, CODE, POINTER, ROWS, SIZE, SIZE, POINTER, POINTER],
    "expert_linear": [CODE, *[POINTER] * 5, ROWS, *[SIZE] * 5],
    "combine": [CODE, *[POINTER] * 3, ROWS, SIZE, SIZE, POINTER],
    "pick": [POINTER, POINTER, ROWS, SIZE, POINTER],
    "advance": [POINTER, SIZE, POINTER, SIZE, SIZE, SEQUENCES, *[POINTER] * 5],
}
"""Kernels that a program can have: baton_NAME, and for programs baton_NAME_from_words."""
SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    **{f"baton_{name}": (None, arguments) for name, arguments in KERNELS.items()},
    "baton_set_num_threads": (None, [CODE]),
    "baton_packed_size": (SIZE, [CODE, SIZE, SIZE]),
    "baton_pack": (None, [CODE, POINTER, SIZE, SIZE, POINTER]),
    **packed.SIGNATURES,
    "baton_replay": (None, [POINTER, SIZE]),
    "baton_attention_bytes": (SIZE, []),
}


class Layer(ctypes.Structure):
    """A layer of KV: the fields of `Layer` in dtypes.h."""

    _fields_ = [
        ("kept", SIZE), ("kv", POINTER), ("scales", POINTER),
        ("page_stride", SIZE), ("plane_stride", SIZE), ("head_stride", SIZE), ("block_size", SIZE), ("row_bytes", SIZE),
        ("open", POINTER), ("page_to_open", POINTER),
        ("open_page_stride", SIZE), ("open_plane_stride", SIZE), ("open_head_stride", SIZE),
    ]  # fmt: skip


class Attention(ctypes.Structure):
    """The arguments of attention except numbers of sequences: the fields of `Attention` in pieces.h."""

    _fields_ = [
        ("pages", Layer), ("dtype", SIZE), ("query", POINTER), ("query_stride", SIZE), ("out", POINTER),
        ("tables", POINTER), ("table_stride", SIZE), ("context_lens", POINTER), ("cu_query_lens", POINTER),
        ("num_heads", SIZE), ("num_kv_heads", SIZE), ("head_size", SIZE), ("window", SIZE), ("num_sinks", SIZE),
        ("cosines", POINTER), ("sines", POINTER), ("sinks", POINTER), ("scale", REAL), ("soft_cap", REAL),
    ]  # fmt: skip


class CpuBackend:
    """The C++ kernels of one instruction set. A row's result depends on no other row and not on the number of threads.

    The kernels have their own threads, with the caller's niceness: as many as torch had at the process's first
    CpuBackend. Torch keeps one thread: its idle threads would spin on the kernels' cores.
    """

    def __init__(self, isa: str) -> None:
        """Raises NoKernels if the kernels cannot be compiled, loaded or run, RuntimeError if structs differ."""
        self.name = isa
        self.version = f"cpu-{numerics(isa)}-{source_version()}"
        self._library = load_library(isa)
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        if self._library.baton_attention_bytes() != ctypes.sizeof(Attention):
            raise RuntimeError("kernels/cpu/backend.py and pieces.h differ in the fields of Attention")
        self._kernels: dict[str, Callable[..., None]] = {
            name: getattr(self._library, f"baton_{name}") for name in KERNELS
        }
        self.set_num_threads(_threads_of_torch())

    def set_num_threads(self, num_threads: int) -> None:
        """Sets the threads of this instruction set's kernels in this process. No result depends on it."""
        self._library.baton_set_num_threads(num_threads)

    def record(self) -> "CpuRecorder":
        return CpuRecorder(self)

    def pack(self, weight: Tensor) -> Weight:
        return self.pack_exactly(weight)

    def pack_exactly(self, weight: Tensor) -> Weight:
        weight = weight.contiguous()
        code, (columns, depth) = DTYPE_TO_CODE[weight.dtype], weight.shape
        packed = weight.new_empty(self._library.baton_packed_size(code, columns, depth))
        if not weight.is_meta:
            self._library.baton_pack(code, weight.data_ptr(), columns, depth, packed.data_ptr())
        return Weight(packed, columns, depth, weight.dtype)

    def pack_gated(self, gate_up: Tensor) -> Weight:
        return self.pack(gate_up)

    def pack_codes(self, parts: Sequence[Quantized], dtype: torch.dtype) -> Weight:
        """Keeps codes packed if the kernels widen them exactly; else packs the widened matrix."""
        parts = [packed.in_groups(part) for part in parts]
        if not all(packed.is_packable(part, dtype) for part in parts):
            return self.pack_exactly(torch.cat([part.dequantize().to(dtype) for part in parts]))
        columns = sum(part.columns for part in parts)
        return Weight(packed.pack(self._library, parts), columns, parts[0].depth, dtype)

    def embed(self, token_ids: Tensor, table: Weight, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
        out = torch.empty(len(token_ids), table.depth, dtype=table.dtype) if out is None else out
        self._call(
            _kernel("unpack_rows", table), DTYPE_TO_CODE[out.dtype], table.data, token_ids,
            len(token_ids), table.depth, scale, out,
        )  # fmt: skip
        return out

    def rms_norm(
        self, states: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        out = states.new_empty(states.shape) if out is None else out
        self._call(
            "rms_norm", DTYPE_TO_CODE[states.dtype], states, states.stride(0), weight, _is_wide(weight), eps, residual,
            *states.shape, out, out.stride(0),
        )  # fmt: skip
        return out

    def linear(
        self,
        states: Tensor,
        weight: Weight,
        bias: Tensor | None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        out = states.new_empty(len(states), weight.columns) if out is None else out
        self._call(
            _kernel("linear", weight), DTYPE_TO_CODE[states.dtype], states, weight.data, bias, residual, out,
            len(states), weight.columns, weight.depth,
        )  # fmt: skip
        return out

    def logits(self, states: Tensor, weight: Weight, cap: float | None = None, out: Tensor | None = None) -> Tensor:
        out = states.new_empty(len(states), weight.columns, dtype=torch.float32) if out is None else out
        self._call(
            _kernel("linear_to_float", weight), DTYPE_TO_CODE[states.dtype], states, weight.data, out,
            len(states), weight.columns, weight.depth,
        )  # fmt: skip
        if cap is not None:
            self._call("soft_cap", out, cap, *out.shape)
        return out

    def rotate_and_write(
        self, qkv: Tensor, heads: Heads, angles: Angles, pages: KVPages, slot_mapping: Tensor
    ) -> Tensor:
        self._call(
            "rotate_and_write", DTYPE_TO_CODE[qkv.dtype], qkv, heads.query_norm, heads.key_norm,
            _is_wide(heads.query_norm), heads.norm_eps,
            angles.cosines, angles.sines, angles.cosines.stride(0),
            len(qkv), heads.num_queries, heads.num_kv, heads.size, _described(pages, qkv.dtype), slot_mapping,
        )  # fmt: skip
        return qkv.view(len(qkv), -1, heads.size)[:, : heads.num_queries]

    def attend(
        self,
        query: Tensor,
        pages: KVPages,
        tables: Tables,
        variant: AttentionVariant,
        out: Tensor | None = None,
    ) -> Tensor:
        out = query.new_empty(query.shape) if out is None else out
        turns = tables.turns
        if variant.num_sinks and turns is None:
            raise ValueError("sinks want angles by which queries are turned back")
        call = Attention(
            _described(pages, query.dtype), DTYPE_TO_CODE[query.dtype],
            query.data_ptr(), query.stride(0), out.data_ptr(),
            tables.block_tables.data_ptr(), tables.block_tables.stride(0),
            tables.context_lens.data_ptr(), tables.cu_query_lens.data_ptr(),
            query.shape[1], pages.data.shape[2], query.shape[2],
            variant.window or UNBOUNDED, variant.num_sinks,
            turns and turns.cosines.data_ptr(), turns and turns.sines.data_ptr(),
            _address(variant.scores.sinks), variant.scale, variant.scores.soft_cap or 0.0,
        )  # fmt: skip
        self._call("attention", call, len(tables.context_lens), tables.num_decodes)
        return out

    def gated_linear(
        self,
        states: Tensor,
        weight: Weight,
        bias: Tensor | None,
        activation: Activation,
        product: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        return self.gate(self.linear(states, weight, bias, None, product), activation, out)

    def gate(self, gate_up: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
        *rows, columns = *gate_up.shape[:-1], gate_up.shape[-1] // 2
        out = gate_up.new_empty(*rows, columns) if out is None else out
        num_of_token = gate_up.shape[1:-1].numel()
        self._call("gate", DTYPE_TO_CODE[out.dtype], activation.value, gate_up, rows[0], num_of_token, columns, out)
        return out

    experts = staticmethod(list_experts)

    def route(self, logits: Tensor, num_chosen: int, shares: Gating, out: Routing | None = None) -> Routing:
        sizes = len(logits), num_chosen
        out = (
            Routing(logits.new_empty(sizes, dtype=torch.int32), torch.empty(sizes, dtype=torch.float32))
            if out is None
            else out
        )
        self._call(
            "route", DTYPE_TO_CODE[logits.dtype], shares.value, logits, *logits.shape, num_chosen,
            out.experts, out.shares,
        )  # fmt: skip
        return out

    def expert_linear(
        self, states: Tensor, experts: Experts, routing: Routing, bias: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        (num_rows, num_chosen), first = routing.experts.shape, experts.weights[0]
        out = states.new_empty(num_rows, num_chosen, first.columns) if out is None else out
        self._call(
            "expert_linear", DTYPE_TO_CODE[states.dtype], states, experts.table, bias, routing.experts, out, num_rows,
            num_chosen, len(experts.weights), num_chosen if states.dim() == 2 else 1, first.columns, first.depth,
        )  # fmt: skip
        return out

    def combine(
        self, rows: Tensor, routing: Routing, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        num_rows, num_chosen, columns = rows.shape
        out = rows.new_empty(num_rows, columns) if out is None else out
        self._call(
            "combine", DTYPE_TO_CODE[rows.dtype], rows, routing.shares, residual, num_rows, num_chosen, columns, out
        )
        return out

    def _call(self, kernel: str, *arguments: Argument) -> None:
        self._kernels[kernel](*[_address(one) if isinstance(one, Addressed) else one for one in arguments])


class RoundingBackend(CpuBackend):
    """A CpuBackend that rounds plain weights to int8 or int4 when it packs them."""

    def __init__(self, isa: str, weights: str) -> None:
        super().__init__(isa)
        self._round = WEIGHTS_TO_ROUND[weights]
        self.name, self.version = f"{self.name}-{weights}", f"{self.version}-{weights}"

    def pack(self, weight: Tensor) -> Weight:
        return self.pack_codes([self._round(weight)], weight.dtype)


class CpuRecorder(CpuBackend):
    """A CpuBackend that records its calls and runs none. The caller keeps every tensor alive, `out` too."""

    def __init__(self, backend: CpuBackend) -> None:
        self.name, self.version = backend.name, backend.version
        self._library = backend._library
        self._calls: list[tuple[str, tuple[Argument, ...]]] = []
        self._num_unsampled = sys.maxsize

    def pick(self, table: Tensor, ids: Tensor, out: Tensor) -> None:
        self._call("pick", table, ids, *out.shape, out)

    def sample(self, states: Tensor, rows: Tensor, out: Tensor) -> None:
        self._num_unsampled = len(self._calls)
        self.pick(states.view(torch.float32), rows, out.view(torch.float32))

    def advance(self, logits: Tensor, block_size: int, batch: StepTensors) -> None:
        self._call(
            "advance", logits, logits.shape[1], batch.block_tables, batch.block_tables.stride(0), block_size,
            len(batch.context_lens), batch.token_ids, batch.positions, batch.slot_mapping, batch.context_lens,
            batch.cu_query_lens,
        )  # fmt: skip

    def finish(self) -> "CpuProgram":
        """Makes a program of the recorded calls."""
        return CpuProgram(self._library, self._calls, self._num_unsampled)

    def _call(self, kernel: str, *arguments: Argument) -> None:
        self._calls.append((kernel, arguments))


class CpuProgram:
    """Recorded calls. Their tensors must live as long as the program does.

    Each call has the address of the next product's weight, which waiting threads prefetch. Layout: program.cpp.
    """

    def __init__(
        self, library: ctypes.CDLL, calls: Sequence[tuple[str, tuple[Argument, ...]]], num_unsampled: int
    ) -> None:
        """num_unsampled: the number of calls before `sample`, whose rows are all rows."""
        self._replay = library.baton_replay
        self._num_calls = len(calls)
        self._structs = [one for _, arguments in calls for one in arguments if isinstance(one, ctypes.Structure)]
        expected = _next_weights(calls)
        words: list[int] = []
        self._at: dict[type, list[int]] = {ROWS: [], SEQUENCES: [], DECODES: [], SAMPLES: []}
        for at, ((kernel, arguments), weight) in enumerate(zip(calls, expected, strict=True)):
            rows = ROWS if at < num_unsampled else SAMPLES
            function = getattr(library, f"baton_{kernel}_from_words")
            address = ctypes.cast(function, POINTER).value or 0
            words += [address, len(arguments), weight.data_ptr(), weight.nbytes]
            for index, kind in enumerate(KERNELS[kernel], len(words)):
                if kind in self._at:
                    self._at[rows if kind is ROWS else kind].append(index)
            words += [_word(argument) for argument in arguments]
        self._words = np.array(words, dtype=np.int64)
        self._address = self._words.ctypes.data
        self._numbers = (-1, -1, -1, -1)

    def run(self, num_rows: int, num_sequences: int, num_decodes: int, num_samples: int = 0) -> None:
        """Runs all calls on the first rows, sequences and samples of their tensors."""
        numbers = (num_rows, num_sequences, num_decodes, num_samples)
        if numbers != self._numbers:
            for indices, number in zip(self._at.values(), numbers, strict=True):
                self._words[indices] = number
            self._numbers = numbers
        self._replay(self._address, self._num_calls)


def _described(pages: KVPages, dtype: torch.dtype) -> Layer:
    """Describes a layer of pages to the kernels. Raises ValueError for strides that the kernels do not support."""
    data, scales, int4, strides = pages.data, pages.scales, pages.int4, _strides(pages.data)[:3]
    if int4 is not None:
        _require_int4(pages, int4, dtype)
    elif scales is not None and not _are_alike(data.shape, strides, _strides(scales)):
        raise ValueError("the scales of pages must be as many bytes apart as their codes")
    layer = KEPT_TO_CODE.get(data.dtype, 0), data.data_ptr(), _address(scales), *strides, data.shape[3]
    opened = (int4.open.data_ptr(), int4.page_to_open.data_ptr(), *_strides(int4.open)[:3]) if int4 else ()
    return Layer(*layer, data.shape[4] * data.itemsize, *opened)


def _require_int4(pages: KVPages, int4: Int4, dtype: torch.dtype) -> None:
    """Raises ValueError unless each head has keys, key scales, values and value scales, in the order of `KVLayout`."""
    data, scales = pages.data, pages.scales
    assert scales is not None
    page, plane, head = _strides(data)[:3]
    data_bytes = data[0, 0, 0].numel()
    lies_behind = int4.key_scales.data_ptr() - data_bytes, scales.data_ptr() - data_bytes - plane
    sizes = data.shape[0], data.shape[2]
    are_alike = all(_are_alike(sizes, (page, head), _strides(one)) for one in (scales, int4.key_scales))
    if {*lies_behind} != {data.data_ptr()} or not are_alike:
        raise ValueError("the scales of pages of int4 must lie behind the codes of each head")
    if int4.open.dtype is not dtype or int4.page_to_open.dtype is not torch.int32:
        raise ValueError(f"open blocks of {int4.open.dtype} at places of {int4.page_to_open.dtype}, rows of {dtype}")


def _strides(tensor: Tensor) -> list[int]:
    return [stride * tensor.itemsize for stride in tensor.stride()]


def _are_alike(sizes: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Returns whether strides are equal, except in dimensions of size 1, whose stride has no meaning."""
    return all(size == 1 or one == other for size, one, other in zip(sizes, strides, others, strict=False))


@cache
def _threads_of_torch() -> int:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return num_threads


def _next_weights(calls: Sequence[tuple[str, tuple[Argument, ...]]]) -> list[Tensor]:
    """Finds for each call the weight of the next product; after the last product the first follows."""
    products = {at: arguments[2] for at, (kernel, arguments) in enumerate(calls) if "linear" in kernel}
    found, upcoming = [], products[min(products)]
    for at in reversed(range(len(calls))):
        assert isinstance(upcoming, Tensor)
        found.append(upcoming)
        upcoming = products.get(at, upcoming)
    return found[::-1]


def _is_wide(weight: Tensor | None) -> int:
    return int(weight is not None and weight.dtype is torch.float32)


def _kernel(name: str, weight: Weight) -> str:
    return f"packed_{name}" if weight.data.dtype is torch.uint8 else name


def _word(argument: Argument) -> int:
    if isinstance(argument, float):
        return int(struct.unpack("<i", struct.pack("<f", argument))[0])
    return argument if isinstance(argument, int) else _address(argument) or 0


def _address(argument: Addressed | None) -> int | None:
    if isinstance(argument, ctypes.Structure):
        return ctypes.addressof(argument)
    return None if argument is None else argument.data_ptr()
