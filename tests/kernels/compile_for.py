"""Compiles kernels for architectures with no device, and reads what the compilers say of registers and memory.

A script, as Triton's interpreter cannot be left again in a process that has entered it. Prints a JSON list. Its
arguments are cases: an architecture, a role and a kind of kernels/tiles.toml, a size of heads or of codes, and a dtype,
as in sm_90:decode:plain:128:bf16, sm_90:products:few:4:bf16 and,
with a number of splits, sm_90:ordered:few:2:bf16. The role `rows`, with the kind `all`, stands for the
kernels beside attention.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import checksums, row_operations
from kernels.attention import decode, int4_pages, paged
from kernels.attention.prompts import tokens_of
from kernels.backend import Activation
from kernels.cpu.checksums import CHUNK_WORDS, PIECE_CHUNKS, ROW_WORDS
from kernels.products import experts, ordered
from kernels.quantized import products
from kernels.quantized.codebook import Codebook
from kernels.tiles import (
    KIND_TO_ROWS,
    ORDERED,
    PRODUCTS,
    OrderedTile,
    Role,
    Tile,
    find_ordered_tile,
    find_product_tile,
    find_tile,
)

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FIRST_WITH_FP8 = GPUTarget("cuda", 89, 32)
"""Of those with the rows of sm_80, which itself is refused fp8."""
WITH_DEPENDENT_LAUNCHES = ("sm_90",)
TYPES = {
    **dict.fromkeys(("slot_mapping_ptr", "table_ptr", "order_ptr", "tiles_ptr", "tokens_ptr"), "*i64"),
    "log2_scale": "fp32",
    "log2_soft_cap": "fp32",
    "eps": "fp32",
    **dict.fromkeys(("block_tables_ptr", "context_lens_ptr", "cu_query_lens_ptr", "page_to_open_ptr"), "*i32"),
    **dict.fromkeys(
        ("log_sum_ptr", "partial_ptr", "sinks_ptr", "cosines_ptr", "sines_ptr", "shares_ptr", "logits_ptr"), "*fp32"
    ),
    **dict.fromkeys(("scales_ptr", "key_scales_ptr", "value_scales_ptr"), "*bf16"),
    "codes_ptr": "*u8",
}
TYPES_OF_PRODUCTS = {"codes_ptr": "*i32", "rest_ptr": "*i16", "scales_ptr": "*i32", "factors_ptr": "*i32"}
TYPES_OF_SUMS = {"partial_ptr": "*fp32", "counters_ptr": "*i32"}
TYPES_OF_PRODUCTS |= {"ids_ptr": "*i64", "partial_ptr": "*fp32"}
PLAIN = {
    "ZERO": 0,
    "NUMBERS": None,
    "IS_FLOAT": False,
    "HAS_OFFSETS": False,
    "IS_HALVED": False,
    "SCALE": tl.float16,
    "SOURCE": tl.float32,
}
FORMATS: dict[str, dict[str, Any]] = {
    "Q4_K": {"BITS": 4, "PLANES": 4, "BLOCK": 256, "HAS_OFFSETS": True},
    "Q5_K": {"BITS": 5, "PLANES": 8, "BLOCK": 256, "HAS_OFFSETS": True},
    "Q6_K": {"BITS": 6, "PLANES": 4, "BLOCK": 256, "ZERO": 32, "IS_HALVED": True},
    "Q8_0": {"BITS": 8, "PLANES": 2, "BLOCK": 32},
    "MXFP4": {"BITS": 4, "PLANES": 4, "BLOCK": 32, "IS_FLOAT": True, "SCALE": tl.bfloat16},
    "IQ4_NL": {"BITS": 4, "PLANES": 4, "BLOCK": 32, "NUMBERS": Codebook.IQ4_NL.halves},
    "FP8": {"BITS": 8, "PLANES": 2, "BLOCK": 128, "IS_FLOAT": True, "SCALE": tl.bfloat16, "SOURCE": tl.bfloat16},
}
"""The formats that products are compiled for; the first three have factors."""
OF_FEW_ROWS = ("IQ4_NL",)
"""Formats compiled with the tile of few rows alone: they spill a few bytes in larger ones."""
WITH_FACTORS = ("Q4_K", "Q5_K", "Q6_K")
OF_INT4 = ("key_scales_ptr", "value_scales_ptr", "open_ptr", "page_to_open_ptr")
OF_VARIANTS = ("sinks_ptr", "log2_soft_cap", "turned_ptr")
ABSENT = {
    "plain": ("scales_ptr", *OF_INT4, *OF_VARIANTS),
    "float32": ("scales_ptr", *OF_INT4, *OF_VARIANTS),
    "sinks": ("scales_ptr", *OF_INT4),
    "int8": (*OF_INT4, *OF_VARIANTS),
    "fp8": (*OF_INT4, *OF_VARIANTS),
    "int4": ("scales_ptr", *OF_VARIANTS),
}
"""The arguments that are None, by the table's kind."""
CODES = {"int8": "*i8", "fp8": "*fp8e4nv", "int4": "*u8"}
ALIGNED = [["tt.divisibility", 16]]
GROUP_SIZE, BLOCK_SIZE = 4, 16
INSTRUCTION_DEPTH = re.compile(r"(?:\bmma\.sync|wgmma\.mma_async)\S*?\.m\d+n\d+k(\d+)")
MATRIX_INSTRUCTION = re.compile(r"\bmma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma_\w+")
WAIT_OR_ACCESS = re.compile(r"(griddepcontrol\.wait)|\b(?:ld|st)\.global|\bcp\.async|\b(?:atom|red)\.")
WIDE_LOAD = re.compile(
    r"cp\.async\.bulk\.tensor"
    r"|cp\.async\.cg\.shared\.global \[.*0x10|ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64|_load_dwordx4"
)


