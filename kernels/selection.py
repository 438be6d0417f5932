"""The selection of a backend by device and name."""

import logging
from contextlib import suppress
from functools import cache, partial

import torch

from kernels.accelerator import accelerator_of
from kernels.backend import TRITON_EXACT, Backend
from kernels.cpu.backend import CpuBackend, RoundingBackend
from kernels.cpu.library import REPRODUCIBLE, NoKernels, best_isa, reproducible_isa
from kernels.torch_backend import TorchBackend

logger = logging.getLogger(__name__)


@cache
def select_backend(device: torch.device, kernels: str = "auto") -> Backend:
    """Selects a backend by name: auto, for a GPU triton or triton-exact, for a CPU amx, avx512, avx2, portable, torch.

    `auto`, and for a GPU any other name, takes triton, or the best of amx, avx512, avx2 and portable that a CPU has;
    with a compiler that knows no AMX it has avx512, and without any torch, both with a warning. `reproducible` takes
    the best instruction set of a CPU that gives the bits of amx, by name alone. The suffixes -int8 and -int4
    (auto-int8) round weights, except for torch. The first use on a machine compiles a CPU's kernels, which takes
    seconds.
    Raises NoKernels for a named backend that cannot run and for devices without a backend, and the ImportError of
    `Accelerator.backend`.
    """
    isa, _, weights = kernels.partition("-")
    if weights and kernels != TRITON_EXACT and (device.type != "cpu" or isa == "torch"):
        raise NoKernels(f"{weights} weights need the C++ kernels of a CPU")
    if device.type != "cpu":
        return accelerator_of(device).backend(kernels)
    if kernels == "torch":
        return TorchBackend()
    make = partial(RoundingBackend, weights=weights) if weights else CpuBackend
    try:
        choices = {"auto": best_isa, REPRODUCIBLE: reproducible_isa}
        chosen = choices[isa]() if isa in choices else isa
        return make(chosen)
    except NoKernels as error:
        if isa == "auto" and chosen == "amx":
            with suppress(NoKernels):
                backend = make(best_isa(has_tiles=False))
                logger.warning("serving without AMX: %s", error)
                return backend
        if kernels != "auto":
            raise
        logger.warning("serving with torch, several times slower than C++ kernels: %s", error)
        return TorchBackend()
