"""The selection of a backend by device and name."""

import logging
from functools import cache

import torch

from kernels.accelerator import accelerator_of
from kernels.backend import Backend
from kernels.cpu.backend import CpuBackend, RoundingBackend
from kernels.cpu.library import NoKernels, best_isa
from kernels.torch_backend import TorchBackend

logger = logging.getLogger(__name__)


@cache
def select_backend(device: torch.device, kernels: str = "auto") -> Backend:
    """Selects an accelerator's own backend, or a CPU's by name: auto, amx, avx512, avx2, portable or torch.

    `auto` takes the machine's best but amx, which is taken by name alone; without a compiler it takes torch, with a
    warning. The suffixes -int8 and -int4 (auto-int8) round weights, except for torch. The first use on a machine
    compiles the kernels, which takes seconds.
    Raises NoKernels for a named backend that cannot run and for devices without a backend, and the ImportError of
    `Accelerator.backend`.
    """
    isa, _, weights = kernels.partition("-")
    if weights and (device.type != "cpu" or isa == "torch"):
        raise NoKernels(f"{weights} weights need the C++ kernels of a CPU")
    if device.type != "cpu":
        return accelerator_of(device).backend()
    if kernels == "torch":
        return TorchBackend()
    try:
        isa = best_isa() if isa == "auto" else isa
        return RoundingBackend(isa, weights) if weights else CpuBackend(isa)
    except NoKernels as error:
        if kernels != "auto":
            raise
        logger.warning("serving with torch, several times slower than C++ kernels: %s", error)
        return TorchBackend()
