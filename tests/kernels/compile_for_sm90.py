"""Compiles every kernel for sm_90 with no device and prints a JSON list of what came out.

A script, as Triton's interpreter cannot be left again in a process that has entered it. Its arguments are dtypes with
their head size, such as bf16:128.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import int4, paged_attention, row_operations
from kv_store.device_pool import view_pages
from wire.layout import KVLayout

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    "slot_mapping_ptr": "*i64",
    "log2_scale": "fp32",
    "log2_soft_cap": "fp32",
    "eps": "fp32",
    **dict.fromkeys(("block_tables_ptr", "context_lens_ptr", "cu_query_lens_ptr", "page_to_open_ptr"), "*i32"),
    **dict.fromkeys(("log_sum_ptr", "partial_ptr", "sinks_ptr", "cosines_ptr", "sines_ptr"), "*fp32"),
    **dict.fromkeys(("scales_ptr", "key_scales_ptr", "value_scales_ptr"), "*bf16"),
    "codes_ptr": "*u8",
}
OF_INT4 = ("key_scales_ptr", "value_scales_ptr", "open_ptr", "page_to_open_ptr")
OF_VARIANTS = ("sinks_ptr", "log2_soft_cap", "turned_ptr")
ATTENTION = {
    "": ("scales_ptr", *OF_INT4, *OF_VARIANTS),
    " with sinks and a cap": ("scales_ptr", *OF_INT4),
    " over int8": (*OF_INT4, *OF_VARIANTS),
    " over int4": ("scales_ptr", *OF_VARIANTS),
}
"""The arguments that are None, by the name of what comes out."""
CODES = {" over int8": "*i8", " over int4": "*u8"}
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
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
        "ptx": compiled.asm["ptx"],
        "cubin_bytes": len(compiled.asm["cubin"]),
        "shared_bytes": compiled.metadata.shared,
        **resources(compiled.asm["cubin"]),
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Reads the registers of a thread, and the bytes of its stack, where spilled ones go."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return {name.lower(): int(found) for name, found in re.findall(r"\b(REG|STACK):(\d+)", usage)}


def choose_tile(role: str, name: str, dtype: torch.dtype, head_dim: int) -> paged_attention.Tile:
    """Chooses the tile that a launch over pages of this kind has."""
    kept = {" over int8": "int8", " over int4": "int4"}.get(name, "none")
    layout = KVLayout(1, 1, head_dim, 16, str(dtype).removeprefix("torch."), kept)
    pages = view_pages(torch.zeros(1, layout.payload_bytes, dtype=torch.uint8), layout, 1).layer(0)
    if role == "decode":
        return paged_attention.decode_tile(pages)
    return paged_attention.prefill_tile(torch.zeros(1, 4, head_dim, dtype=dtype), pages, 4)


def compile_all(dtype: str, head_dim: int) -> Iterator[dict[str, Any]]:
    size = {"HEAD_DIM": head_dim, "PADDED_DIM": triton.next_power_of_2(head_dim)}
    splits = {"MAX_SPLITS": paged_attention.MAX_SPLITS, "MIN_SPLIT_LEN": paged_attention.MIN_SPLIT_LEN}
    block = {"BLOCK_SIZE": 16, "PADDED_BLOCK": 16, "PADDED_HALF": triton.next_power_of_2(head_dim // 2)}
    close, rows = int4.LAUNCH_OPTIONS, row_operations.OPTIONS
    yield compile_kernel(int4.close_block, "close_block", dtype, close, None, HEAD_DIM=head_dim, **block)
    yield compile_kernel(row_operations.normalize, "normalize", dtype, rows, None, PADDED_COLUMNS=4096)
    yield compile_kernel(row_operations.gate_rows, "gate_rows", dtype, rows, None, COLUMNS=1024)
    for name, pages in ((" of int8", "*i8"), ("", None)):
        unused: dict[str, Any] = dict.fromkeys(
            ("query_norm_ptr", "key_norm_ptr", "page_to_open_ptr", *(() if name else ("scales_ptr",)))
        )
        shape: dict[str, Any] = {
            "NUM_HEADS": 32,
            "NUM_KV_HEADS": 8,
            "HEADS": row_operations.HEADS_AT_ONCE,
            "BLOCK_SIZE": 16,
        }
        shape |= {"HEAD_DIM": head_dim, "PADDED_HALF": triton.next_power_of_2(head_dim // 2), "LARGEST": 127.0}
        kernel, what = row_operations.rotate_and_write_heads, f"rotate_and_write_heads{name}"
        yield compile_kernel(kernel, what, dtype, rows, pages, **shape, **unused)
    for role, (name, absent) in product(("decode", "prefill"), ATTENTION.items()):
        none = dict.fromkeys((*absent, "cu_query_lens_ptr" if role == "decode" else "log_sum_ptr"))
        tile, tokens = choose_tile(role, name, TORCH_DTYPES[dtype], head_dim), 1 if role == "decode" else 8
        shape = {"GROUP_SIZE": 4, "BLOCK_SIZE": 16, "TOKENS": tokens, "ROWS": tile.rows, "KEYS": tile.keys}
        constants = size | shape | splits | none
        yield compile_kernel(
            paged_attention.attend, f"{role}{name}", dtype, dict(tile.options), CODES.get(name), **constants
        )
    merging = {"KEYS": 64, **size, **splits}
    yield compile_kernel(paged_attention.merge_splits, "merge_splits", dtype, rows, None, **merging)


if __name__ == "__main__":
    cases = [(dtype, int(head_dim)) for dtype, _, head_dim in (case.partition(":") for case in sys.argv[1:])]
    json.dump(
        [one | {"head_dim": head_dim} for dtype, head_dim in cases for one in compile_all(dtype, head_dim)], sys.stdout
    )
