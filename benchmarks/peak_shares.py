"""The most of a device's peak that attention kernels can reach, by arithmetic on compiled kernels: no device is asked.

    python benchmarks/peak_shares.py

Kernels are compiled at the sizes of launches (kernels/tiles.toml, bfloat16, heads of 128, four query heads a KV
head). Registers and shared memory say how many programs a processor holds. Decoding waits for memory: by Little's law
the bytes under way, over bandwidth times latency, are the share of bandwidth. Prompts multiply: an iteration takes
the time of its products and of its exponentials, one after the other where a processor holds one program, and the
share is that of the products. Their KV is left out: most of it comes from caches, whose rates no data sheet has.
Bandwidths, rates and clocks are of the makers' data sheets; 800 ns of latency under load is an assumption.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.result_file import write_result
from kernels.tiles import Role, Tile, find_tile

LATENCY_S = 800e-9
HEAD_DIM, GROUP_SIZE = 128, 4
KIND_TO_BYTES = {"plain": 2.0, "sinks": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}
"""Bytes of an element of KV, scales left out."""


@dataclass(frozen=True)
class Device:
    """A device's data sheet. exps: exponentials of a processor in a cycle. lanes: threads of a warp."""

    name: str
    architecture: str
    num_processors: int
    bytes_s: float
    flops: float
    clock_hz: float
    registers: int
    shared_bytes: int
    exps: int = 16
    lanes: int = 32


DEVICES = (
    Device("A100 SXM 80 GB", "sm_80", 108, 2.039e12, 312e12, 1.41e9, 1 << 16, 164 << 10),
    Device("H100 SXM", "sm_90", 132, 3.35e12, 989e12, 1.83e9, 1 << 16, 228 << 10),
    Device("B200", "sm_100", 148, 8.0e12, 2250e12, 1.85e9, 1 << 16, 228 << 10),
    Device("MI300X", "gfx942", 304, 5.3e12, 1307e12, 2.1e9, 1 << 17, 64 << 10, lanes=64),
)


def programs_at_once(device: Device, kernel: dict[str, Any]) -> int:
    """Counts the programs of a compiled kernel that a processor holds, by registers and shared memory."""
    by_registers = device.registers // (kernel["registers"] * kernel["num_warps"] * device.lanes)
    return int(min(by_registers, device.shared_bytes // max(kernel["shared_bytes"], 1)))


def share_of_bandwidth(device: Device, tile: Tile, num_programs: int, element_bytes: float) -> float:
    """The bytes that a processor's programs have under way, over what the bandwidth wants, at most 1."""
    stage_bytes = tile.width * 2 * HEAD_DIM * element_bytes
    under_way = num_programs * tile.num_stages * stage_bytes * device.num_processors
    return min(1.0, under_way / (device.bytes_s * LATENCY_S))


def share_of_products(device: Device, tile: Tile, num_programs: int) -> float:
    """The time of an iteration's products over that with its exponentials; several programs overlap them at best."""
    products_s = 4 * tile.rows * tile.width * HEAD_DIM * device.num_processors / device.flops
    exps_s = tile.rows * tile.width / (device.exps * device.clock_hz)
    return products_s / (products_s + exps_s if num_programs == 1 else max(products_s, exps_s))


def compile_all(architecture: str) -> dict[str, dict[str, Any]]:
    """Compiles the kernels of an architecture in a process of its own; by name."""
    roles: tuple[Role, ...] = ("decode", "prompts")
    kinds = [kind for kind in KIND_TO_BYTES if (architecture, kind) != ("sm_80", "fp8")]
    cases = [f"{architecture}:{role}:{kind}:{HEAD_DIM}:bf16" for role in roles for kind in kinds]
    script = str(ROOT / "tests" / "kernels" / "compile_for.py")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script, *cases], env=env, stdout=subprocess.PIPE, check=True, timeout=3600)
    return {one["kernel"]: one for one in json.loads(done.stdout)}


def figures_of(device: Device) -> dict[str, str]:
    """Makes a row for each kernel of a device: programs at once, and the share of its bound."""
    rows = {}
    for name, kernel in compile_all(device.architecture).items():
        role, kind = name.split()
        tile = find_tile(device.architecture, "decode" if role == "decode" else "prompts", kind, HEAD_DIM)
        num_programs = programs_at_once(device, kernel)
        if role == "decode":
            share = share_of_bandwidth(device, tile, num_programs, KIND_TO_BYTES[kind])
            rows[f"{device.name}, {name}"] = f"{num_programs} at once, {share:.2f} of {device.bytes_s / 1e12:.2f} TB/s"
        else:
            share = share_of_products(device, tile, num_programs)
            rows[f"{device.name}, {name}"] = f"{num_programs} at once, {share:.2f} of {device.flops / 1e12:.0f} TFLOPS"
    return rows


def main() -> None:
    rows = {name: text for device in DEVICES for name, text in figures_of(device).items()}
    note = "arithmetic on compiled kernels and data sheets: nothing ran on a device, and a device may reach less"
    write_result("peak_shares", rows | {"kind": note}, rows)


if __name__ == "__main__":
    main()
