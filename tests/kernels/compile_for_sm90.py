"""Compiles every kernel for sm_90 with no device and prints a JSON list of what came out.

A script, as Triton's interpreter cannot be left again in a process that has entered it.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import kv_write, paged_decode

HOPPER = GPUTarget("cuda", 90, 32)
INT32_POINTERS = {"block_tables_ptr", "context_lens_ptr"}
FLOAT32_POINTERS = {"log_sum_ptr", "partial_ptr", "sinks_ptr"}
ALIGNED = [["tt.divisibility", 16]]


def argument_type(name: str, dtype: str) -> str:
    if name == "slot_mapping_ptr":
        return "*i64"
    if name in INT32_POINTERS:
        return "*i32"
    if name in FLOAT32_POINTERS:
        return "*fp32"
    if name.endswith("_ptr"):
        return f"*{dtype}"
    return "fp32" if name.startswith("log2_") else "i32"


def compile_kernel(kernel: Any, dtype: str, options: dict[str, Any], **constants: int | None) -> dict[str, Any]:
    """Compiles as a launch would with pointers and strides that are multiples of 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else argument_type(name, dtype) for name in names}
    aligned = [index for index, name in enumerate(names) if name.endswith(("_ptr", "_stride"))]
    source = ASTSource(kernel, signature, constexprs=constants, attrs={(index,): ALIGNED for index in aligned})
    compiled = triton.compile(source, target=HOPPER, options=options)
    return {
        "kernel": kernel.__name__,
        "dtype": dtype,
        "head_dim": constants["HEAD_DIM"],
        "ptx": compiled.asm["ptx"],
        "cubin_bytes": len(compiled.asm["cubin"]),
        "shared_bytes": compiled.metadata.shared,
    }


def compile_all(dtype: str, head_dim: int) -> Iterator[dict[str, Any]]:
    size = {"HEAD_DIM": head_dim, "PADDED_DIM": triton.next_power_of_2(head_dim)}
    group = {"GROUP_SIZE": 4, "PADDED_GROUP": paged_decode.MIN_DOT_ROWS}
    tile = {"BLOCK_SIZE": 16, "TILE": paged_decode.TILE_LEN}
    heads = {"NUM_KV_HEADS": 8, "PADDED_HEADS": 8}
    decode_options = paged_decode.LAUNCH_OPTIONS
    yield compile_kernel(kv_write.write_token, dtype, kv_write.LAUNCH_OPTIONS, **size, **heads, BLOCK_SIZE=16)
    for absent in ({"sinks_ptr": None, "log2_soft_cap": None}, {}):
        yield compile_kernel(paged_decode.attend_split, dtype, decode_options, **size, **group, **tile, **absent)
    yield compile_kernel(
        paged_decode.merge_splits, dtype, decode_options, **size, PADDED_SPLITS=paged_decode.MAX_SPLITS
    )


if __name__ == "__main__":
    cases = [("bf16", 128), ("fp16", 80), ("fp32", 128)]
    json.dump([compiled for case in cases for compiled in compile_all(*case)], sys.stdout)
