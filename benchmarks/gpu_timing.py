"""Device time of GPU work: captured once as a graph, replayed in turn with what it is compared to."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu_figures import Figure

NUM_WARM_UPS = 3
NUM_ROUNDS = 15
NUMBERS_AT_ONCE = 8192
"""int32 of a program that reads."""


@dataclass(frozen=True)
class Row:
    """A piece of work on one layer, beside its ceiling and its peer, all timed in the same rounds.

    floor_s: the least time it can take, at the rate of its ceiling: a read or a copy for work that moves bytes, a
    product for work that computes. A time under a few microseconds is launches.
    """

    name: str
    shape: str
    seconds: float
    floor_s: float
    ceiling: str
    peer: str = ""
    peer_s: float = 0.0

    @property
    def of_ceiling(self) -> float:
        return self.floor_s / self.seconds

    @property
    def over_peer(self) -> float:
        """How many times faster than its peer; 0 without one."""
        return self.peer_s / self.seconds

    @property
    def figure(self) -> Figure:
        us, peer = self.seconds * 1e6, self.peer
        return Figure(self.name, self.shape, us, "us", self.ceiling, self.of_ceiling, peer, self.over_peer)


@triton.jit
def read_through(
    source_ptr,  # [programs * numbers] int32
    kept_ptr,  # [programs] int32
    numbers: tl.constexpr,
):
    # One program reads its numbers, 16 bytes a thread at once, and keeps their exclusive or.
    program = tl.program_id(0).to(tl.int64)
    read = tl.load(source_ptr + program * numbers + tl.arange(0, numbers))
    tl.store(kept_ptr + program, tl.xor_sum(read, 0))


class Read:
    """A ceiling: a kernel that reads memory far larger than any cache, and writes next to nothing."""

    def __init__(self, num_bytes: int = 1 << 30, device: str = "cuda") -> None:
        """num_bytes: a multiple of 4 * NUMBERS_AT_ONCE."""
        self.source = torch.ones(num_bytes // 4, dtype=torch.int32, device=device)
        self.kept: Tensor = torch.empty(len(self.source) // NUMBERS_AT_ONCE, dtype=torch.int32, device=device)
        self.num_bytes = num_bytes

    def __call__(self) -> None:
        read_through[(len(self.kept),)](self.source, self.kept, NUMBERS_AT_ONCE, num_warps=8)


class Copy:
    """A ceiling: an operator that reads and writes memory far larger than any cache; the driver's copy is slower."""

    def __init__(self, num_bytes: int = 1 << 30) -> None:
        self._source = torch.ones(num_bytes // 4, dtype=torch.int32, device="cuda")
        self._target = torch.empty_like(self._source)
        self.num_bytes = 2 * num_bytes

    def __call__(self) -> None:
        torch.bitwise_not(self._source, out=self._target)


class Product:
    """A ceiling: a product of large square matrices of bfloat16."""

    def __init__(self, size: int = 8192) -> None:
        self._left, self._right = (
            torch.empty(size, size, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2)
        )
        self._target = torch.empty_like(self._left)
        self.num_operations = 2 * size**3

    def __call__(self) -> None:
        torch.mm(self._left, self._right, out=self._target)


def time_in_turn(works: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median device seconds of each work; every round runs each of them once, so that all meet the same machine."""
    graphs = {name: _capture(work) for name, work in works.items()}
    rounds = [{name: _time(graph) for name, graph in graphs.items()} for _ in range(NUM_ROUNDS)]
    return {name: median(seconds[name] for seconds in rounds) for name in works}


def _capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of the work: its replay leaves Python's and the launches' time out of the figure."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(NUM_WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    return graph


def _time(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
