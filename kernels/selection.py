"""The selection of a backend by device and name."""

import logging
from functools import cache

import torch

from kernels.backend import Backend
from kernels.cpu.backend import CpuBackend, RoundingBackend
from kernels.cpu.library import NoKernels, best_isa
from kernels.torch_backend import TorchBackend

logger = logging.getLogger(__name__)


@cache
def select_backend(device: torch.device, kernels: str = "auto") -> Backend:
    """Selects Triton on a CUDA device, and on a CPU the kernels of that name: auto, avx512, avx2, portable or torch.

    `auto` takes the best that the machine has; without a compiler it takes torch, with a warning. All but torch serve
    with int8 and int4 weights, too, as auto-int8 and so on. The first use on a machine compiles them, which takes
    seconds. Raises NoKernels for named ones that cannot be had, ImportError on a CUDA device without Triton.
    """
    isa, _, weights = kernels.partition("-")
    if weights and (device.type == "cuda" or isa == "torch"):
        raise NoKernels(f"{weights} weights need the C++ kernels of a CPU")
    if device.type == "cuda":
        # Imported here so that a machine without Triton serves on its CPU.
        from kernels.triton_backend import TritonBackend

        return TritonBackend()
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
