"""Compiles attention by warp groups for a device that is not there; prints machine code, spills and memory as JSON.

A script, as Triton's interpreter cannot be left again in a process that has entered it. A launch is noted as a worker's
warming notes it, and its signature compiled, for each row of the table.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from engine.warm.compiling import Launches
from kernels.attention import hopper
from kernels.tiles import GROUPS, GroupTile, read_table
from tests.kernels.compile_for import usage_of_cubin
from tests.kernels.no_device import NoDevice


@dataclass(frozen=True)
class Code:
    """What came out: signatures of prompts of several sizes, the code of one, and what a processor must hold."""

    num_signatures: int
    code: str
    spilled: int
    shared_bytes: int
    registers: list[str]


def compile_for_heads(head_dim: int, tile: GroupTile) -> Code:
    """Notes launches for steps of several sizes at Llama 3 8B's heads, and compiles the first one's signature."""
    launches = Launches()
    for num_seqs, num_rows, num_blocks in ((1, 1, 1), (1, 64, 64), (3, 1000, 100)):
        queries = torch.empty(num_rows, 48 * head_dim, dtype=torch.bfloat16)[:, : 32 * head_dim].view(-1, 32, head_dim)
        layer = torch.empty(num_blocks, 2, 2, 8, 16, head_dim, dtype=torch.bfloat16)[:, 1]
        tables = torch.zeros(num_seqs, num_blocks, dtype=torch.int32)
        lens, starts = torch.zeros(num_seqs, dtype=torch.int32), torch.zeros(num_seqs + 1, dtype=torch.int32)
        output = torch.empty(num_rows, 32, head_dim, dtype=torch.bfloat16)
        assert hopper.fits(queries, layer)
        with launches.noting():
            hopper.attend(tile, queries, layer, tables, lens, starts, output, 0.1, 0)
    compiled = next(iter(launches.signatures)).compile()
    _, spilled = usage_of_cubin(compiled.asm["cubin"])
    return Code(
        num_signatures=len(launches.signatures),
        code=disassemble(compiled.asm["cubin"]),
        spilled=spilled,
        shared_bytes=compiled.metadata.shared,
        registers=re.findall(r"setmaxnreg\S*\s+(\d+);", compiled.asm["ptx"]),
    )


def disassemble(cubin: bytes) -> str:
    """Lists a program's instructions as ptxas has ordered them, which is not the order of the PTX."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


if __name__ == "__main__":
    driver.set_active(NoDevice(GPUTarget("cuda", 90, 32)))
    [tiles] = read_table()["sm_90"][GROUPS].values()
    codes = {head_dim: compile_for_heads(int(head_dim), GroupTile(*numbers)) for head_dim, numbers in tiles.items()}
    json.dump({head_dim: asdict(code) for head_dim, code in codes.items()}, sys.stdout)
