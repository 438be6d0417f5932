"""The batcher of a prefill worker."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.schedule.batcher import Candidate, Pages, Plan, fit_running


@dataclass(frozen=True)
class PrefillBatcher:
    """Shortest prompt first by tokens left to compute, with each later arrival in favour of a waiting prompt.

    A prompt that would hold up short ones lets them pass, but no more than `num_missing / patience_tokens` of them.
    The batcher admits a prompt with pages for all of it only, so prompts do not take pages from one another half-way.
    Source: shortest remaining processing time first, with linear ageing.

    max_step_tokens: tokens of one step over all sequences; the size of a chunk.
    max_running: sequences with pages at a time.
    patience_tokens: tokens by which a prompt may be longer for each later arrival, and still come first.
    """

    max_step_tokens: int = 2048
    max_running: int = 128
    patience_tokens: int = 512

    def plan(self, waiting: Sequence[Candidate], running: Sequence[Candidate], pages: Pages) -> Plan:
        step = fit_running(self._by_urgency(running), pages, self.max_step_tokens)
        num_slots = self.max_running - len(running)
        num_spare = _num_unclaimed(running, pages)
        return step.plan_admitting(self._by_urgency(waiting), pages, num_slots=num_slots, num_spare=num_spare)

    def _by_urgency(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Sorts candidates; their handles grow with arrival."""
        return sorted(candidates, key=lambda one: one.num_missing + one.handle * self.patience_tokens)


def _num_unclaimed(running: Sequence[Candidate], pages: Pages) -> int:
    """Counts the pages that are left when each running sequence has pages for its whole prompt."""
    return pages.num_allocatable - sum(pages.needed_in_all(one) for one in running)
