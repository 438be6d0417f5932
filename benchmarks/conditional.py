"""Disaggregation always, never and conditional, at three loads, on a clock that moves only with modelled work.

    python benchmarks/conditional.py

A whole cluster in this process: real router, workers, engines and store, a prefill and two decode workers. The model
computes nothing; a step takes 8 ms, 0.3 ms for each token, and 0.5 us for each token of context of a decoding row. A
message takes 1 ms, a transfer 2 ms and 0.2 ms for each block. Conversations arrive at random: a new prompt, then turns
that extend it. The load is the share of the prefill worker's time that uncached tokens take. A request is good within
4 times its quiet TTFT and 3 times its quiet TPOT. Ratios are of the conditional mode over the better of both others.
"""

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.result_file import write_result
from cli.bench.latency import ModeSummary, Record, summarize
from cli.bench.plan.costs import WorkCosts
from cli.bench.plan.paced_worker import ANSWER, PacedLoop, PacedModel, PacedRecords, VirtualInbox
from engine.model.hash_model import HashModel
from kv_store.block_store import BlockStore
from kv_store.transfers import ThreadTransfers, Transfer
from router.config import Disaggregation, RouterSettings
from tests.harness.answer import ask
from tests.harness.assembled_worker import local_worker
from tests.harness.cluster import role_of
from tests.harness.faulty_transport import Faults
from tests.harness.local_cluster import LocalCluster, Sizes
from tests.simulator import virtual_time
from wire.layout import KVLayout
from worker.assembly import Assembly, Threads

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
VOCAB_SIZE, MAX_CONTEXT_LEN = 256, 8192
NUM_PREFILL, NUM_DECODE = 1, 2
STEP_S, TOKEN_S, CONTEXT_S = 0.008, 0.0003, 5e-7
MESSAGE_S, TRANSFER_S, BLOCK_S = 0.001, 0.002, 0.0002
COSTS = WorkCosts(step_s=STEP_S, prompt_token_s=TOKEN_S, row_s=TOKEN_S, context_token_s=CONTEXT_S)
NUM_PAGES, NUM_SLOTS = 4096, 16384
FIRST_LENS, TURN_LENS, OUTPUT_LENS = (200, 3000), (20, 300), (20, 150)
MAX_TURNS, THINKING_S = 6, 4.0
TTFT_FACTOR, TPOT_FACTOR = 4.0, 3.0


@dataclass(frozen=True)
class Turn:
    """A request of a conversation. num_new: tokens of its prompt that no earlier turn had."""

    at_s: float
    prompt: tuple[int, ...]
    num_new: int
    output_len: int


def draw(seed: int, load: float, duration_s: float) -> list[Turn]:
    """Draws the turns of conversations that arrive within `duration_s`, in order of time."""
    rng = random.Random(seed)
    turns: list[Turn] = []
    num_new = 0
    while num_new * TOKEN_S < load * duration_s * NUM_PREFILL:
        at_s = rng.random() * duration_s
        known: tuple[int, ...] = ()
        for number in range(rng.randint(1, MAX_TURNS)):
            new = tuple(rng.choices(range(1, VOCAB_SIZE), k=rng.randint(*(TURN_LENS if number else FIRST_LENS))))
            turn = Turn(at_s, (*known, *new), len(new), rng.randint(*OUTPUT_LENS))
            if at_s >= duration_s or len(turn.prompt) + turn.output_len > MAX_CONTEXT_LEN:
                break
            turns.append(turn)
            num_new += turn.num_new
            known = (*turn.prompt, *[ANSWER] * turn.output_len)
            at_s += rng.expovariate(1 / THINKING_S)
    return sorted(turns, key=lambda turn: turn.at_s)


class PacedTransfers(ThreadTransfers):
    """Transfers without a thread, one after another."""

    def __init__(self, store: BlockStore, wake: Callable[[], None]) -> None:
        super().__init__(store, wake)
        self._free_s = 0.0

    def start(self) -> None:
        """Begins nothing: orders have timers of their own."""

    def begin(self, transfer: Transfer) -> None:
        super().begin(transfer)
        loop = asyncio.get_running_loop()
        self._free_s = max(self._free_s, loop.time()) + TRANSFER_S + BLOCK_S * len(transfer.pages)
        loop.call_at(self._free_s, self.run_one)


class PacedCluster(LocalCluster):
    """A cluster whose workers have a model each, and take its time."""

    async def _start_worker(self, name: str) -> Assembly:
        loop, model = asyncio.get_running_loop(), PacedModel(COSTS, LAYOUT, VOCAB_SIZE, MAX_CONTEXT_LEN)

        def clock() -> float:
            return loop.time() + model.spent_s

        threads = Threads(
            loop.time, VirtualInbox, lambda *parts: PacedLoop(model, 0.0, clock, *parts), PacedTransfers, clock
        )
        tiers, role = self._parts(name).tiers, role_of(name)
        worker = local_worker(model, tiers, name, role, self._sizes.num_blocks, self._sizes.batch, threads=threads)
        await worker.service.start()
        self.faults[name] = Faults(delay_s=MESSAGE_S)
        return worker


