"""Compiles candidates of benchmarks/gpu_codes.py for a device that is not there; prints what the compiler says as JSON.

A script, as Triton's interpreter cannot be left again in a process that has entered it.
"""

import json
import sys
from dataclasses import asdict, replace

import torch

from benchmarks.gpu_code_times import ASKED_TO_TILES
from benchmarks.gpu_codes import CodesTile, multiply_codes, write_reads
from kernels.quantized.device_layout import pack
from kernels.tiles import PRODUCTS
from tests.kernels.compile_for import (
    TYPES_OF_PRODUCTS,
    TYPES_OF_SUMS,
    Compiled,
    compile_kernel,
    constants_of,
    products_options,
)
from tests.kernels.quantized_matrices import DRAWS


def compile_tile(name: str, tile: CodesTile) -> Compiled:
    """Compiles a tile for sm_90; counts the instructions of the loop for each weight of a thread."""
    [part] = pack([DRAWS[name](1, 512)], torch.bfloat16).parts
    constants = constants_of(name) | {"ROWS": tile.rows, "COLUMNS": tile.columns, "STAGES": tile.num_stages}
    constants |= {"IS_WIDENED": tile.is_widened, "READS": None if tile.is_widened else write_reads(part.format)}
    types = TYPES_OF_PRODUCTS | TYPES_OF_SUMS | ({} if tile.is_widened else {"codes_ptr": "*i16"})
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **products_options("sm_90")}
    label = f"{PRODUCTS} {name}"
    compiled = compile_kernel("sm_90", multiply_codes, label, "bf16", options, None, types, **constants)
    weights_of_a_thread = tile.columns * part.format.planes / tile.num_warps
    return replace(compiled, instructions_per_weight=compiled.instructions_per_weight / weights_of_a_thread)


if __name__ == "__main__":
    asked = {(key.split()[0], numbers) for key, tiles in ASKED_TO_TILES.items() for numbers in tiles}
    compiled = {f"{name} {numbers}": asdict(compile_tile(name, CodesTile(*numbers))) for name, numbers in sorted(asked)}
    json.dump(compiled, sys.stdout)
