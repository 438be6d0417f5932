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

from kernels import int4, kv_write, paged_decode

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    "slot_mapping_ptr": "*i64",
    "log2_scale": "fp32",
    "log2_soft_cap": "fp32",
    **dict.fromkeys(("block_tables_ptr", "context_lens_ptr", "page_to_open_ptr"), "*i32"),
    **dict.fromkeys(("log_sum_ptr", "partial_ptr", "sinks_ptr"), "*fp32"),
    **dict.fromkeys(("scales_ptr", "key_scales_ptr", "value_scales_ptr"), "*bf16"),
    "codes_ptr": "*u8",
}
OF_INT4 = ("key_scales_ptr", "value_scales_ptr", "open_ptr", "page_to_open_ptr")
OF_VARIANTS = ("sinks_ptr", "log2_soft_cap", "turned_ptr")
ATTENTION = {
    "attend_split": ("scales_ptr", *OF_INT4, *OF_VARIANTS),
    "attend_split with sinks and a cap": ("scales_ptr", *OF_INT4),
    "attend_split over int8": (*OF_INT4, *OF_VARIANTS),
    "attend_split over int4": ("scales_ptr", *OF_VARIANTS),
}
"""The arguments that are None, by the name of what comes out."""
CODES = {"attend_split over int8": "*i8", "attend_split over int4": "*u8"}
ALIGNED = [["tt.divisibility", 16]]


def argument_type(name: str, dtype: str) -> str:
    return TYPES.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")


def compile_kernel(
    kernel: Any, name: str, dtype: str, options: dict[str, Any], pages: str | None, **constants: Any
) -> dict[str, Any]:
    """Compiles as a launch would with pointers and strides that are multiples of 16.

    pages: the type of `kv_ptr`; None for the dtype.
    """
    names = kernel.arg_names
    signature = {one: "constexpr" if one in constants else argument_type(one, dtype) for one in names}
    if pages:
        signature["kv_ptr"] = pages
    aligned = [index for index, one in enumerate(names) if one.endswith(("_ptr", "_stride"))]
    source = ASTSource(kernel, signature, constexprs=constants, attrs={(index,): ALIGNED for index in aligned})
    compiled = triton.compile(source, target=HOPPER, options=options)
    return {
        "kernel": name,
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
    block = {"BLOCK_SIZE": 16, "PADDED_BLOCK": 16, "PADDED_HALF": triton.next_power_of_2(head_dim // 2)}
    write, close, splits = kv_write.LAUNCH_OPTIONS, int4.LAUNCH_OPTIONS, {"PADDED_SPLITS": paged_decode.MAX_SPLITS}
    yield compile_kernel(kv_write.write_token, "write_token", dtype, write, None, **size, **heads, BLOCK_SIZE=16)
    yield compile_kernel(int4.close_block, "close_block", dtype, close, None, HEAD_DIM=head_dim, **block)
    for name, absent in ATTENTION.items():
        none, pages = dict.fromkeys(absent), CODES.get(name)
        yield compile_kernel(
            paged_decode.attend_split, name, dtype, decode_options, pages, **size, **group, **tile, **none
        )
    yield compile_kernel(paged_decode.merge_splits, "merge_splits", dtype, decode_options, None, **size, **splits)


if __name__ == "__main__":
    cases = [("bf16", 128), ("fp16", 80), ("fp32", 128)]
    json.dump([compiled for case in cases for compiled in compile_all(*case)], sys.stdout)
