"""Kinds of accelerators, as far as they differ: kernels, graphs and pinned memory.

The rest of a device's code uses torch.Stream, torch.Event and torch.accelerator. A new kind is a row of ACCELERATORS.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar, Protocol
from weakref import WeakValueDictionary

import torch

from kernels.backend import TRITON_EXACT, Backend
from kernels.cpu.library import NoKernels
from kernels.user_cache import OTHER_CACHE, own_folder

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all CUDA contexts


FP8_CAPABILITY = (8, 9)


class Graph(Protocol):
    """Kernel launches that are captured once and replayed as one launch."""

    def capture(self, work: Callable[[], None]) -> None:
        """Calls `work` and captures its launches, which do not run. Raises RuntimeError if the capture fails."""
        ...

    def replay(self) -> None:
        """Launches the captured work on the current stream. Does not block."""
        ...


class Accelerator(Protocol):
    """A kind of device that computes beside the host."""

    def backend(self, kernels: str = "auto") -> Backend:
        """Makes the backend of kernels for such devices: by name, or for another name their default.

        Raises ImportError if packages are missing, NoKernels if compiled kernels cannot be stored.
        """
        ...

    def graph(self, device: torch.device) -> Graph: ...

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Finds the likeliest token of each row of float32 logits, int64 [R]: the first among equals. Does not block.

        -1 for a row with a NaN or infinite value."""
        ...

    def refuses(self, device: torch.device, kv_dtype: str) -> str | None:
        """Returns the reason why the device's kernels cannot keep KV in a dtype of wire.layout.KV_DTYPES, else None."""
        ...

    def sum_pages(self, pages: torch.Tensor, chosen: torch.Tensor, keys: torch.Tensor, out: torch.Tensor) -> None:
        """Sums chosen pages on the current stream, as `kernels.reference.sum_pages` does. Does not block."""
        ...

    def pin(self, address: int, num_bytes: int) -> str | None:
        """Pins host memory for DMA by all such devices; returns the error if that fails, else None."""
        ...

    def unpin(self, address: int) -> None:
        """Undoes `pin`."""
        ...


class Cuda:
    """NVIDIA's devices, and AMD's under torch for ROCm, which has the same names."""

    def backend(self, kernels: str = "auto") -> Backend:
        """Makes the backend of a name; the library's products have any other."""
        if not os.path.isabs(os.environ.get("TRITON_CACHE_DIR", "")):
            try:
                os.environ["TRITON_CACHE_DIR"] = str(own_folder("triton"))
            except OSError as error:
                raise NoKernels(f"the cache of compiled kernels cannot be used ({error}): {OTHER_CACHE}") from error
        # Imported here so that a machine without Triton serves on its CPU.
        from kernels.triton_backend import ExactBackend, TritonBackend

        return ExactBackend() if kernels == TRITON_EXACT else TritonBackend()

    def graph(self, device: torch.device) -> Graph:
        return CudaGraph(device)

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        from kernels.row_operations import likeliest

        return likeliest(logits)

    def refuses(self, device: torch.device, kv_dtype: str) -> str | None:
        """Refuses fp8 before compute capability 8.9: Triton has no conversion of e4m3 there."""
        if kv_dtype != "fp8" or torch.version.hip:
            return None
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) >= FP8_CAPABILITY:
            return None
        return (
            f"fp8 wants a GPU of compute capability 8.9 or later, and {device} has {major}.{minor}; "
            "set int8, which takes as many bytes"
        )

    def sum_pages(self, pages: torch.Tensor, chosen: torch.Tensor, keys: torch.Tensor, out: torch.Tensor) -> None:
        from kernels.checksums import sum_pages  # as Triton above

        sum_pages(pages, chosen, keys, out)

    def pin(self, address: int, num_bytes: int) -> str | None:
        error = torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE)
        if int(error) == 0:
            return None
        with suppress(RuntimeError):
            # The next launch raises the error that the failed call has left: this one, in place of one of the model's.
            torch.zeros(1, device="cuda")
        return str(error)

    def unpin(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)


class GraphMemory:
    """The memory pool of a device's graphs, and the stream that they are captured on.

    A graph's results are read before the next graph runs. Torch refuses to capture into a pool that lost all graphs
    while a tensor in it lives; the next graphs then get a new pool.
    """

    _of_devices: ClassVar[WeakValueDictionary[torch.device, "GraphMemory"]] = WeakValueDictionary()

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    @classmethod
    def shared(cls, device: torch.device) -> "GraphMemory":
        """Returns the pool of a device's graphs; makes a pool if there are no graphs."""
        memory = cls._of_devices.get(device) or cls(device)
        return cls._of_devices.setdefault(device, memory)

    @classmethod
    def leave(cls, device: torch.device) -> None:
        """Gives a device's next graphs a new pool."""
        cls._of_devices.pop(device, None)


class CudaGraph:
    """A CUDA graph, in the memory pool that all graphs of a device share, so that only one graph runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._device = device
        self._memory: GraphMemory | None = None

    def capture(self, work: Callable[[], None]) -> None:
        """Captures on the graph's own device, made current meanwhile: launches on other devices would run at once."""
        memory, own = GraphMemory.shared(self._device), torch.cuda.current_stream(self._device)
        graph = torch.cuda.graph(self._graph, memory.handle, memory.stream, capture_error_mode="thread_local")
        with torch.cuda.device(self._device):
            try:
                with torch.cuda.stream(own), graph:  # a graph that fails leaves its stream current
                    work()
            except BaseException:
                self._end_capture(memory)
                raise
        self._memory = memory

    def replay(self) -> None:
        self._graph.replay()

    def _end_capture(self, memory: GraphMemory) -> None:
        """Ends what torch leaves open when a capture fails: allocation from the pool, and the generator's capture.

        Else pinned memory would still come from the pool, and no other graph could be captured into it. The generator,
        which refuses all draws, has no reset, but a capture that succeeds resets it.
        """
        GraphMemory.leave(self._device)
        with suppress(RuntimeError):  # where the capture had not begun, or had ended
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), memory.handle)
            torch._C._cuda_releasePool(torch.cuda.current_device(), memory.handle)
        with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            torch.zeros(1, device=self._device)


ACCELERATORS: dict[str, Accelerator] = {"cuda": Cuda()}
"""The kinds, by `torch.device.type`."""


def accelerator_of(device: torch.device) -> Accelerator:
    """Returns the kind of a device. Raises NoKernels for an unknown one."""
    if device.type not in ACCELERATORS:
        raise NoKernels(f"no kernels for device {device}: supported are cpu, {', '.join(ACCELERATORS)}")
    return ACCELERATORS[device.type]


def present_accelerator() -> Accelerator | None:
    """Returns the kind of this machine's devices; None if no device can be used."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else ACCELERATORS.get(device.type)
