"""The plain batcher, of an engine without a role."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.schedule.batcher import Candidate, Pages, Plan, StepFit, fit_running


@dataclass(frozen=True)
class ContinuousBatcher:
    """Decode first, then prompts in chunks, oldest first; the youngest yields its pages when the pool is full.

    Source: Orca (OSDI '22) for iteration-level batching, Sarathi-Serve (OSDI '24) for chunking.

    max_step_tokens: tokens of one step over all sequences; at least max_running.
    max_running: sequences with pages at a time.
    """

    max_step_tokens: int = 2048
    max_running: int = 128

    def plan(self, waiting: Sequence[Candidate], running: Sequence[Candidate], pages: Pages) -> Plan:
        step = fit_running(running, pages, self.max_step_tokens)
        num_slots = self.max_running - len(running)
        return step.plan_admitting(waiting, pages, num_slots=num_slots, num_spare=_num_spare(running, step))


def _num_spare(running: Sequence[Candidate], step: StepFit) -> int:
    """Pages left after the step when every running sequence has one more to grow into."""
    return step.num_allocatable - len(running)
