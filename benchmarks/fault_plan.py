"""Which faults a service meets, and when: decided by a seed before the first one happens. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class FaultKind(Enum):
    """KILL: SIGKILL to a worker. PAUSE: a worker stopped and continued. The others hit what they name.

    The router is not among them: a client that loses the router gets UNAVAILABLE and asks again.
    """

    KILL = "kill"
    PAUSE = "pause"
    REDIS_KILL = "redis-kill"
    REDIS_PAUSE = "redis-pause"
    NODE_KILL = "node-kill"
    CONTROLLER_KILL = "controller-kill"


@dataclass(frozen=True)
class Fault:
    """`draw`, from 0 to 1, chooses among the workers that there are then. `pause_s`: until what stopped goes on."""

    at_s: float
    kind: FaultKind
    draw: float
    pause_s: float

    def choose(self, workers: Sequence[str]) -> str:
        """Chooses the worker that is hit."""
        return workers[int(self.draw * len(workers))]


def plan(seed: int, duration_s: float, every_s: float, kinds: Sequence[FaultKind], max_pause_s: float) -> list[Fault]:
    """Plans a fault every `every_s` seconds, the first after as long, none in the last `every_s`. Kinds come in turns.

    In turns, so that also a short run meets every kind; the seed decides which worker is hit and for how long.
    """
    draw = random.Random(seed)
    num_faults = max(0, round(duration_s / every_s) - 1)
    return [
        Fault((number + 1) * every_s, kinds[number % len(kinds)], draw.random(), draw.uniform(0.5, 1.0) * max_pause_s)
        for number in range(num_faults)
    ]
