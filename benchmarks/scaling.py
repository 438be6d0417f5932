"""Pools that follow limits on published traces and a virtual clock, beside fixed sizes and plans with foresight.

    python benchmarks/scaling.py --traces FOLDER

The policy is the controller's own, told at once how long starts take, and benchmarks/scaling_model.py is the world.
Requests come at the trace's own times and lengths; nothing is cached. Costs are of SmolLM2-135M on two cores a worker
(benchmarks/results/peers_gguf.md: 1,363 prompt tokens/s; 190, 640 and 898 tokens/s in 1, 8 and 32 streams, a line of
4.3 ms and 0.98 ms a stream). A worker costs from its order to its end, and starts in 3.4 s (role_switch.md, under
streams). `following` begins with the sizes of `fixed`, the cheapest of the whole trace. `foresight` is the cheapest
plan found that knows all arrivals: for each interval the fewest prefill workers that keep enough of its prompts in
time, and decode workers by the streams at the limit, ordered a start ahead, kept over gaps shorter than a start. It may
go back and forth within a minute; `foresight, steady` may not, as `following`: the cheapest such sizes over the same
needs, by dynamic programming, with a price of each request that is short of a worker.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.result_file import write_result
from benchmarks.scaling_model import POLL_EVERY_S, Costs, Outcome, Pools, Sizing
from cli.bench.schedule import TraceRow, read_trace
from deploy.plan.config import SloSettings
from deploy.scaling.demand import Loads
from deploy.scaling.policy import REVERSE_S, Policy
from deploy.scaling.scaler import ASK_EVERY_S
from wire.pools import PoolSizes

COSTS = Costs(prefill_token_s=1 / 1363, step_s=0.0043, stream_s=0.00098, start_s=3.4, hand_off_s=0.02, grace_s=30.0)
TRACES = {"azure_conv_2023.csv": 1, "azure_code_2023.csv": 1, "mooncake_conversation.jsonl": 8}
"""Files, and what their prompts' lengths are divided by, so that a prompt alone keeps the limit."""
SHARE = 0.95
MAX_PREFILL, MAX_DECODE = 48, 16


@dataclass(frozen=True)
class Run:
    """A run: worker-hours, shares of requests within the limits, late first tokens, late next tokens."""

    hours: float
    within: float
    late_first: float
    late_next: float
    orders: int
    reversed_soon: int


