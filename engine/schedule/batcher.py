"""Who runs in the next step, and how much of it. Pure: values in, a plan out.

The roles bring their own batchers, `ContinuousBatcher` is the plain one; what they share is in engine/schedule/fit.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


@dataclass(frozen=True)
class Candidate:
    """What a batcher knows of a sequence. `num_known` counts prompt and output tokens, `num_computed` those with KV."""

    handle: int
    num_known: int
    num_computed: int
    num_blocks: int

    @property
    def num_missing(self) -> int:
        """Tokens to run before the next one can be sampled: 1 while decoding, 0 while fetching."""
        return self.num_known - self.num_computed


@dataclass(frozen=True)
class Pages:
    """What a pool has: pages that can be allocated now, pages that soon can, and the size of one in tokens."""

    num_allocatable: int
    num_draining: int
    block_size: int

    def needed(self, candidate: Candidate, num_tokens: int) -> int:
        """Pages to add before `num_tokens` more tokens of a candidate can be run."""
        return max(0, -(-(candidate.num_computed + num_tokens) // self.block_size) - candidate.num_blocks)

    def affordable(self, candidate: Candidate, num_pages: int) -> int:
        """Tokens of a candidate that can be run with `num_pages` more pages."""
        return (candidate.num_blocks + num_pages) * self.block_size - candidate.num_computed


class Gate(Enum):
    """What the queue waits for: fewer sequences to have pages, or more pages to be free."""

    SLOT = "slot"
    PAGES = "pages"


@dataclass(frozen=True)
class Plan:
    """What the engine does next: first preempt, then admit (in order), then run so many tokens of each handle.

    gate: what those wait for who are not admitted, if there are any.
    """

    preempt: tuple[int, ...] = ()
    admit: tuple[int, ...] = ()
    run: dict[int, int] = field(default_factory=dict)
    gate: Gate = Gate.PAGES


class Batcher(Protocol):
    """Decides a step. `waiting` and `running` are in order of arrival; those that fetch are running and lack nothing.

    A plan is an intention: pages that are shared or drain may make it fall short, and the engine then runs what fits.
    """

    def plan(self, waiting: Sequence[Candidate], running: Sequence[Candidate], pages: Pages) -> Plan: ...
