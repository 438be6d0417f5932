"""What all batchers do alike: fit the running into a step, and admit from the queue where there is room. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.batcher import Candidate, Gate, Pages, Plan


@dataclass(frozen=True)
class Fit:
    """What of the running can run, who must yield for it, and how many pages are then left."""

    run: dict[int, int]
    preempt: tuple[int, ...]
    num_allocatable: int

    def admitting(self, waiting: Sequence[Candidate], pages: Pages, *, num_slots: int, num_spare: int) -> Plan:
        """A plan that also admits from the head of the queue, unless someone must yield.

        num_slots: how many may be admitted. num_spare: pages that they may claim, for known tokens and the next one.
        """
        if self.preempt:
            return Plan(self.preempt, (), self.run)
        room = max(0, num_slots)
        admitted = _admissible(waiting[:room], pages, num_spare)
        return Plan((), admitted, self.run, Gate.SLOT if len(admitted) == room else Gate.PAGES)


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


def _admissible(waiting: Sequence[Candidate], pages: Pages, num_spare: int) -> tuple[int, ...]:
    """Those from the head of the queue whose known tokens, and the next one, find pages."""
    admitted = []
    for candidate in waiting:
        num_spare -= pages.needed(candidate, candidate.num_missing + 1)
        if num_spare < 0:
            break
        admitted.append(candidate.handle)
    return tuple(admitted)
