"""Gaps between the messages of streams. Pure."""

from collections.abc import Sequence
from itertools import pairwise


def gaps_while_all_open(arrivals: Sequence[Sequence[float]]) -> list[float]:
    """Of all streams, from when each of them had two messages until one of them had its last.

    arrivals: for each stream, when its messages came. Opening many streams takes a server long; that is not asked here.
    """
    opened = max(stream[1] for stream in arrivals)
    ended = min(stream[-1] for stream in arrivals)
    return [
        after - before
        for stream in arrivals
        for before, after in pairwise(stream)
        if opened <= before and after <= ended
    ]
