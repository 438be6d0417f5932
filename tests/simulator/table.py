"""A page: what clients see of each fault, by the step of a hand-off at which it strikes."""

from dataclasses import replace
from itertools import product

from tests.simulator.client import COMPLETE
from tests.simulator.plan import APART, SINKS, SPREAD, Ask, Client, Fault, Kind, Plan
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
    "decode group": "a group of a split prefix is ordered",
    "decode jump": "decode jumps to blocks of a group",
}
NTHS = (1, 3)
LONG_S = 1.0
HEAD = """# Faults at each step of a hand-off

Made by `python tests/simulate.py --table`; tests/simulator/test_table.py compares cells with runs. A cell is six runs
of the simulator with one fault, at the first and the third time that a worker comes to the step, in three clusters with
one prefill worker on one node and two decode workers elsewhere:

- a model that keeps all KV, two nodes, four requests;
- the same with a model that has a window and sinks;
- a model that keeps all KV, three nodes, five requests. A block takes as long to read from another node or Redis as to
  compute, so that prefixes are split, and arenas are so small that blocks are evicted.

A cell tells the ends of these requests, and the longest time of one that is over a second:

- **same**: the answer of a run without faults, by the first attempt.
- **again**: the same answer, by a further attempt.
- **asked again**: the client's connection broke, and its next call got the same answer.
- the name of an error: a request ended with it.

No run of this page broke an invariant. Drawn seeds, and the one whose violation was the checker's own fault, stand in
[goals.md](../benchmarks/results/goals.md); tests/simulator draws others from a digest of the sources.
A mute or deaf line loses what goes one way, until the keepalive ends it after 15 s; an engine that hangs is given up
after 5 s, in the simulator; another worker replaces a dead one within a second.
"""


def table() -> str:
    """Runs each fault at each step; returns the page. AssertionError if an invariant breaks."""
    rows = [["fault", *STEPS.values()], ["---"] * (len(STEPS) + 1)]
    rows += [[kind.value, *(cell(kind, step) for step in STEPS)] for kind in Kind]
    return "\n".join([HEAD, *(f"| {' | '.join(row)} |" for row in rows)])


def _asks(*kinds: int) -> tuple[Ask, ...]:
    return tuple(Ask(kind, number * 0.03, Client.STAYS, 0.0) for number, kind in enumerate(kinds))


_WHOLE = Plan(0, APART, 1, 2, 40, 48, 512, _asks(5, 12, 45, 63), ())
SPLIT = replace(_WHOLE, layout=SPREAD, num_slots=20, asks=_asks(5, 12, 45, 63, 15), far_block_s=0.02)
CLUSTERS = (_WHOLE, replace(_WHOLE, window=SINKS), SPLIT)


def cell(kind: Kind, step: str) -> str:
    """Runs a fault at a step; returns what clients saw. AssertionError if an invariant breaks."""
    seen: dict[str, None] = {}
    longest_s = 0.0
    for world, nth in product(CLUSTERS, NTHS):
        run = simulate(replace(world, seed=nth, faults=(Fault(kind, step, nth, 0, 4.0),)))
        assert not run.violations, run.violations
        for number, outcome in enumerate(run.outcomes):
            num_attempts = sum(attempt.startswith(f"r{number}/") for attempt in run.attempts)
            served = "asked again" if run.num_cut[number] else "same" if num_attempts == 1 else "again"
            seen[served if outcome == COMPLETE else outcome] = None
        longest_s = max(longest_s, *run.took_s)
    return ", ".join(sorted(seen, reverse=True)) + (f", {longest_s:.0f} s" if longest_s > LONG_S else "")
