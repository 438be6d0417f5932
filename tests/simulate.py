"""Simulates the cluster with faults, seed by seed; prints the shortest trace of each seed that breaks an invariant.

python tests/simulate.py --start 1 --seeds 50
python tests/simulate.py --table > docs/hand-off-faults.md
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.simulator.plan import Plan, draw_plan, shrink
from tests.simulator.table import table
from tests.simulator.world import Run, simulate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=50, help="how many seeds")
    parser.add_argument("--trace", action="store_true", help="print the trace of every seed")
    parser.add_argument("--table", action="store_true", help="print what each fault does at each step of a hand-off")
    options = parser.parse_args()
    if options.table:
        print(table())
        return 0
    began_s, num_failed, num = time.monotonic(), 0, Counter[str]()
    for seed in range(options.start, options.start + options.seeds):
        run = simulate(draw_plan(seed))
        num.update(run.num)
        if options.trace:
            print(report(run))
        if run.violations:
            num_failed += 1
            print(report(shortest(run)))
    took_s = time.monotonic() - began_s
    counted = "".join(f", {count} {what}" for what, count in sorted(num.items(), reverse=True))
    print(f"{options.seeds} seeds, {num_failed} with violations{counted}, {took_s:.1f} s")
    return min(num_failed, 1)


def shortest(run: Run) -> Run:
    """Runs the smallest plan that still breaks one of the invariants that this run broke."""
    broken = {violation.invariant for violation in run.violations}

    def fails(plan: Plan) -> bool:
        return any(violation.invariant in broken for violation in simulate(plan).violations)

    return simulate(shrink(run.plan, fails))


def report(run: Run) -> str:
    violations = [str(violation) for violation in run.violations]
    return "\n".join([str(run.plan), *(f"  {line}" for line in run.trace), *violations, ""])


if __name__ == "__main__":
    sys.exit(main())
