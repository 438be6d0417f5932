"""The seam of batchers, which choose the next step's sequences and the tokens of each. Values in, a plan out.

The roles bring their own batchers; `ContinuousBatcher` serves engines without a role. All use `fit_running`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from wire.load.fairness import ALONE, Standing


class Phase(Enum):
    """The phase of a sequence in an engine; batchers see the first four.

    PREFILL: known tokens before the last lack KV. DECODE: each step runs the last emitted token and brings the next.
    HANDING_OFF: the first token is there, and the pages stay until the store has the blocks.
    """

    WAITING = "waiting"
    FETCHING = "fetching"
    PREFILL = "prefill"
    DECODE = "decode"
    HANDING_OFF = "handing_off"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A sequence as batchers see it. `num_known` counts prompt and output tokens, `num_computed` tokens with KV.

    num_blocks: length of the block table, whose first `num_behind` blocks have left the window and have no page.
    num_spare: pages reserved beyond these. chunk_end: the position at which a chunk ends at the latest; None without a
    bound. standing: its tenant's, its priority, and whether it is deferred.
    """

    handle: int
    phase: Phase
    num_known: int
    num_computed: int
    num_blocks: int
    num_behind: int = 0
    num_spare: int = 0
    chunk_end: int | None = None
    standing: Standing = ALONE

    @property
    def num_pages(self) -> int:
        return self.num_blocks - self.num_behind + self.num_spare

    @property
    def num_missing(self) -> int:
        """Tokens to run before the next one can be sampled; 0 while fetching."""
        return self.num_known - self.num_computed

    @property
    def cost(self) -> float:
        """Tokens that fair shares count when it goes before others."""
        return self.num_missing

    @property
    def num_runnable(self) -> int:
        """Tokens to run in one step."""
        return self.num_missing if self.chunk_end is None else min(self.num_missing, self.chunk_end - self.num_computed)


