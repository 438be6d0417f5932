"""Pairs of values in place of all combinations, for tests whose parameters are independent: a covering array."""

import os
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import combinations

import pytest

RUNS_ALL = os.environ.get("BATON_TESTS") == "all"
"""Whether every combination of parameters runs, and a thousand seeds."""


class Axes(tuple[Hashable, ...]):
    """A parameter whose parts are values of their own."""


def covering(rows: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """Returns the places of few rows that have, between them, every combination of `strength` values of any row."""
    held = [set(combinations(enumerate(row), min(strength, len(row)))) for row in rows]
    missing = set().union(*held)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda place: len(held[place] & missing))
        missing -= held[best]
        chosen.append(best)
    return sorted(chosen)


def left_out(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yields the cases of tests marked `pairs` that others make up for.

    pairs(3) stands for triples; pairs(triton=1) says that a case with this id needs to have no pair, only each value
    once, and triton=0 that one such case is enough. Each part of `Axes` is a value.
    """
    cases: dict[tuple[str, int], list[pytest.Function]] = {}
    for item in items:
        mark = item.get_closest_marker("pairs")
        if mark is not None and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            strengths = [mark.kwargs[one] for one in item.callspec.id.split("-") if one in mark.kwargs]
            (strength,) = strengths or mark.args or (2,)
            cases.setdefault((f"{item.parent}::{item.originalname}", strength), []).append(item)
    for (_, strength), alike in cases.items():
        kept = covering([[*_values(one.callspec.params.values())] for one in alike], strength)
        yield from (one for place, one in enumerate(alike) if place not in kept)


def _values(params: Iterable[object]) -> Iterator[Hashable]:
    for one in params:
        yield from one if isinstance(one, Axes) else (id(one),)
