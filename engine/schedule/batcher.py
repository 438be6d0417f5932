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
    """A sequence as batchers see it. `num_known` counts prompt and output tokens, `num_computed` tokens with KV."""

    handle: int
    phase: Phase
    num_known: int
    num_computed: int
    num_blocks: int

    @property
    def num_missing(self) -> int:
        """Tokens to run before the next one can be sampled; 0 while fetching."""
        return self.num_known - self.num_computed


@dataclass(frozen=True)
class Pages:
    """Pages of a pool: allocatable now, draining and so allocatable soon, and the size of a page in tokens."""

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
    """The reason of a wait in the queue: too many sequences with pages, or too few free pages."""

    SLOT = "slot"
    PAGES = "pages"


@dataclass(frozen=True)
class Plan:
    """The next step of an engine: first preempt, then admit (in order), then run so many tokens of each handle.

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
