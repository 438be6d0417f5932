"""The plain batcher, of an engine without a role."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.schedule.batcher import UNLEARNED, Candidate, Pages, Plan, StepCosts, StepFit, fit_running


@dataclass(frozen=True)
class ContinuousBatcher:
    """A batcher that decodes first, then runs prompts in chunks, oldest first; a full pool preempts the youngest.

    Source: Orca (OSDI '22) for iteration-level batching, Sarathi-Serve (OSDI '24) for chunking.

    max_step_tokens: the most tokens of one step, at least max_running. max_running: the most sequences with pages.
    """

    max_step_tokens: int = 2048
    max_running: int = 128

    def plan(
        self,
        waiting: Sequence[Candidate],
        running: Sequence[Candidate],
        pages: Pages,
        costs: StepCosts = UNLEARNED,
    ) -> Plan:
        step = fit_running(running, pages, self.max_step_tokens)
        num_slots = self.max_running - len(running)
        return step.plan_admitting(waiting, pages, num_slots=num_slots, num_spare=_num_spare(running, step))


def _num_spare(running: Sequence[Candidate], step: StepFit) -> int:
    """Pages left after the step, less one for every running sequence."""
    return step.num_allocatable - len(running)
