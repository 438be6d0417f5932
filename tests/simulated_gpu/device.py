"""A GPU of the host: devices of torch named `sim`, whose rules are those of CUDA, kept strictly.

Product code runs here as on a GPU, and a run that passes here has broken none of these rules:

- Memory belongs to the device. The host faults where it touches it; new memory is NaN; a limit ends in
  torch.OutOfMemoryError. (native/memory.h)
- Work is asynchronous. A stream is a thread; an operator returns with the shape of its result, from torch's Meta
  kernel, and its values come later, from torch's CPU kernel. (native/stream.h, native/operators.cpp)
- Nothing but events, waits and synchronizations orders two streams, or a stream and the host. Vector clocks follow
  them: two accesses that nothing orders are a race, named by `races`, in whatever order they ran. (native/clock.h,
  native/history.h, native/footprint.h)
- Pinned memory is read and written late, by the copy; the host's pages are protected meanwhile. (native/pinned.h)
- A fault of the device surfaces at a later call, and stays. (native/stream.h)
- Graphs record launches, and replay them. Triton's kernels run interpreted on a stream's thread. (triton_kernels.py)

What it cannot show: speed, the compiled kernels, the driver, rounding of a device's own products, and races of the
host's threads with one another, which count as one. The library is compiled at first use, as kernels of a CPU are.
"""

import atexit
import gc
import hashlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension
from torch.utils.backend_registration import rename_privateuse1_backend

from kernels.accelerator import ACCELERATORS, Accelerator, Graph
from kernels.backend import Backend
from kernels.cpu.library import load_units
from kernels.torch_backend import TorchBackend

NAME = "sim"
NUM_DEVICES = 4
"""As kNumDevices in native/stream.h."""
SIM = torch.device("privateuseone", 0)
"""The first device, by its name before `load`."""
NATIVE = Path(__file__).parent / "native"


@dataclass(frozen=True)
class Counts:
    """What the host has asked of all devices. synchronizations: where it had to wait for something new.

    launches: of operators and graphs; to_device, to_host, within: copies; synchronous: operators whose shapes depend on
    values.
    """

    synchronizations: int
    launches: int
    to_device: int
    to_host: int
    within: int
    synchronous: int

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, one.name) - getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True)
class Exposed:
    """What came behind the marked task in happens-before order: nothing that the device does before it can hide it."""

    launches: int
    bytes_to_device: int
    bytes_to_host: int
    waits: int


class SimulatedGraph:
    """Launches that were captured on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._number: int | None = None

    def capture(self, work: Callable[[], None]) -> None:
        stream = torch.Stream(self._device)
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            self._number = commands().begin_capture(stream.device_index)
            try:
                work()
            finally:
                commands().end_capture(stream.device_index)

    def replay(self) -> None:
        stream = torch.accelerator.current_stream(self._device)
        commands().replay(stream.device_index, self._number)

    def __del__(self) -> None:
        if self._number is not None:
            commands().drop(self._number)


class SimulatedGpu:
    """The row of `kernels.accelerator.ACCELERATORS`; its kernels are torch's own operators."""

    def backend(self, kernels: str = "auto") -> Backend:
        return TorchBackend()

    def graph(self, device: torch.device) -> Graph:
        return SimulatedGraph(device)

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        best = logits.argmax(-1)  # which takes NaN for the greatest, as amin takes it for the least
        span = logits.gather(1, best[:, None]).squeeze(1) - logits.amin(-1)
        return torch.where(span < torch.inf, best, -1)

    def refuses(self, device: torch.device, kv_dtype: str) -> str | None:
        return None

    def pin(self, address: int, num_bytes: int) -> str | None:
        return None if commands().pin(address, num_bytes) else "it is pinned already, or not shared"

    def unpin(self, address: int) -> None:
        commands().unpin(address)


@cache
def load() -> Accelerator:
    """Makes the devices known to torch in this process. Raises NoKernels where they cannot be compiled."""
    _load_library()
    module = types.ModuleType(f"torch.{NAME}")
    answers = {"is_available": True, "device_count": NUM_DEVICES, "current_device": 0, "_is_in_bad_fork": False}
    for name, answer in answers.items():
        setattr(module, name, lambda answer=answer: answer)
    module.__dict__["manual_seed_all"] = lambda seed: None
    rename_privateuse1_backend(NAME)
    setattr(torch, NAME, module)
    sys.modules[module.__name__] = module
    atexit.register(commands().close)
    ACCELERATORS[NAME] = SimulatedGpu()
    return ACCELERATORS[NAME]


def commands() -> Any:
    """Returns the functions of native/commands.cpp."""
    return torch.ops.simulated_gpu


def counts() -> Counts:
    return Counts(*commands().counts())


def exposed() -> Exposed:
    """Counts what came behind the task that `commands().mark` has marked."""
    return Exposed(*commands().exposed())


def races() -> list[str]:
    """Takes the races that were found since the last call. Waits for all devices."""
    synchronize()
    found: list[str] = commands().races()
    return found


def synchronize() -> None:
    """Waits for all devices. Raises RuntimeError for one that has failed."""
    for device in range(NUM_DEVICES):
        torch.accelerator.synchronize(torch.device(NAME, device))


def leave_room(device: int, num_bytes: int) -> None:
    """Lets a device hold `num_bytes` more than what is reachable now: garbage of a former test is no room."""
    gc.collect()
    commands().set_limit(device, commands().num_used(device) + num_bytes)


def reset() -> None:
    """Repairs devices, forgets races and frees memory; the rest is as at the start."""
    for device in range(NUM_DEVICES):
        commands().repair(device)
        commands().set_limit(device, 2 << 30)
    commands().set_delay(0)
    commands().set_seed(0)
    commands().trim()
    commands().races()


def _load_library() -> None:
    sources = sorted(NATIVE.glob("*"))
    digest = hashlib.sha256(torch.__version__.encode())
    for source in sources:
        digest.update(source.read_bytes())
    libraries = Path(torch.__file__).parent / "lib"
    flags = [
        *("-std=c++20", "-O1", "-fPIC", "-w", "-pthread"),
        *(f"-isystem{path}" for path in cpp_extension.include_paths()),
        *("-Wl,--no-as-needed", f"-L{libraries}", "-ltorch_cpu", "-lc10"),
    ]
    load_units([one for one in sources if one.suffix == ".cpp"], flags, digest.hexdigest())
