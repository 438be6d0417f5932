"""Who runs in the next step, and how much of it. Pure: values in, a plan out.

The roles bring their own batchers. `ContinuousBatcher` is the plain one: every running choice that only lacks its last
token decodes, what is left of the step's tokens goes to prompts in order of arrival, and the youngest yields its pages
when the pool is full. Source: Orca (OSDI '22) for iteration-level batching, Sarathi-Serve (OSDI '24) for chunking.
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


@dataclass(frozen=True)
class ContinuousBatcher:
    """Decode first, then prompts in chunks, oldest first.

    max_step_tokens: tokens of one step over all sequences; at least max_running.
    max_running: sequences with pages at a time.
    """

    max_step_tokens: int = 2048
    max_running: int = 128

    def plan(self, waiting: Sequence[Candidate], running: Sequence[Candidate], pages: Pages) -> Plan:
        fitted = fit(running, pages, self.max_step_tokens)
        if fitted.preempt:
            return Plan(fitted.preempt, (), fitted.run)
        room = max(0, self.max_running - len(running))
        admit = admissible(waiting[:room], pages, fitted.num_allocatable - len(running))
        return Plan((), admit, fitted.run, gate_after(admit, room))


@dataclass(frozen=True)
class Fit:
    """What of the running can run, who must yield for it, and how many pages are then left."""

    run: dict[int, int]
    preempt: tuple[int, ...]
    num_allocatable: int


def fit(running: Sequence[Candidate], pages: Pages, max_step_tokens: int) -> Fit:
    """Gives tokens to those that decode first and pages to the older first; a chunk shrinks before anyone is preempted.

    While pages drain nobody is preempted: what is coming free may do.
    """
    num_decoding = sum(candidate.num_missing == 1 for candidate in running)
    for_chunks = max(0, max_step_tokens - num_decoding)
    left = pages.num_allocatable
    run: dict[int, int] = {}
    yielding: list[Candidate] = []
    for age, candidate in enumerate(running):
        if candidate in yielding:
            continue
        wanted = 1 if candidate.num_missing == 1 else min(candidate.num_missing, for_chunks)
        if wanted and pages.affordable(candidate, left) < 1 and not pages.num_draining:
            victims = _youngest(running[age + 1 :], yielding, pages.needed(candidate, 1) - left)
            yielding += victims
            left += sum(victim.num_blocks for victim in victims)
        granted = max(0, min(wanted, pages.affordable(candidate, left)))
        if granted:
            run[candidate.handle] = granted
            left -= pages.needed(candidate, granted)
            for_chunks -= granted if candidate.num_missing > 1 else 0
    return Fit(run, tuple(victim.handle for victim in yielding), left)


def _youngest(younger: Sequence[Candidate], yielding: Sequence[Candidate], num_pages: int) -> list[Candidate]:
    """The youngest that together hold `num_pages`, or all there are."""
    victims: list[Candidate] = []
    for candidate in reversed(younger):
        if sum(victim.num_blocks for victim in victims) >= num_pages:
            break
        if candidate not in yielding and candidate.num_missing and candidate.num_blocks:
            victims.append(candidate)
    return victims


def admissible(waiting: Sequence[Candidate], pages: Pages, num_allocatable: int) -> tuple[int, ...]:
    """Those from the head of the queue whose known tokens, and the next one, find pages."""
    admitted = []
    for candidate in waiting:
        num_allocatable -= pages.needed(candidate, candidate.num_missing + 1)
        if num_allocatable < 0:
            break
        admitted.append(candidate.handle)
    return tuple(admitted)


def gate_after(admit: Sequence[int], room: int) -> Gate:
    """What the next in the queue waits for, where `admit` were admitted and `room` more might have been."""
    return Gate.SLOT if len(admit) == room else Gate.PAGES
