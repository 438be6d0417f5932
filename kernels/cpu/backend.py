"""The launchers of the C++ kernels: tensors in, addresses and sizes out.

The C interface of the kernels stands at the end of each .cpp file; SIGNATURES repeats it.
"""

import ctypes

import torch
from torch import Tensor

from kernels.backend import Angles, Heads, Tables, Weight
from kernels.cpu.library import load_library, source_version

DTYPE_TO_CODE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
POINTER, SIZE, CODE, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "baton_set_num_threads": (None, [CODE]),
    "baton_packed_size": (SIZE, [CODE, SIZE, SIZE]),
    "baton_pack": (None, [CODE, POINTER, SIZE, SIZE, POINTER]),
    "baton_unpack_rows": (None, [CODE, POINTER, POINTER, SIZE, SIZE, POINTER]),
    "baton_linear": (None, [CODE, *[POINTER] * 5, *[SIZE] * 3]),
    "baton_linear_to_float": (None, [CODE, *[POINTER] * 3, *[SIZE] * 3]),
    "baton_rms_norm": (None, [CODE, POINTER, POINTER, REAL, SIZE, SIZE, POINTER]),
    "baton_gate": (None, [CODE, POINTER, SIZE, SIZE, POINTER]),
    "baton_rotate_and_write": (
        None,
        [CODE, POINTER, POINTER, POINTER, REAL, *[POINTER] * 2, *[SIZE] * 4, POINTER, *[SIZE] * 4, POINTER],
    ),
    "baton_attention": (
        None,
        [CODE, POINTER, SIZE, POINTER, *[SIZE] * 4, POINTER, SIZE, POINTER, POINTER, *[SIZE] * 5, REAL, SIZE, POINTER],
    ),
}


class CpuBackend:
    """The C++ kernels of one instruction set. Rows do not depend on one another, nor on the number of threads."""

    def __init__(self, isa: str) -> None:
        """Raises NoKernels where they cannot be compiled, loaded or run."""
        self.name = isa
        self.version = f"cpu-{isa}-{source_version()}"
        self._library = load_library(isa)
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        self.set_num_threads(torch.get_num_threads())

    def set_num_threads(self, num_threads: int) -> None:
        """Sets the threads of this instruction set's kernels in this process. No result depends on it."""
        self._library.baton_set_num_threads(num_threads)

    def pack(self, weight: Tensor) -> Weight:
        weight = weight.contiguous()
        code, (columns, depth) = DTYPE_TO_CODE[weight.dtype], weight.shape
        packed = weight.new_empty(self._library.baton_packed_size(code, columns, depth))
        self._library.baton_pack(code, weight.data_ptr(), columns, depth, packed.data_ptr())
        return Weight(packed, columns, depth)

    def embed(self, token_ids: Tensor, table: Weight) -> Tensor:
        out = table.data.new_empty(len(token_ids), table.depth)
        code = DTYPE_TO_CODE[out.dtype]
        self._library.baton_unpack_rows(
            code, table.data.data_ptr(), token_ids.data_ptr(), len(token_ids), table.depth, out.data_ptr()
        )
        return out

    def rms_norm(self, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(states)
        code, (num_rows, columns) = DTYPE_TO_CODE[states.dtype], states.shape
        self._library.baton_rms_norm(code, states.data_ptr(), weight.data_ptr(), eps, num_rows, columns, out.data_ptr())
        return out

    def linear(self, states: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
        out = states.new_empty(len(states), weight.columns)
        self._library.baton_linear(
            DTYPE_TO_CODE[states.dtype], states.data_ptr(), weight.data.data_ptr(), _address(bias), _address(residual),
            out.data_ptr(), len(states), weight.columns, weight.depth,
        )  # fmt: skip
        return out

    def logits(self, states: Tensor, weight: Weight) -> Tensor:
        out = states.new_empty(len(states), weight.columns, dtype=torch.float32)
        self._library.baton_linear_to_float(
            DTYPE_TO_CODE[states.dtype], states.data_ptr(), weight.data.data_ptr(),
            out.data_ptr(), len(states), weight.columns, weight.depth,
        )  # fmt: skip
        return out

    def rotate_and_write(
        self, qkv: Tensor, heads: Heads, angles: Angles, kv_layer: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        self._library.baton_rotate_and_write(
            DTYPE_TO_CODE[qkv.dtype], qkv.data_ptr(),
            _address(heads.query_norm), _address(heads.key_norm), heads.norm_eps,
            angles.cosines.data_ptr(), angles.sines.data_ptr(),
            len(qkv), heads.num_queries, heads.num_kv, heads.size,
            kv_layer.data_ptr(), *kv_layer.stride()[:3], kv_layer.shape[3], slot_mapping.data_ptr(),
        )  # fmt: skip
        return qkv.view(len(qkv), -1, heads.size)[:, : heads.num_queries]

    def attend(self, query: Tensor, kv_layer: Tensor, tables: Tables, scale: float, window: int | None) -> Tensor:
        out = query.new_empty(query.shape)
        _, num_heads, head_size = query.shape
        self._library.baton_attention(
            DTYPE_TO_CODE[query.dtype], query.data_ptr(), query.stride(0),
            kv_layer.data_ptr(), *kv_layer.stride()[:3], kv_layer.shape[3],
            tables.block_tables.data_ptr(), tables.block_tables.stride(0),
            tables.context_lens.data_ptr(), tables.cu_query_lens.data_ptr(),
            len(tables.context_lens), tables.num_decodes,
            num_heads, kv_layer.shape[2], head_size, scale, window or 0, out.data_ptr(),
        )  # fmt: skip
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        num_rows, columns = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(num_rows, columns)
        self._library.baton_gate(DTYPE_TO_CODE[out.dtype], gate_up.data_ptr(), num_rows, columns, out.data_ptr())
        return out


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
