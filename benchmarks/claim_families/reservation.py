"""Contiguous reservation beside pages, on a published trace: exact bookkeeping of a KV memory under a full queue.

A contiguous allocator gives a request one extent for its whole life, first fit, as servers before paged attention did.
The paged allocator is Baton's own: `Ledger` for pages, `ContinuousBatcher` for admission, growth and preemption. A step
gives every running request a token; prompts take one step. Source of the contiguous policies: vLLM, arXiv 2309.06180.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

from benchmarks.claim_families.batching import batch_at_slo
from benchmarks.claim_families.finding import Chart, Family, Finding, Inputs, Report
from cli.bench.schedule import TraceRow, read_trace, scale
from cli.size.capacity import Fit, RequestKV
from cli.size.shape import ModelShape
from engine.schedule.batcher import Candidate, Pages, Phase
from engine.schedule.continuous_batcher import ContinuousBatcher
from kv_store.ledger import Ledger
from tests.cli.size.published_models import LLAMA_3_8B
from wire.ids import PageId

BLOCK_SIZE = 16
NUM_ROWS = 2000
GPU_BYTES = 24 << 30
UNBOUNDED = 1 << 30
QUEUE_SEEN = 256
WHOLE = "whole contexts"
MODEL = ModelShape.parse(LLAMA_3_8B)
CONTEXT_LEN = MODEL.max_context_len


@dataclass(frozen=True)
class Moment:
    """A step's end while requests wait. Tokens that have KV, and the ones that memory is taken for."""

    num_running: int
    num_tokens: int
    num_allocated: int


@dataclass
class Run:
    """A request in memory. num_known: tokens of prompt and output. The other fields: its place in memory."""

    row: TraceRow
    num_known: int
    num_computed: int = 0
    start: int = 0
    size: int = 0
    pages: list[PageId] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.num_known >= self.row.input_len + self.row.output_len

    def advance(self) -> None:
        """Computes all known tokens, and gains the next."""
        self.num_computed, self.num_known = self.num_known, self.num_known + 1


class Memory(Protocol):
    """A policy: a step of it admits, grows and preempts, and returns the requests that have room for a token more."""

    def step(self, waiting: list[Run], running: list[Run]) -> list[Run]: ...

    def free(self, one: Run) -> None: ...

    def num_allocated(self, running: Sequence[Run]) -> int: ...


class Contiguous:
    """Extents of free memory. A request takes an extent of `reserve` tokens, first fit."""

    def __init__(self, capacity: int, reserve: Callable[[TraceRow], int]) -> None:
        self._free = [(0, capacity)]
        self._reserve = reserve

    def step(self, waiting: list[Run], running: list[Run]) -> list[Run]:
        """Admits from the head of the queue while extents are found; nothing grows and nothing is preempted."""
        while waiting and self._place(waiting[0]):
            running.append(waiting.pop(0))
        return running

    def free(self, one: Run) -> None:
        """Gives an extent back, joined with the free ones beside it."""
        extents = sorted([*self._free, (one.start, one.size)])
        joined = extents[:1]
        for start, size in extents[1:]:
            last_start, last_size = joined[-1]
            if last_start + last_size == start:
                joined[-1] = (last_start, last_size + size)
            else:
                joined.append((start, size))
        self._free = joined

    def num_allocated(self, running: Sequence[Run]) -> int:
        return sum(one.size for one in running)

    def _place(self, one: Run) -> bool:
        size = self._reserve(one.row)
        for index, (start, room) in enumerate(self._free):
            if room >= size:
                one.start, one.size = start, size
                self._free[index : index + 1] = [(start + size, room - size)] if room > size else []
                return True
        return False


