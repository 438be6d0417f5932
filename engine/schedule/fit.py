"""The common part of all batchers: fit running sequences into a step, and admit from the queue. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.schedule.batcher import Candidate, Gate, Pages, Phase, Plan


@dataclass(frozen=True)
class StepFit:
    """Tokens to run by handle, sequences to preempt for them, and the pages left."""

    run: dict[int, int]
    preempt: tuple[int, ...]
    num_allocatable: int

    def plan_admitting(self, waiting: Sequence[Candidate], pages: Pages, *, num_slots: int, num_spare: int) -> Plan:
        """Makes a plan that also admits from the head of the queue, unless a sequence must yield.

        num_slots: sequences to admit at most. num_spare: pages for their known tokens and the next one.
        """
        if self.preempt:
            return Plan(self.preempt, (), self.run)
        room = max(0, num_slots)
        admitted = _admissible(waiting[:room], pages, num_spare)
        return Plan((), admitted, self.run, Gate.SLOT if len(admitted) == room else Gate.PAGES)


def fit_running(running: Sequence[Candidate], pages: Pages, max_step_tokens: int) -> StepFit:
    """Gives tokens to decoding sequences first and pages to older ones first; a chunk shrinks before a preemption.

    While pages drain no sequence is preempted: the pages that come free may do.
    """
    for_chunks = max(0, max_step_tokens - sum(candidate.phase is Phase.DECODE for candidate in running))
    sharing = _Sharing(running, pages)
    run: dict[int, int] = {}
    for age, candidate in enumerate(running):
        if candidate in sharing.yielding:
            continue
        decodes = candidate.phase is Phase.DECODE
        wanted = 1 if decodes else min(candidate.num_missing, for_chunks)
        granted = sharing.grant(age, wanted)
        if granted:
            run[candidate.handle] = granted
            for_chunks -= 0 if decodes else granted
    return StepFit(run, tuple(victim.handle for victim in sharing.yielding), sharing.num_left)


class _Sharing:
    """The pages of a pool while a step gives them out, and the sequences that yield theirs."""

    def __init__(self, running: Sequence[Candidate], pages: Pages) -> None:
        self._running = running
        self._pages = pages
        self.num_left = pages.num_allocatable
        self.yielding: list[Candidate] = []

    def grant(self, age: int, num_tokens: int) -> int:
        """Grants as many of these tokens as there are pages; for the first of them, younger sequences yield."""
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
    """Picks sequences from the head of the queue while their known tokens, and the next one, find pages."""
    admitted = []
    for candidate in waiting:
        num_spare -= pages.needed_in_all(candidate)
        if num_spare < 0:
            break
        admitted.append(candidate.handle)
    return tuple(admitted)
