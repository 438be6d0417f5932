"""Compiles a noted signature in a child, for a target without a device, then in this process, and looks at the cache.

A script, as Triton's interpreter cannot be left again in a process that has entered it. TRITON_CACHE_DIR names the
cache. Prints a JSON object.
"""

import json
import sys
from pathlib import Path

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from engine.warm.compiling import Compilations, Compilers, Launches
from kernels import row_operations
from kernels.backend import Activation
from kernels.cpu.library import NoKernels
from tests.kernels.no_device import NoDevice


def listed() -> list[str]:
    """Lists the files of the cache, with their times."""
    return sorted(f"{path.name} {path.stat().st_mtime_ns}" for path in Path(knobs.cache.dir).rglob("*"))


def main() -> None:
    driver.set_active(NoDevice(GPUTarget("cuda", 90, 32)))
    launches = Launches()

    def launch() -> None:
        row_operations.gate(torch.empty(3, 64, dtype=torch.bfloat16), Activation.SILU)

    with launches.noting():
        launch()
        launch()
    signatures = [*launches.signatures]
    try:
        Compilers().compile(signatures)
    except NoKernels as error:
        json.dump({"error": str(error)}, sys.stdout)
        return
    compiled = listed()
    Compilers(command=("false",)).compile(signatures)
    late = Compilations()
    try:
        launch()  # finds the compiled kernel, and no device to run it
    except (AttributeError, RuntimeError) as error:
        stopped = str(error)
    after = listed()
    told = {"noted": len(signatures), "compiled": compiled, "after": after, "late": late.num, "stopped": stopped}
    json.dump(told | {"names": [one.name for one in signatures]}, sys.stdout)


if __name__ == "__main__":
    main()