class Bench:
    """A trace with its limits."""

    def __init__(self, rows: Sequence[TraceRow], costs: Costs, ttft_s: float, itl_s: float) -> None:
        self.rows = rows
        self.costs = costs
        self.ttft_s = ttft_s
        self.itl_s = itl_s
        self._ahead_s = costs.start_s + POLL_EVERY_S

    def run(self, first: PoolSizes, sizing: Sizing) -> Run:
        pools = Pools(self.rows, self.costs, first, self.ttft_s, self.itl_s)
        outcome, number = pools.run(sizing), len(self.rows)
        late = [pools.is_late(request) for request in range(number)]
        return Run(
            hours=outcome.worker_hours,
            within=1 - sum(first or then for first, then in late) / number,
            late_first=sum(first for first, _ in late) / number,
            late_next=sum(then for _, then in late) / number,
            orders=len(outcome.orders),
            reversed_soon=num_reversed(outcome),
        )

    def fixed(self) -> tuple[PoolSizes, Run]:
        """Returns the cheapest sizes within the limits."""
        keep = lambda _, __, now, ___: now  # noqa: E731
        least = math.ceil(sum(row.input_len for row in self.rows) * self.costs.prefill_token_s / self.rows[-1].at_s)
        many = (self.run(PoolSizes(size, MAX_DECODE), keep) for size in range(least, MAX_PREFILL))
        prefill = next(least + more for more, run in enumerate(many) if run.late_first <= 1 - SHARE)
        for workers in range(prefill + 1, prefill + MAX_DECODE):
            for decode in range(1, workers - prefill + 1):
                sizes = PoolSizes(workers - decode, decode)
                if (run := self.run(sizes, keep)).within >= SHARE:
                    return sizes, run
        raise ValueError("no fixed sizes keep the limits")

    def following(self, slo: SloSettings, first: PoolSizes) -> Run:
        """Runs the controller's policy, from the fixed sizes on."""
        policy, loads = Policy(slo), Loads(self.ttft_s)

        def sizing(now_s: float, demand: object, sizes: PoolSizes, ready: PoolSizes) -> PoolSizes:
            loads.take("router", demand, now_s)  # type: ignore[arg-type]
            orders = policy.decide(loads.load(max(self.costs.start_s, 2 * ASK_EVERY_S)), sizes, now_s)
            wanted = {order.role.value: order.size for order in orders}
            return PoolSizes(**({"prefill": sizes.prefill, "decode": sizes.decode} | wanted))

        return self.run(first, sizing)

    def foresight(self) -> Run:
        """Returns the cheapest plan found that knows all arrivals."""
        runs = [
            self.run(PoolSizes(prefill[0], decode[0]), self._follow(prefill, decode, interval_s, self._ahead_s))
            for interval_s in (20.0, 60.0)
            for prefill, decode in product(
                [self._prefill_plan(interval_s, share) for share in (0.8, 0.9, 0.95, 0.99)],
                [self._decode_plan(interval_s, factor) for factor in (0.7, 0.85, 1.0, 1.2)],
            )
        ]
        return min((run for run in runs if run.within >= SHARE), key=lambda run: run.hours)

    def foresight_steady(self) -> Run:
        """Returns the cheapest plan found that knows all arrivals, and reverses no order within REVERSE_S."""
        interval_s, num_ticks = 10.0, int(self.rows[-1].at_s / POLL_EVERY_S) + 1
        weights = np.full(num_ticks, 0.2)
        for row in self.rows:
            weights[int(row.at_s / POLL_EVERY_S)] += 1
        runs = []
        for share, price in product((0.8, 0.9, 0.95), (1.0, 3.0, 10.0, 30.0)):
            follow = self._follow(self._prefill_plan(interval_s, share), [0], interval_s, self._ahead_s)
            need = [follow(tick * POLL_EVERY_S, None, None, None).prefill for tick in range(num_ticks)]  # type: ignore[arg-type]
            plan, decode = steady(np.array(need), price * weights), max(self._decode_plan(60.0, 1.0))
            runs.append(self.run(PoolSizes(plan[0], decode), self._follow(plan, [decode], POLL_EVERY_S, ahead_s=0.0)))
        return min((run for run in runs if run.within >= SHARE), key=lambda run: run.hours)

    def _follow(self, prefill: Sequence[int], decode: Sequence[int], interval_s: float, ahead_s: float) -> Sizing:
        def at(plan: Sequence[int], now_s: float) -> int:
            """Orders what the next interval wants a time ahead, and lets workers go at an interval's end."""
            here, ahead = (min(int(one / interval_s), len(plan) - 1) for one in (now_s, now_s + ahead_s))
            return max(plan[here : ahead + 1])

        return lambda now_s, _, __, ___: PoolSizes(at(prefill, now_s), at(decode, now_s))

    def _prefill_plan(self, interval_s: float, share: float) -> list[int]:
        free_s, plan = [0.0], list[int]()
        for begin_s, rows in self._intervals(interval_s):
            for size in range(1, MAX_PREFILL + 1):
                trial = sorted(free_s)[:size] + [begin_s] * (size - len(free_s))
                if self._num_late(trial, rows) <= (1 - share) * len(rows) or size == MAX_PREFILL:
                    break
            free_s = trial
            plan.append(size)
        return self._kept_over_gaps(plan, interval_s)

    def _num_late(self, free_s: list[float], rows: Sequence[TraceRow]) -> int:
        """Counts the late prompts of an interval; leaves the ends of the queues in `free_s`."""
        num_late = 0
        for row in rows:
            place = min(range(len(free_s)), key=free_s.__getitem__)
            free_s[place] = max(free_s[place], row.at_s) + row.input_len * self.costs.prefill_token_s
            num_late += free_s[place] + self.costs.hand_off_s - row.at_s > self.ttft_s
        return num_late

    def _decode_plan(self, interval_s: float, factor: float) -> list[int]:
        each = (self.itl_s - self.costs.step_s) / self.costs.stream_s
        tokens = [0.0] * (int(self.rows[-1].at_s / interval_s) + 1)
        for row in self.rows:
            from_s = row.at_s + row.input_len * self.costs.prefill_token_s
            place = min(int((from_s + row.output_len * self.itl_s / 4) / interval_s), len(tokens) - 1)
            tokens[place] += row.output_len
        plan = [max(1, math.ceil(factor * number / interval_s * self.itl_s / each)) for number in tokens]
        return self._kept_over_gaps(plan, interval_s)

    def _intervals(self, interval_s: float) -> Iterator[tuple[float, list[TraceRow]]]:
        rows = iter([*self.rows, None])
        row, begin_s = next(rows), 0.0
        while row is not None:
            taken = []
            while row is not None and row.at_s < begin_s + interval_s:
                taken.append(row)
                row = next(rows)
            yield begin_s, taken
            begin_s += interval_s

    def _kept_over_gaps(self, plan: list[int], interval_s: float) -> list[int]:
        """Keeps workers where going and coming back would cost more: over gaps shorter than a start."""
        gap = int(self.costs.start_s // interval_s)
        return [min(max(plan[max(0, i - gap) : i + 1]), max(plan[i : i + gap + 1])) for i in range(len(plan))]


def steady(need: Any, price: Any) -> list[int]:
    """Returns the cheapest sizes by tick that reverse no order within REVERSE_S.

    need: workers by tick; price: the cost of a worker too few, in seconds of a worker. Goes back from the last tick;
    `cost` is what the rest costs by the last order's direction (0: up), its age in ticks, and the size.
    """
    oldest, sizes = int(REVERSE_S / POLL_EVERY_S), np.arange(1, MAX_PREFILL + 1)
    ages = np.minimum(np.arange(oldest + 1) + 1, oldest)
    cost, orders = np.zeros((2, oldest + 1, len(sizes))), list[Any]()
    may = [np.arange(oldest + 1) >= (0 if one == way else oldest) for one in (0, 1) for way in (0, 1)]
    beyond = np.triu(np.ones((len(sizes), len(sizes)), dtype=bool), 1)
    for needed, short in zip(need[::-1], price[::-1], strict=True):
        now = sizes * POLL_EVERY_S + short * np.maximum(0, needed - sizes)
        rest = now + cost[:, ages]
        order = np.broadcast_to(np.arange(len(sizes)), rest.shape).copy()
        best = rest.copy()
        for way, others in ((0, beyond), (1, beyond.T)):
            reached = np.where(others, rest[way, 0], np.inf)
            least, place = reached.min(axis=1), reached.argmin(axis=1)
            for one in (0, 1):
                is_better = may[2 * one + way][:, None] & (least < best[one])
                best[one], order[one] = np.where(is_better, least, best[one]), np.where(is_better, place, order[one])
        cost = best
        orders.append(order)
    way, age, place, plan = 0, oldest, int(cost[0, oldest].argmin()), list[int]()
    for order in reversed(orders):
        if (then := int(order[way, age, place])) != place:
            way, age, place = int(then < place), 0, then
        age = min(age + 1, oldest)
        plan.append(int(sizes[place]))
    return plan


def num_reversed(outcome: Outcome) -> int:
    """Counts the orders of a pool that reverse an order of the last REVERSE_S."""
    pools = {
        pool: [(at_s, after > before) for at_s, of, before, after in outcome.orders if of == pool]
        for pool in ("prefill", "decode")
    }
    pairs = [pair for orders in pools.values() for pair in pairwise(orders)]
    return sum(one[1] is not two[1] and two[0] - one[0] < REVERSE_S for one, two in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="FOLDER", help="folder of the published traces")
    parser.add_argument("--ttft", type=float, default=10.0, metavar="S", help="limit on the time to the first token")
    parser.add_argument("--itl", type=float, default=0.05, metavar="S", help="limit on the mean time between tokens")
    options = parser.parse_args()
    slo = SloSettings(
        ttft_ms=1000 * options.ttft, itl_ms=1000 * options.itl, max_prefill=MAX_PREFILL, max_decode=MAX_DECODE
    )
    table: list[list[object]] = [
        ["trace", "sizes", "worker-hours", "within", "first late", "next late", "orders", "reversed"]
    ]
    figures: dict[str, object] = {}
    for file, divisor in TRACES.items():
        name, rows = file.partition(".")[0], read_trace(options.traces / file)
        rows = [replace(row, input_len=max(1, row.input_len // divisor)) for row in rows]
        bench = Bench(rows, COSTS, options.ttft, options.itl)
        sizes, fixed = bench.fixed()
        foresight, following = bench.foresight(), bench.following(slo, sizes)
        foresight_steady, from_least = bench.foresight_steady(), bench.following(slo, PoolSizes(1, 1))
        told = f"fixed, {sizes.prefill} prefill and {sizes.decode} decode"
        labels = (told, "foresight", "foresight, steady", "following", "following, from the least sizes")
        for label, run in zip(labels, (fixed, foresight, foresight_steady, following, from_least), strict=True):
            shares = [f"{share:.1%}" for share in (run.within, run.late_first, run.late_next)]
            table.append([name, label, round(run.hours, 2), *shares, run.orders, run.reversed_soon])
        figures[f"{name}: worker-hours over foresight"] = following.hours / foresight.hours
        figures[f"{name}: worker-hours over steady foresight"] = following.hours / foresight_steady.hours
        figures[f"{name}: worker-hours over the best fixed sizes"] = following.hours / fixed.hours
        figures[f"{name}: requests within the limits"] = following.within
        figures[f"{name}: orders reversed within {REVERSE_S:.0f} s"] = following.reversed_soon
    write_result("scaling", figures, {"costs": asdict(COSTS), "slo": asdict(slo)}, table)


if __name__ == "__main__":
    main()