@dataclass(frozen=True)
class Compiled:
    """What came out: registers of a thread, in AMD's devices those of products too, bytes of spills and memory.

    waits_first: before it touches memory, for earlier kernels.
    instructions_per_weight: of the loop of products with packed weights on NVIDIA's devices, for each weight of a
    thread; else 0.
    """

    architecture: str
    kernel: str
    head_dim: int
    dtype: str
    num_warps: int
    registers: int
    spilled: int
    shared_bytes: int
    matrix_instructions: list[str]
    has_wide_loads: bool
    instructions_per_weight: float
    instruction_depths: list[str]
    waits_first: bool


def compile_kernel(
    architecture: str,
    kernel: Any,
    name: str,
    dtype: str,
    options: dict[str, Any],
    pages: str | None = None,
    types: dict[str, str] = TYPES,
    **constants: Any,
) -> Compiled:
    """Compiles as a launch would with pointers and strides that are multiples of 16.

    pages: the type of `kv_ptr`; None for the dtype. types: of other arguments.
    """
    names = kernel.arg_names
    types = types | ({"kv_ptr": pages} if pages else {})
    signature = {
        one: "constexpr" if one in constants else types.get(one, f"*{dtype}" if one.endswith("_ptr") else "i32")
        for one in names
    }
    endings = ("_ptr", "_stride", "num_columns", "depth")
    aligned = [index for index, one in enumerate(names) if signature[one][0] == "*" or one.endswith(endings)]
    source = ASTSource(kernel, signature, constexprs=constants, attrs={(index,): ALIGNED for index in aligned})
    if architecture in WITH_DEPENDENT_LAUNCHES and kernel not in (checksums.sum_pieces, products.multiply):
        options = options | {"launch_pdl": True}
    target = FIRST_WITH_FP8 if (architecture, pages) == ("sm_80", CODES["fp8"]) else TARGETS[architecture]
    compiled = triton.compile(source, target=target, options=options)
    if "cubin" in compiled.asm:
        text, (registers, spilled) = compiled.asm["ptx"], usage_of_cubin(compiled.asm["cubin"])
        counts = name.startswith(PRODUCTS)
        num_instructions = count_loop(inspect_cubin(compiled.asm["cubin"], "-sass")) if counts else 0
    else:
        text = compiled.asm["amdgcn"]
        (registers, spilled), num_instructions = usage_of_assembly(text), 0
    return Compiled(
        architecture,
        name,
        constants.get("HEAD_DIM", 0),
        dtype,
        compiled.metadata.num_warps,
        registers,
        spilled,
        compiled.metadata.shared,
        sorted(set(MATRIX_INSTRUCTION.findall(text))),
        bool(WIDE_LOAD.search(text)),
        num_instructions,
        sorted(set(INSTRUCTION_DEPTH.findall(text))),
        any(WAIT_OR_ACCESS.findall(text)[:1]),
    )