@dataclass(frozen=True)
class Pages:
    """Pages of a pool: allocatable now, and draining, which are allocatable soon. block_size: tokens of a page.

    most_needed: the most pages that a sequence needs at once; None without a bound.
    """

    num_allocatable: int
    num_draining: int
    block_size: int
    most_needed: int | None = None

    def needed(self, candidate: Candidate, num_tokens: int) -> int:
        """Pages to add so that one step can run `num_tokens` more tokens of a candidate."""
        return max(0, -(-(candidate.num_computed + num_tokens) // self.block_size) - candidate.num_blocks)

    def needed_in_all(self, candidate: Candidate) -> int:
        """Pages to add so that steps can run all known tokens of a candidate, and the next."""
        needed = self.needed(candidate, candidate.num_missing + 1)
        return needed if self.most_needed is None else min(needed, max(0, self.most_needed - candidate.num_pages))

    def affordable(self, candidate: Candidate, num_pages: int) -> int:
        """Tokens of a candidate that a step can run with `num_pages` more pages."""
        return (candidate.num_blocks + num_pages) * self.block_size - candidate.num_computed


FIRST_CHUNK_TOKENS = 256
"""Tokens of chunks beside decoding sequences before the cost of a token is learned."""


@dataclass(frozen=True)
class StepCosts:
    """Learned costs in seconds. decode_s: a step without chunks. token_s: a token of a chunk; None before the first."""

    decode_s: float = 0.0
    token_s: float | None = None

    def chunk_tokens(self, max_step_s: float, most: int, block_size: int) -> int:
        """Returns the tokens of chunks that fit beside decoding sequences into a step of `max_step_s`.

        Whole blocks, at least one, and at most `most`, whatever that is.
        """
        fitting = FIRST_CHUNK_TOKENS if self.token_s is None else int((max_step_s - self.decode_s) / self.token_s)
        num_blocks = max(1, min(fitting, most) // block_size)
        return min(most, num_blocks * block_size)


UNLEARNED = StepCosts()


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
    """A scheduling policy. `waiting` and `running` are in order of arrival; a fetching sequence is running and lacks no
    tokens.

    If shared or draining pages make a plan fall short, the engine runs as much as fits. A step in which all sequences
    decode and have pages needs no plan: each runs its token.
    """

    def plan(
        self,
        waiting: Sequence[Candidate],
        running: Sequence[Candidate],
        pages: Pages,
        costs: StepCosts = UNLEARNED,
    ) -> Plan: ...


@dataclass(frozen=True)
class StepFit:
    """Tokens to run by handle, sequences to preempt for them, and the pages left."""

    run: dict[int, int]
    preempt: tuple[int, ...]
    num_allocatable: int

    def plan_admitting(self, waiting: Sequence[Candidate], pages: Pages, *, num_slots: int, num_spare: int) -> Plan:
        """Makes a plan that also admits from the head of the queue, unless a sequence is preempted.

        num_slots: the most sequences to admit. num_spare: pages for their known tokens and the next.
        """
        if self.preempt:
            return Plan(self.preempt, (), self.run)
        room = max(0, num_slots)
        admitted = _admissible(waiting[:room], pages, num_spare)
        return Plan((), admitted, self.run, Gate.SLOT if len(admitted) == room else Gate.PAGES)


def fit_running(running: Sequence[Candidate], pages: Pages, max_step_tokens: int) -> StepFit:
    """Gives tokens to decoding sequences first and pages to older sequences first; shrinks a chunk before it preempts.

    Preempts no sequence while pages drain: these may suffice.
    """
    for_chunks = max(0, max_step_tokens - sum(candidate.phase is Phase.DECODE for candidate in running))
    sharing = _Sharing(running, pages)
    run: dict[int, int] = {}
    for age, candidate in enumerate(running):
        if candidate in sharing.yielding:
            continue
        decodes = candidate.phase is Phase.DECODE
        wanted = 1 if decodes else min(candidate.num_runnable, for_chunks)
        granted = sharing.grant(age, wanted)
        if granted:
            run[candidate.handle] = granted
            for_chunks -= 0 if decodes else granted
    return StepFit(run, tuple(victim.handle for victim in sharing.yielding), sharing.num_left)


class _Sharing:
    """The pages of a pool while a step gives them out, and the sequences that it preempts."""

    def __init__(self, running: Sequence[Candidate], pages: Pages) -> None:
        self._running = running
        self._pages = pages
        self.num_left = pages.num_allocatable
        self.yielding: list[Candidate] = []

    def grant(self, age: int, num_tokens: int) -> int:
        """Grants as many of these tokens as there are pages; for the first token it preempts younger sequences."""
        candidate = self._running[age]
        if num_tokens and self._pages.affordable(candidate, self.num_left) < 1 and not self._pages.num_draining:
            self._preempt(self._running[age + 1 :], self._pages.needed(candidate, 1) - self.num_left)
        granted = max(0, min(num_tokens, self._pages.affordable(candidate, self.num_left)))
        if granted:
            self.num_left -= self._pages.needed(candidate, granted)
        return granted

    def _preempt(self, younger: Sequence[Candidate], num_pages: int) -> None:
        victims = _youngest(younger, self.yielding, num_pages)
        self.yielding += victims
        self.num_left += sum(victim.num_pages for victim in victims)


def _youngest(younger: Sequence[Candidate], yielding: Sequence[Candidate], num_pages: int) -> list[Candidate]:
    """Picks the youngest sequences that together hold `num_pages`, or all."""
    victims: list[Candidate] = []
    for candidate in reversed(younger):
        if sum(victim.num_pages for victim in victims) >= num_pages:
            break
        if candidate not in yielding and candidate.phase is not Phase.FETCHING and candidate.num_pages:
            victims.append(candidate)
    return victims


def _admissible(waiting: Sequence[Candidate], pages: Pages, num_spare: int) -> tuple[int, ...]:
    """Picks sequences from the head of the queue while there are pages for their known tokens and the next."""
    admitted = []
    for candidate in waiting:
        num_spare -= pages.needed_in_all(candidate)
        if num_spare < 0:
            break
        admitted.append(candidate.handle)
    return tuple(admitted)