class Paged:
    """Pages of a block each, planned by Baton's batcher and kept in its ledger."""

    def __init__(self, capacity: int) -> None:
        self._ledger = Ledger[PageId](capacity // BLOCK_SIZE)
        self._batcher = ContinuousBatcher(UNBOUNDED, UNBOUNDED)

    def step(self, waiting: list[Run], running: list[Run]) -> list[Run]:
        """Follows a plan; a preempted request goes back to the head of the queue, and computes its tokens again."""
        queue = [_candidate(handle, one, Phase.WAITING) for handle, one in enumerate(waiting[:QUEUE_SEEN])]
        held = [_candidate(handle, one, Phase.DECODE) for handle, one in enumerate(running)]
        plan = self._batcher.plan(queue, held, Pages(self._ledger.num_allocatable, 0, BLOCK_SIZE))
        growing, yielding = ([running[handle] for handle in handles] for handles in (plan.run, plan.preempt))
        for one in yielding:
            self.free(one)
            one.num_computed = 0
            running.remove(one)
        admitted = waiting[: len(plan.admit)]
        waiting[:] = [*yielding, *waiting[len(admitted) :]]
        running += admitted
        for one in (*growing, *admitted):
            one.pages += self._ledger.allocate(-(-one.num_known // BLOCK_SIZE) - len(one.pages))
        return [*growing, *admitted]

    def free(self, one: Run) -> None:
        for page in one.pages:
            self._ledger.free(page)
        one.pages = []

    def num_allocated(self, running: Sequence[Run]) -> int:
        return BLOCK_SIZE * sum(len(one.pages) for one in running)


def _candidate(handle: int, one: Run, phase: Phase) -> Candidate:
    return Candidate(
        handle=handle, phase=phase, num_known=one.num_known, num_computed=one.num_computed, num_blocks=len(one.pages)
    )


def simulate(rows: Sequence[TraceRow], memory: Memory) -> Iterator[Moment]:
    """Runs all rows as if all had come at once; yields each step from the first request's end until none waits."""
    waiting, running = [Run(row, row.input_len) for row in rows], list[Run]()
    has_ended = False
    while waiting:
        for one in memory.step(waiting, running):
            one.advance()
        if has_ended and waiting:
            num_tokens = sum(one.num_computed for one in running)
            yield Moment(len(running), num_tokens, memory.num_allocated(running))
        for one in [one for one in running if one.is_done]:
            memory.free(one)
            running.remove(one)
            has_ended = True


POLICIES: dict[str, Callable[[int], Memory]] = {
    "context": lambda capacity: Contiguous(capacity, lambda row: CONTEXT_LEN),
    "power of two": lambda capacity: Contiguous(
        capacity, lambda row: row.input_len + (1 << (row.output_len - 1).bit_length())
    ),
    "exact": lambda capacity: Contiguous(capacity, lambda row: row.input_len + row.output_len),
    "pages": Paged,
}


@dataclass(frozen=True)
class Usage:
    """Averages over the steps of a run: shares of the whole memory, and requests at once."""

    used: float
    allocated: float
    num_running: float

    @property
    def unused_of_allocated(self) -> float:
        return 1 - self.used / self.allocated

    @classmethod
    def of(cls, moments: Sequence[Moment], capacity: int) -> "Usage":
        return cls(
            fmean(one.num_tokens for one in moments) / capacity,
            fmean(one.num_allocated for one in moments) / capacity,
            fmean(one.num_running for one in moments),
        )


def measure(inputs: Inputs) -> Report:
    if inputs.trace is None:
        raise ValueError("give a published trace with --trace")
    trace = scale(read_trace(inputs.trace)[:NUM_ROWS], NUM_ROWS, 1.0, 1.0, CONTEXT_LEN)
    kv = RequestKV(MODEL.kv_layout(BLOCK_SIZE), CONTEXT_LEN, 16)
    capacity = Fit(GPU_BYTES, MODEL.weight_bytes(), kv).kv_room_bytes // kv.bytes_per_token
    usage = {name: Usage.of(list(simulate(trace.rows, make(capacity))), capacity) for name, make in POLICIES.items()}
    mean_len = fmean(row.input_len + row.output_len / 2 for row in trace.rows)
    setting = (
        f"{len(trace.rows)} requests of {inputs.trace.stem} ({trace.num_clipped or 'none'} cut to {CONTEXT_LEN:,} "
        f"tokens), all waiting from the start; KV of Llama-3-8B on a GPU of 24 GiB: {capacity:,} tokens. Baseline: a "
        "contiguous first-fit allocator that reserves the context, the prompt and the next power of two of the answer, "
        "or exactly the final length. Three figures in a row are of these three. The claims are judged against whole "
        "contexts: a server cannot know how long an answer will be. Pages: Baton's ledger and batcher. Averages of the "
        "steps in which requests wait."
    )
    chart = Chart("KV memory by what is reserved", "", "% of KV memory", _bars(usage))
    findings = _findings(usage, mean_len)
    counts = [round(usage[name].num_running) for name in ("context", "pages")]
    findings["batch_at_slo"] = batch_at_slo(inputs.scratch, counts[0], counts[1], round(mean_len))
    return Report(setting, findings, chart)


def _bars(usage: dict[str, Usage]) -> dict[str, list[tuple[float | str, float]]]:
    return {
        "holds tokens": [(name, 100 * one.used) for name, one in usage.items()],
        "reserved": [(name, 100 * one.allocated) for name, one in usage.items()],
    }


def _findings(usage: dict[str, Usage], mean_len: float) -> dict[str, Finding]:
    worst, doubling, oracle, paged = usage.values()
    used = f"{worst.used:.0%}, {doubling.used:.0%} and {oracle.used:.0%}"
    # The claims are about whole contexts; the other two policies know a part of the future.
    waste = f"{1 - worst.used:.0%}, {1 - doubling.used:.0%} and {1 - oracle.used:.0%}"
    more = [paged.num_running / one.num_running for one in (worst, doubling, oracle)]
    ratios = f"{more[0]:.1f}x, {more[1]:.2f}x and {more[2]:.2f}x"
    half_block = BLOCK_SIZE / 2 / mean_len
    of_context = f"{mean_len:,.0f} of {CONTEXT_LEN:,} tokens on average: {mean_len / CONTEXT_LEN:.0%} used"
    return {
        "waste_contiguous": Finding(of_context, f"{waste} of the memory holds no token", worst.used <= 0.4, WHOLE),
        "waste_paged": Finding(
            f"half a block of {BLOCK_SIZE} a request: {half_block:.1%}",
            f"{paged.unused_of_allocated:.1%} of allocated pages, {1 - paged.used:.1%} of all memory",
            1 - paged.used < 0.04,
        ),
        "utilization": Finding(
            of_context, f"{used}; with pages {paged.used:.0%}", worst.used <= 0.4 and paged.used >= 0.96, WHOLE
        ),
        "utilization_80": Finding(
            of_context, f"{used}; with pages {paged.used:.0%}", worst.used <= 0.2 and paged.used >= 0.8, WHOLE
        ),
        "fragmentation": Finding(
            "pages of one size leave no gap that is too small",
            f"{waste} hold no token; with pages {1 - paged.used:.1%}",
            worst.used <= 0.4 and 1 - paged.used <= 0.05,
            WHOLE,
        ),
        "concurrency": Finding(
            f"{CONTEXT_LEN / mean_len:.1f}x over whole contexts, at the most",
            f"{ratios} ({paged.num_running:.0f} requests at once; {worst.num_running:.0f} with whole contexts)",
            more[0] >= 2,
            f"over {WHOLE}{' alone' if max(more[1:]) < 2 else ''}",
        ),
    }


FAMILY = Family(
    "Reserved memory and pages",
    {
        "waste_contiguous": "contiguous reservation wastes 60-80 %",
        "waste_paged": "pages waste less than 4 %",
        "utilization": "utilization rises from 20-40 % to 96 %",
        "utilization_80": "utilization rises from 20 % to 80-85 %",
        "fragmentation": "fragmentation falls from 60 % to 5 %",
        "concurrency": "2-4x the requests at equal memory",
        "batch_at_slo": "4-8x the batch at the same SLO",
    },
    measure,
)
