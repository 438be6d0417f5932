"""The batcher of a decode worker."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.schedule.batcher import Candidate, Pages, Phase, Plan, fit_running


@dataclass(frozen=True)
class DecodeBatcher:
    """Decode first, then prompt tokens without KV, in chunks small enough not to hold decoding sequences up.

    max_step_tokens: tokens of one step over all sequences; at least max_running + max_chunk_tokens.
    max_running: sequences with pages at a time.
    max_chunk_tokens: tokens of chunks in a step with decoding sequences; bounds the inter-token latency.
    """

    max_step_tokens: int = 2048
    max_running: int = 128
    max_chunk_tokens: int = 256

    def plan(self, waiting: Sequence[Candidate], running: Sequence[Candidate], pages: Pages) -> Plan:
        step = fit_running(running, pages, self._num_step_tokens(running))
        num_slots = self.max_running - len(running)
        return step.plan_admitting(waiting, pages, num_slots=num_slots, num_spare=_num_spare(running, pages))

    def _num_step_tokens(self, running: Sequence[Candidate]) -> int:
        num_decoding = sum(candidate.phase is Phase.DECODE for candidate in running)
        if not num_decoding:
            return self.max_step_tokens
        return min(self.max_step_tokens, num_decoding + self.max_chunk_tokens)


def _num_spare(running: Sequence[Candidate], pages: Pages) -> int:
    """Counts the pages that are left when each running sequence has pages for its next token and one to grow into."""
    spoken_for = sum(pages.needed_in_all(candidate) + 1 for candidate in running)
    return pages.num_allocatable - spoken_for
