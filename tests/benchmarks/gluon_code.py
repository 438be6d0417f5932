"""Compiles the candidates in Gluon for a device that is not there; prints machine code, spills and memory as JSON.

A script, as Triton's interpreter cannot be left again in a process that has entered it.
"""

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from benchmarks.gpu_candidates import GROUP_TILES
from benchmarks.gpu_gluon import REGISTERS, ROWS, GroupTile, attend_in_groups, constants_of
from tests.kernels.compile_for import usage_of_cubin

HEAD_DIM = 128


def compile_tile(tile: GroupTile) -> dict[str, Any]:
    """Compiles a tile for sm_90, at the heads of Llama 3 8B."""
    constants = constants_of(32, 8, HEAD_DIM, tile)
    rows = {"queries": (ROWS, "of_queries"), "keys": (tile.keys, "of_keys"), "values": (tile.keys, "of_keys")}
    signature: dict[str, str] = {
        name: f"tensordesc<bf16[{num_rows},{HEAD_DIM}],{constants[layout]!r}>"
        for name, (num_rows, layout) in rows.items()
    }
    signature |= {"output_ptr": "*bf16", "num_rows": "i32", "num_before": "i32", "log2_scale": "fp32"}
    signature |= dict.fromkeys(constants, "constexpr")
    source = GluonASTSource(attend_in_groups, signature, constants)
    options = {"num_warps": 4, "maxnreg": REGISTERS}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    _, spilled = usage_of_cubin(compiled.asm["cubin"])
    return {
        "code": disassemble(compiled.asm["cubin"]),
        "spilled": spilled,
        "shared_bytes": compiled.metadata.shared,
        "registers": re.findall(r"setmaxnreg\S*\s+(\d+);", compiled.asm["ptx"]),
    }


def disassemble(cubin: bytes) -> str:
    """Lists a program's instructions as ptxas has ordered them, which is not the order of the PTX."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


if __name__ == "__main__":
    json.dump({name: compile_tile(tile) for name, tile in GROUP_TILES.items()}, sys.stdout)