async def serve(cluster: LocalCluster, turn: Turn, began_s: float) -> Record:
    """Sends a request when it is due; notes its tokens as they come."""
    now_s = asyncio.get_running_loop().time
    await asyncio.sleep(began_s + turn.at_s - now_s())
    request = ask(turn.prompt, turn.output_len, ignore_eos=True)
    chunks, num_cached = [], 0
    async for response in cluster.router.dispatcher.open(request, None).outbox:
        if response.HasField("chunk"):
            chunks.append((now_s() - began_s, len(response.chunk.token_ids)))
        else:
            num_cached = sum(one.tokens for one in response.complete.usage.cached_tokens)
    return Record(
        scheduled_s=turn.at_s,
        sent_s=turn.at_s,
        chunks=tuple(chunks),
        ended_s=now_s() - began_s,
        prompt_len=len(turn.prompt),
        cached_len=num_cached,
    )


@dataclass(frozen=True)
class Quiet:
    """Limits of a request by its uncached tokens: multiples of what a quiet cluster would take."""

    num_new: dict[float, int]

    def holds_for(self, record: Record) -> bool:
        ttft_s = STEP_S + TRANSFER_S + TOKEN_S * self.num_new[record.scheduled_s]
        tpot_s = STEP_S + TOKEN_S + CONTEXT_S * record.prompt_len
        return record.ttft_s <= TTFT_FACTOR * ttft_s and record.tpot_s <= TPOT_FACTOR * tpot_s


async def play(turns: Sequence[Turn], mode: Disaggregation) -> tuple[list[Record], Counter[str]]:
    """Serves the turns with a cluster of their own; returns also the reasons for the pools."""
    settings = RouterSettings(disaggregation=mode)
    loop = asyncio.get_running_loop()
    model = HashModel(LAYOUT, VOCAB_SIZE, MAX_CONTEXT_LEN)
    cluster = PacedCluster(model, Sizes(NUM_PAGES, NUM_SLOTS, settings=settings), clock=loop.time)
    cluster.directory.records = PacedRecords(cluster.directory.state)
    await cluster.start(NUM_PREFILL, NUM_DECODE)
    records = await asyncio.gather(*(serve(cluster, turn, loop.time()) for turn in turns))
    reasons = Counter[str]()
    for family in cluster.router.metrics.registry.collect():
        for sample in family.samples if family.name == "baton_prompt_pools" else ():
            reasons[sample.labels.get("reason", "")] += int(sample.value) if sample.name.endswith("_total") else 0
    await cluster.stop()
    return records, reasons


def measure(seed: int, load: float, duration_s: float) -> dict[Disaggregation, tuple[ModeSummary, Counter[str]]]:
    """Serves the same turns in each mode."""
    turns = draw(seed, load, duration_s)
    limits = Quiet({turn.at_s: turn.num_new for turn in turns})
    found = {}
    for mode in Disaggregation:
        records, reasons = virtual_time.run(play(turns, mode))
        found[mode] = summarize([records], limits), reasons
        print(f"load {load:g}, {mode}: {len(records)} requests, {dict(reasons)}", file=sys.stderr, flush=True)
    return found


def over_the_better(found: dict[Disaggregation, tuple[ModeSummary, Counter[str]]]) -> tuple[float, float]:
    """Returns the best TTFT p90 of the fixed modes over the conditional one's, and its goodput over their best."""
    summaries = {mode: summary for mode, (summary, _) in found.items()}
    conditional = summaries.pop(Disaggregation.CONDITIONAL)
    ttft_ms = min(one.ttft_ms.p90 for one in summaries.values())
    return ttft_ms / conditional.ttft_ms.p90, conditional.goodput_rps / max(
        one.goodput_rps for one in summaries.values()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.2, 0.5, 0.8])
    parser.add_argument("--duration", type=float, default=40.0, help="simulated seconds of arrivals (default 40)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="conditional", help="name of the result in benchmarks/results")
    options = parser.parse_args()
    by_load = {load: measure(options.seed, load, options.duration) for load in options.loads}
    table: list[list[object]] = [["load", "mode", "TTFT p50 / p90 ms", "TPOT p90 ms", "ITL p99 ms", "good", "pools"]]
    figures: dict[str, float] = {}
    for load, found in by_load.items():
        for mode, (one, reasons) in found.items():
            why = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            ttft = f"{one.ttft_ms.p50:.0f} / {one.ttft_ms.p90:.0f}"
            table.append([load, mode, ttft, one.tpot_ms.p90, one.itl_ms.p99, f"{one.good_share:.1%}", why])
        (
            figures[f"TTFT p90, better / conditional, at {load:g}"],
            figures[f"goodput, conditional / better, at {load:g}"],
        ) = over_the_better(found)
    details = {str(load): {mode: asdict(one) for mode, (one, _) in found.items()} for load, found in by_load.items()}
    write_result(options.out, figures, details, table)


if __name__ == "__main__":
    main()
