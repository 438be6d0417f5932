"""A page: what clients see of each fault, by the step of a hand-off at which it strikes."""

from itertools import product

from tests.simulator.client import COMPLETE
from tests.simulator.plan import APART, SINKS, Ask, Client, Fault, Kind, Plan
from tests.simulator.world import simulate

STEPS = {
    "prefill begin": "the order reaches prefill",
    "prefill turn": "a step of prefill",
    "prefill reserved": "slots are reserved, not written",
    "prefill commit": "slots are written, not found",
    "prefill update": "prefill answers",
    "decode begin": "the order reaches decode",
    "decode lease": "before decode's lease",
    "decode peer": "decode asks prefill's node",
    "decode peer block": "a block is on its way",
    "decode leased": "under the lease",
    "decode released": "blocks are fetched",
    "decode turn": "a step of decode",
    "decode update": "tokens leave decode",
}
NTHS = (1, 3)
WINDOWS = (None, SINKS)
LONG_S = 1.0
HEAD = """# Faults at each step of a hand-off

Made by `python tests/simulate.py --table`; tests/simulator/test_table.py compares cells with runs. A cell is four runs
of the simulator with four requests and one fault, at the first and the third time that a worker comes to the step, of
a model that keeps all KV and of one with a window and sinks; one prefill worker on one node, two decode workers on
another. It tells the ends of these requests, and the longest time of one that is over a second:

- **same**: the answer of a run without faults, by the first attempt.
- **again**: the same answer, by a further attempt.
- **asked again**: the client's connection broke, and its next call got the same answer.
- the name of an error: a request ended with it.

No run broke an invariant; nor did any of the seeds that [goals_store.md](../benchmarks/results/goals_store.md) counts.
A mute or deaf line loses what goes one way, until the keepalive ends it after 15 s; an engine that hangs is given up
after 5 s, in the simulator; another worker replaces a dead one within a second.
"""


def table() -> str:
    """Runs each fault at each step; returns the page. AssertionError if an invariant breaks."""
    rows = [["fault", *STEPS.values()], ["---"] * (len(STEPS) + 1)]
    rows += [[kind.value, *(cell(kind, step) for step in STEPS)] for kind in Kind]
    return "\n".join([HEAD, *(f"| {' | '.join(row)} |" for row in rows)])


def _asks() -> tuple[Ask, ...]:
    return tuple(Ask(kind, number * 0.03, Client.STAYS, 0.0) for number, kind in enumerate((5, 12, 45, 63)))


def cell(kind: Kind, step: str) -> str:
    """Runs a fault at a step; returns what clients saw. AssertionError if an invariant breaks."""
    seen: dict[str, None] = {}
    longest_s = 0.0
    for window, nth in product(WINDOWS, NTHS):
        plan = Plan(nth, APART, 1, 2, 40, 48, 512, _asks(), (Fault(kind, step, nth, 0, 4.0),), window)
        run = simulate(plan)
        assert not run.violations, run.violations
        for number, outcome in enumerate(run.outcomes):
            num_attempts = sum(attempt.startswith(f"r{number}/") for attempt in run.attempts)
            served = "asked again" if run.num_cut[number] else "same" if num_attempts == 1 else "again"
            seen[served if outcome == COMPLETE else outcome] = None
        longest_s = max(longest_s, *run.took_s)
    return ", ".join(sorted(seen, reverse=True)) + (f", {longest_s:.0f} s" if longest_s > LONG_S else "")
