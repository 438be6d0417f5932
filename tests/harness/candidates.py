"""Candidates of a batcher's step, in each phase, and the pages that a step may allocate."""

from dataclasses import replace

from engine.schedule.batcher import Candidate, Pages, Phase
from wire.load.fairness import Standing

BLOCK = 16


def decoding(handle: int, num_known: int) -> Candidate:
    return _candidate(handle, Phase.DECODE, num_known, num_known - 1)


def prompt(handle: int, num_known: int, num_computed: int = 0) -> Candidate:
    return _candidate(handle, Phase.PREFILL, num_known, num_computed)


def fetching(handle: int, num_known: int) -> Candidate:
    return _candidate(handle, Phase.FETCHING, num_known, num_known)


def owned(candidate: Candidate, tenant: str, spent: float = 0.0, priority: int = 0) -> Candidate:
    """A tenant's candidate."""
    return replace(candidate, standing=Standing(tenant, spent, priority=priority))


def deferred(candidate: Candidate) -> Candidate:
    """A candidate that is deferred."""
    return replace(candidate, standing=replace(candidate.standing, is_deferred=True))


def pages(num_allocatable: int, num_draining: int = 0) -> Pages:
    return Pages(num_allocatable, num_draining, BLOCK)


def _candidate(handle: int, phase: Phase, num_known: int, num_computed: int) -> Candidate:
    num_blocks = -(-num_computed // BLOCK)
    return Candidate(handle=handle, phase=phase, num_known=num_known, num_computed=num_computed, num_blocks=num_blocks)