def usage_of_cubin(cubin: bytes) -> tuple[int, int]:
    """Reads the registers of a thread, and the bytes of its stack, where spilled ones go."""
    found = dict(re.findall(r"\b(REG|STACK):(\d+)", inspect_cubin(cubin, "-res-usage")))
    return int(found["REG"]), int(found["STACK"])


def inspect_cubin(cubin: bytes, question: str) -> str:
    """Asks cuobjdump about a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, question, file.name]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def count_loop(text: str) -> int:
    """Counts the instructions of the shortest loop that has matrix instructions."""
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", text, re.MULTILINE)
    place_to_line = {int(place, 16): line for place, line in found}
    loops = []
    for place, line in place_to_line.items():
        if target := re.search(r"\bBRA\b.*?0x([0-9a-f]+)", line):
            own = [one for where, one in place_to_line.items() if int(target[1], 16) <= where <= place]
            if any("MMA" in one for one in own):
                loops.append(len(own))
    return min(loops)


def usage_of_assembly(text: str) -> tuple[int, int]:
    """Reads the vector registers of a lane, and its spilled ones and bytes of scratch memory.

    Scalar registers that are spilled go to lanes of vector registers while there is no scratch memory.
    """
    found = {name: int(one) for name, one in re.findall(r"^\s*\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    spilled = found["vgpr_spill_count"] + found["private_segment_fixed_size"]
    return found["vgpr_count"], spilled


def compile_attention(
    architecture: str, role: Role, kind: str, head_dim: int, dtype: str, tile: Tile | None = None
) -> Compiled:
    """Compiles attention at the size of a launch: with the table's tile, unless one is given."""
    tile = tile or find_tile(architecture, role, kind, head_dim)
    tokens = 1 if role == "decode" else tokens_of(tile, GROUP_SIZE, BLOCK_SIZE if kind == "int4" else None)
    constants: dict[str, Any] = dict.fromkeys(ABSENT[kind])
    constants["cu_query_lens_ptr" if role == "decode" else "log_sum_ptr"] = None
    constants |= {"GROUP_SIZE": GROUP_SIZE, "BLOCK_SIZE": BLOCK_SIZE, "TOKENS": tokens, "ROWS": tile.rows}
    constants |= {"KEYS": tile.width, "HEAD_DIM": head_dim, "PADDED_DIM": triton.next_power_of_2(head_dim)}
    constants |= {"MAX_SPLITS": paged.MAX_SPLITS, "MIN_SPLIT_LEN": paged.MIN_SPLIT_LEN}
    constants["BY_INTEGERS"] = role == "decode" and architecture.startswith("sm") and dtype == "bf16"
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **paged.FUSING}
    name = f"{role} {kind}"
    return compile_kernel(architecture, paged.attend, name, dtype, options, CODES.get(kind), **constants)


