"""The seam of batchers: which sequences run in the next step, and how many tokens of each. Values in, a plan out.

The roles bring their own batchers, `ContinuousBatcher` is the plain one; their common part is engine/schedule/fit.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class Phase(Enum):
    """The phase of a sequence at an engine; batchers see the first four.

    PREFILL: some known tokens besides the last one emitted have no KV yet. DECODE: each step takes the last emitted
    token and brings the next. HANDING_OFF: the first token is there, and the pages stay until the store has them.
    """

    WAITING = "waiting"
    FETCHING = "fetching"
    PREFILL = "prefill"
    DECODE = "decode"
    HANDING_OFF = "handing_off"
    ENDED = "ended"


@dataclass(frozen=True)
class Candidate:
    """A sequence as batchers see it. `num_known` counts prompt and output tokens, `num_computed` tokens with KV.

    num_blocks: up to the last page; `num_behind` of them are behind the window, and have no page. num_spare: further
    pages, for later.
    """

    handle: int
    phase: Phase
    num_known: int
    num_computed: int
    num_blocks: int
    num_behind: int = 0
    num_spare: int = 0

    @property
    def num_pages(self) -> int:
        return self.num_blocks - self.num_behind + self.num_spare

    @property
    def num_missing(self) -> int:
        """Tokens to run before the next one can be sampled; 0 while fetching."""
        return self.num_known - self.num_computed


@dataclass(frozen=True)
class Pages:
    """Pages of a pool: allocatable now, and draining, which soon are. block_size: tokens of a page.

    most_needed: the most pages that a sequence needs at once; None without a bound.
    """

    num_allocatable: int
    num_draining: int
    block_size: int
    most_needed: int | None = None

    def needed(self, candidate: Candidate, num_tokens: int) -> int:
        """Pages to add before `num_tokens` more tokens of a candidate can be run, in one step."""
        return max(0, -(-(candidate.num_computed + num_tokens) // self.block_size) - candidate.num_blocks)

    def needed_in_all(self, candidate: Candidate) -> int:
        """Pages to add before all known tokens of a candidate, and the next one, can be run in steps."""
        needed = self.needed(candidate, candidate.num_missing + 1)
        return needed if self.most_needed is None else min(needed, max(0, self.most_needed - candidate.num_pages))

    def affordable(self, candidate: Candidate, num_pages: int) -> int:
        """Tokens of a candidate that can be run with `num_pages` more pages."""
        return (candidate.num_blocks + num_pages) * self.block_size - candidate.num_computed


class Gate(Enum):
    """The reason of a wait in the queue: too many sequences with pages, or too few free pages."""

    SLOT = "slot"
    PAGES = "pages"


@dataclass(frozen=True)
class Plan:
    """The next step of an engine: preempt, then admit, in order, then run `run[handle]` tokens of each sequence.

    gate: the reason why the rest of the queue waits.
    """

    preempt: tuple[int, ...] = ()
    admit: tuple[int, ...] = ()
    run: dict[int, int] = field(default_factory=dict)
    gate: Gate = Gate.PAGES


class Batcher(Protocol):
    """A policy. `waiting` and `running` are in order of arrival; a fetching sequence is running and lacks no tokens.

    A plan is an intention: shared or draining pages may make it fall short, and the engine then runs as much as fits.
    Nor is there a plan for a step in which all sequences decode and find their pages: each then runs its token.
    """

    def plan(self, waiting: Sequence[Candidate], running: Sequence[Candidate], pages: Pages) -> Plan: ...
