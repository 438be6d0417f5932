"""Who runs in the next step, and how much of it. Pure: values in, a plan out.

The roles bring their own batchers; `ContinuousBatcher` is the plain one: every running choice that only lacks its last
token decodes, what is left of the step's tokens goes to prompts in order of arrival, and the youngest yields its pages
when the pool is full. Source: Orca (OSDI '22) for iteration-level batching, Sarathi-Serve (OSDI '24) for chunking.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
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
        """Tokens to run before the next one can be sampled; 1 while decoding."""
        return self.num_known - self.num_computed


@dataclass(frozen=True)
class Pages:
    """What is left of a pool: pages that can be allocated now, and the size of one in tokens."""

    num_allocatable: int
    block_size: int

    def needed(self, candidate: Candidate, num_tokens: int) -> int:
        """Pages to add before `num_tokens` more tokens of a candidate can be run."""
        return max(0, -(-(candidate.num_computed + num_tokens) // self.block_size) - candidate.num_blocks)


@dataclass(frozen=True)
class Plan:
    """What the engine does next: first preempt, then admit (in order), then run so many tokens of each handle."""

    preempt: tuple[int, ...] = ()
    admit: tuple[int, ...] = ()
    run: dict[int, int] = field(default_factory=dict)


class Batcher(Protocol):
    """Decides a step. `waiting` and `running` are in order of arrival; sequences that fetch are in neither."""

    def plan(self, waiting: Sequence[Candidate], running: Sequence[Candidate], pages: Pages) -> Plan: ...


@dataclass(frozen=True)
class ContinuousBatcher:
    """Decode first, then prompts in chunks, oldest first.

    max_step_tokens: tokens of one step over all sequences; at least max_running.
    max_running: sequences with pages at a time.
    """

    max_step_tokens: int = 2048
    max_running: int = 128

    def plan(self, waiting: Sequence[Candidate], running: Sequence[Candidate], pages: Pages) -> Plan:
        run, preempt, left = fit(running, pages, self.max_step_tokens)
        admit = () if preempt else admissible(waiting, left, self.max_running - len(running))
        return Plan(preempt, admit, run)


def fit(running: Sequence[Candidate], pages: Pages, max_step_tokens: int) -> tuple[dict[int, int], tuple[int, ...], Pages]:
    raise NotImplementedError