def compile_products(
    architecture: str, kind: str, bits: int, dtype: str, tile: Tile | None = None
) -> Iterator[Compiled]:
    """Compiles products at the size of a launch, in each format of these bits; the table's tile is the default."""
    tile = tile or find_product_tile(architecture, kind, bits)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **products_options(architecture)}
    for name in FORMATS:
        constants = constants_of(name) | {"ROWS": tile.rows, "COLUMNS": tile.width}
        if constants["BITS"] == bits and (kind == "few" or name not in OF_FEW_ROWS):
            label = f"{PRODUCTS} {kind} {name}"
            one = compile_kernel(
                architecture, products.multiply, label, dtype, options, None, TYPES_OF_PRODUCTS, **constants
            )
            weights_of_a_thread = tile.width * constants["PLANES"] / tile.num_warps
            yield replace(one, instructions_per_weight=one.instructions_per_weight / weights_of_a_thread)


def compile_ordered(
    architecture: str,
    kind: str,
    num_splits: int,
    dtype: str,
    tile: OrderedTile | None = None,
    activation: Activation | None = None,
) -> Compiled:
    """Compiles products of one order: splits of few rows in a program each, of many in one program.

    Splits that another launch adds are compiled with a bias and a residual, which they have not.
    """
    tile = tile or find_ordered_tile(architecture, kind, num_splits)
    most_rows = KIND_TO_ROWS.get(kind, ordered.MAX_SPLIT_ROWS + 1)
    counts, is_alone = (
        num_splits > 1 and most_rows <= ordered.MAX_COUNTED_ROWS,
        num_splits == 1 or most_rows <= ordered.MAX_SPLIT_ROWS,
    )
    is_described = architecture in ordered.WITH_DESCRIPTORS and dtype != "fp32"
    operands = ("states", tile.rows), ("weights", tile.columns)
    types = TYPES_OF_SUMS | {
        name: f"tensordesc<{dtype}[{rows}, {tile.step}]>" if is_described else f"*{dtype}" for name, rows in operands
    }
    constants: dict[str, Any] = {} if counts else {"partial_ptr": None, "counters_ptr": None}
    constants |= {
        "IS_ALONE": is_alone,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "STEP": tile.step,
    }
    constants |= {"GROUP": ordered.ROWS_AT_ONCE, "IS_TURNED": tile.is_turned, "IS_DESCRIBED": is_described}
    constants["ACTIVATION"] = None if activation is None else activation.value
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **products_options(architecture)}
    name = f"{ORDERED} {kind} {num_splits}" + ("" if activation is None else f" {activation.name}")
    return compile_kernel(architecture, ordered.multiply_in_order, name, dtype, options, None, types, **constants)


def constants_of(name: str) -> dict[str, Any]:
    """Lists the constants of a format, with None for the tables that it lacks."""
    constants = PLAIN | FORMATS[name]
    absent = [] if constants["BITS"] in (5, 6) else ["rest_ptr"]
    return constants | dict.fromkeys([*absent, *([] if name in WITH_FACTORS else ["factors_ptr"])])


def products_options(architecture: str) -> dict[str, Any]:
    return {"enable_fp_fusion": True} | ({"matrix_instr_nonkdim": 16} if architecture == "gfx942" else {})


