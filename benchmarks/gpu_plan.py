"""The steps of a run on a GPU, and how its time is divided among them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """A part of a run, in a process of its own.

    least_s: it is not begun with less time. limit_s: it is stopped then, whatever time is left. grace_s: the part of
    its time that is for ending what it has started. after: a command that ends what a stopped step has left behind.
    wants: a step that comes before it.
    """

    name: str
    command: tuple[str, ...]
    least_s: float
    limit_s: float
    grace_s: float = 2.0
    after: tuple[str, ...] = ()
    wants: str = ""


Stage = tuple[Step, ...]
"""Steps that run side by side, of which at most one times anything; stages follow one another."""


def least_s(stage: Stage) -> float:
    return max(step.least_s for step in stage)


def limit_s(stage: Stage) -> float:
    return max(step.limit_s for step in stage)


def seconds_for_first(stages: Sequence[Stage], left_s: float) -> float:
    """Returns the seconds that the first stage gets of what is left; 0 where it is to be skipped.

    The most wanted stages come first: the first stage may take all that is spare once each later stage for which there
    is time has its least.
    """
    first, *later = stages
    if least_s(first) > left_s:
        return 0.0
    spare_s = left_s - least_s(first)
    for stage in later:
        spare_s -= least_s(stage) if least_s(stage) <= spare_s else 0.0
    return min(limit_s(first), least_s(first) + spare_s)


def choose(known: dict[str, Step], order: str) -> list[Stage]:
    """Reads an order of steps: names with commas between, and a plus between steps that run side by side.

    A step that another one wants, and that does not stand before it, is put there. Raises ValueError, with the names
    there are, for a name that is none of them or stands twice.
    """
    names = [[one.strip() for one in part.split("+")] for part in order.split(",")]
    asked = [one for part in names for one in part]
    if unknown := [one for one in asked if one not in known]:
        raise ValueError(f"no step is called {', '.join(map(repr, unknown))}: there are {', '.join(known)}")
    if len({*asked}) < len(asked):
        raise ValueError("a step stands twice")
    stages, done = list[Stage](), set[str]()
    for part in names:
        for wanted in dict.fromkeys(known[one].wants for one in part):
            if wanted and wanted not in done:
                stages.append((known[wanted],))
                done.add(wanted)
        if left := [one for one in part if one not in done]:
            stages.append(tuple(known[one] for one in left))
            done.update(left)
    return stages
