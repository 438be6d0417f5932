"""Programmatic dependent launch: a kernel starts while the one before it runs, and waits for its end by itself.

What a launch and the start of its programs take is then hidden. Each kernel waits before it touches memory, so that all
that earlier kernels wrote is there: the one before it has ended only after it has waited, too. A program that waits has
its part of a processor, which slows a kernel that needs all of them. Ordinary launches: `quantized.products.multiply`,
`hopper.attend_in_groups`, `checksums.sum_pieces`, and all of the library's.
Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from functools import cache
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

IS_ON = True
"""Whether launches are dependent. Benchmarks turn it off to compare."""


def dependent(options: dict[str, Any]) -> dict[str, Any]:
    """Adds to the options of a launch, where kernels are on, that it is a dependent one."""
    return options | {"launch_pdl": True} if IS_ON and is_possible() else options


@cache
def is_possible() -> bool:
    """Tells whether this machine's devices have dependent launches, and have run these: a Hopper, no interpreter."""
    target = None if knobs.runtime.interpret else driver.active.get_current_target()
    return target is not None and target.backend == "cuda" and target.arch == 90


def is_dependent(_semantic=None):
    """Tells a kernel that is compiled whether its launch's options make it a dependent one."""
    return tl.constexpr(_semantic is not None and getattr(_semantic.builder.options, "launch_pdl", False))


setattr(is_dependent, tl.core.TRITON_BUILTIN, True)


@triton.jit
def wait_for_earlier():
    """Waits until earlier kernels have ended; the next kernel may start once all programs of this kernel are here."""
    if is_dependent():
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