def compile_rows(architecture: str, head_dim: int, dtype: str) -> Iterator[Compiled]:
    """Compiles the kernels beside attention."""

    def compiled(
        kernel: Any, name: str, options: dict[str, Any], pages: str | None = None, **constants: Any
    ) -> Compiled:
        return compile_kernel(architecture, kernel, name, dtype, options, pages, **constants)

    half = triton.next_power_of_2(head_dim // 2)
    close, rows = int4_pages.LAUNCH_OPTIONS, row_operations.OPTIONS
    block: dict[str, Any] = {"BLOCK_SIZE": BLOCK_SIZE, "PADDED_BLOCK": BLOCK_SIZE, "PADDED_HALF": half}
    of_sums: dict[str, Any] = {"CHUNK_WORDS": CHUNK_WORDS, "PIECE_CHUNKS": PIECE_CHUNKS, "MOST_CHUNKS": PIECE_CHUNKS}
    of_sums |= {
        "ROW_WORDS": ROW_WORDS,
        "PAGE_WORDS": 46080,
        "CHUNKS": checksums.CHUNKS_AT_ONCE,
    }  # of a page of 135M, whose last piece is short
    types = dict.fromkeys(("pages_ptr", "sums_ptr"), "*i64") | dict.fromkeys(("chosen_ptr", "keys_ptr"), "*i32")
    kernel, options = checksums.sum_pieces, checksums.OPTIONS
    yield compile_kernel(architecture, kernel, "sum_pieces", dtype, options, None, types, **of_sums)
    yield compiled(int4_pages.close_block, "close_block", close, HEAD_DIM=head_dim, **block)
    yield compiled(row_operations.normalize, "normalize", rows, PADDED_COLUMNS=4096)
    yield compiled(row_operations.gate_rows, "gate_rows", rows, COLUMNS=1024, ACTIVATION=2)
    columns, wide = row_operations.LIKELIEST_AT_ONCE, rows | {"num_warps": 16}
    yield compiled(row_operations.find_likeliest, "find_likeliest", wide, COLUMNS=columns)
    products_of_experts = {"num_warps": 4, **products_options(architecture)}
    tile: dict[str, Any] = {"ROWS": experts.MANY_ROWS, "COLUMNS": experts.COLUMNS, "DEPTH": experts.DEPTH}
    yield compiled(experts.multiply_by_expert, "multiply_by_expert", products_of_experts, **tile)
    yield compiled(experts.combine_rows, "combine_rows", rows, COLUMNS=experts.COMBINED_AT_ONCE)
    shape = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEADS": row_operations.HEADS_AT_ONCE, "BLOCK_SIZE": BLOCK_SIZE}
    shape |= {"HEAD_DIM": head_dim, "PADDED_HALF": half}
    for name, pages, absent in (("", None, ("scales_ptr",)), (" of int8", "*i8", ())):
        constants: dict[str, Any] = dict.fromkeys(("query_norm_ptr", "key_norm_ptr", "page_to_open_ptr", *absent))
        constants |= {"LARGEST": 127.0, **shape}
        kernel = row_operations.rotate_and_write_heads
        yield compiled(kernel, f"rotate_and_write_heads{name}", rows, pages, **constants)
    splits: dict[str, Any] = {"MAX_SPLITS": paged.MAX_SPLITS, "MIN_SPLIT_LEN": paged.MIN_SPLIT_LEN}
    padded = triton.next_power_of_2(head_dim)
    widening = {"num_warps": 1, **products_options(architecture)}
    merging = {"num_warps": 4, **products_options(architecture)}
    formats, types = constants_of("Q5_K") | {"ROWS": products.WIDENED_AT_ONCE}, TYPES_OF_PRODUCTS
    yield compile_kernel(architecture, products.widen_rows, "widen_rows", dtype, widening, None, types, **formats)
    at_once = {"COLUMNS": products.MERGED_AT_ONCE}
    yield compile_kernel(architecture, products.add_splits, "add_splits", dtype, merging, None, types, **at_once)
    yield compiled(decode.merge_splits, "merge_splits", rows, HEAD_DIM=head_dim, PADDED_DIM=padded, **splits)


def compile_case(case: str) -> Iterator[Compiled]:
    """Compiles what an argument names."""
    architecture, role, kind, head_dim, dtype = case.split(":")
    if role in get_args(Role):
        yield compile_attention(architecture, role, kind, int(head_dim), dtype)  # type: ignore[arg-type]
    elif role == ORDERED:
        yield compile_ordered(architecture, kind, int(head_dim), dtype)
        if head_dim == "1":
            yield compile_ordered(architecture, kind, 1, dtype, activation=Activation.SILU)
    elif role == PRODUCTS:
        yield from compile_products(architecture, kind, int(head_dim), dtype)
    else:
        yield from compile_rows(architecture, int(head_dim), dtype)


if __name__ == "__main__":
    json.dump([asdict(one) for case in sys.argv[1:] for one in compile_case(case)], sys.stdout)
