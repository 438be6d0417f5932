"""When a service is harmed, and how."""

import pytest

from benchmarks.fault_injector import FaultKind, plan

KINDS = [FaultKind.KILL, FaultKind.REDIS_PAUSE]


def test_faults_come_in_turns_and_leave_the_ends_alone() -> None:
    faults = plan(seed=1, duration_s=60, every_s=10, kinds=KINDS, max_pause_s=4)
    assert [fault.at_s for fault in faults] == [10, 20, 30, 40, 50]
    assert [fault.kind for fault in faults] == [*KINDS, *KINDS, FaultKind.KILL]
    assert all(2 <= fault.pause_s <= 4 for fault in faults)


def test_the_seed_decides() -> None:
    def drawn(seed: int) -> list[float]:
        return [fault.draw for fault in plan(seed, 100, 10, KINDS, 4)]

    assert drawn(1) == drawn(1) != drawn(2)


def test_any_worker_may_be_chosen() -> None:
    workers = ["a", "b", "c"]
    faults = plan(0, 1000, 10, KINDS, 4)
    assert {fault.choose(workers) for fault in faults} == set(workers)


@pytest.mark.parametrize("duration_s", [0, 5, 14])
def test_a_short_run_has_no_fault(duration_s: float) -> None:
    assert plan(1, duration_s, 10, KINDS, 4) == []
