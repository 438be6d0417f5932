"""How a decode worker puts its steps together."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.schedule.batcher import Candidate, Pages, Plan
from engine.schedule.fit import fit_running


@dataclass(frozen=True)
class DecodeBatcher:
    """Decode first; what was not fetched is computed in chunks small enough not to hold up those that decode.

    max_step_tokens: tokens of one step over all sequences; at least max_running + max_chunk_tokens.
    max_running: sequences with pages at a time.
    max_chunk_tokens: of a step in which anyone decodes, tokens that go to chunks; the bound of inter-token latency.
    """

    max_step_tokens: int = 2048
    max_running: int = 128
    max_chunk_tokens: int = 256

    def plan(self, waiting: Sequence[Candidate], running: Sequence[Candidate], pages: Pages) -> Plan:
        step = fit_running(running, pages, self._num_step_tokens(running))
        num_slots = self.max_running - len(running)
        return step.plan_admitting(waiting, pages, num_slots=num_slots, num_spare=_num_spare(running, pages))

    def _num_step_tokens(self, running: Sequence[Candidate]) -> int:
        num_decoding = sum(candidate.num_missing == 1 for candidate in running)
        if not num_decoding:
            return self.max_step_tokens
        return min(self.max_step_tokens, num_decoding + self.max_chunk_tokens)


def _num_spare(running: Sequence[Candidate], pages: Pages) -> int:
    """Pages left when every running sequence has those for its next token, and one more to grow into."""
    spoken_for = sum(pages.needed(candidate, candidate.num_missing + 1) + 1 for candidate in running)
    return pages.num_allocatable - spoken_for
