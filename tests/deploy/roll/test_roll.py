"""The roll as a pure decision: tables, and walks over drawn events that end with all workers of one revision."""

import random
from collections.abc import Sequence

import pytest

from deploy.controller.pools import Pools, PoolsRecord
from deploy.roll.roll import Roll
from wire.errors import InvalidRequest, Unavailable
from wire.ids import WorkerId
from wire.pools import PoolSizes, Role, Worker, WorkerState

ADDRESS = "127.0.0.1:1"
P0, P1, P2 = (WorkerId(f"prefill-{number}") for number in range(3))
D0, D1, D2, D3 = (WorkerId(f"decode-{number}") for number in range(4))
SIZES = PoolSizes(1, 2)


def worker(worker_id: WorkerId, state: WorkerState = WorkerState.READY) -> Worker:
    return Worker(worker_id, Role(worker_id.partition("-")[0]), ADDRESS, state)


READY = [worker(P0), worker(D0), worker(D1)]
NEW = {P1: 1, D2: 1, D3: 1}


def rolling(**values: object) -> Roll:
    return Roll(**{"wanted": 1, "last": 1, "before": 0, "revisions": NEW} | values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("workers", "before", "surge"),
    [
        (READY, None, Role.DECODE),
        ([worker(P0), worker(D0), worker(D2)], None, Role.PREFILL),
        ([worker(P0), worker(D2), worker(D3)], None, Role.PREFILL),
        ([worker(P1), worker(D0), worker(D2)], None, Role.DECODE),
        ([worker(P1), worker(D2), worker(D3)], None, None),
        ([worker(P1), worker(D2), worker(D3)], Role.DECODE, None),
        ([*READY, worker(D2, WorkerState.STARTING)], Role.DECODE, Role.DECODE),
        ([worker(P0), worker(D0), worker(D2, WorkerState.STARTING)], None, None),
        ([worker(P0), worker(D0, WorkerState.DRAINING), worker(D1), worker(D2)], None, None),
        ([worker(P0), worker(D2), worker(D3, WorkerState.STARTING)], Role.DECODE, None),
        ([], None, None),
    ],
)
def test_one_pool_may_have_one_more_worker_while_nothing_starts_or_drains(
    workers: Sequence[Worker], before: Role | None, surge: Role | None
) -> None:
    assert rolling(surge=before).stepped(workers).surge is surge


def test_a_roll_is_over_when_no_worker_is_outdated_and_all_are_ready() -> None:
    new = [worker(P1), worker(D2), worker(D3)]
    assert rolling().stepped([*new[:2], worker(D3, WorkerState.STARTING)]).before == 0
    assert rolling().stepped([]).before == 0
    over = rolling().stepped(new)
    assert (over.before, over.has_done(1), rolling().has_done(1)) == (None, True, False)
    assert over.stepped([worker(P1)]).revisions == {P1: 1}


@pytest.mark.parametrize(
    ("workers", "surge", "replaced"),
    [
        ([*READY, worker(D2)], Role.DECODE, D0),
        ([worker(P0), worker(D1), worker(D2), worker(D3)], Role.DECODE, D1),
        ([*READY, worker(D2, WorkerState.STARTING)], Role.DECODE, None),
        ([worker(P0), worker(D1), worker(D2)], Role.DECODE, None),
        ([*READY, worker(D2)], None, None),
        ([worker(P1), worker(D2), worker(D3), worker(D3)], Role.DECODE, None),
    ],
)
def test_an_outdated_worker_leaves_once_its_pool_has_one_ready_worker_more(
    workers: Sequence[Worker], surge: Role | None, replaced: WorkerId | None
) -> None:
    found = rolling(surge=surge).replaced(workers, SIZES)
    assert (found and found.id) == replaced


@pytest.mark.parametrize(
    ("proven", "num_failures", "is_taken_back"),
    [
        ((), 1, True),
        ((Role.PREFILL,), 1, True),
        ((Role.DECODE,), 1, False),
        ((Role.DECODE,), 2, False),
        ((Role.DECODE,), 3, True),
    ],
)
def test_the_first_worker_of_a_pool_has_one_try_and_later_workers_three(
    proven: tuple[Role, ...], num_failures: int, is_taken_back: bool
) -> None:
    roll = rolling(proven=proven).failed_start(worker(D2), num_failures, "no such model")
    assert (roll.wanted == 0) is is_taken_back
    if is_taken_back:
        with pytest.raises(Unavailable, match="revision 1 is taken back, and revision 0 serves on: no such model"):
            roll.has_done(1)


def test_an_outdated_workers_failure_takes_nothing_back() -> None:
    assert rolling().failed_start(worker(D0), 3, "x") == rolling()
    over = rolling(before=None)
    assert over.failed_start(worker(D2), 3, "x") == over


def test_a_second_roll_is_refused_by_name_while_one_is_under_way_or_goes_back() -> None:
    with pytest.raises(InvalidRequest, match="a roll to revision 1 is under way"):
        rolling().begun(READY)
    with pytest.raises(InvalidRequest, match="workers go back to revision 0 now"):
        rolling(wanted=0, before=None).begun([worker(P1), worker(D0)])
    assert rolling(wanted=0, before=None).begun(READY).wanted == 2


@pytest.mark.parametrize("seed", range(150))
def test_whatever_happens_all_workers_have_one_revision_in_the_end_and_no_pool_gets_empty(seed: int) -> None:
    """Deaths, failed starts, orders of other sizes, and new controllers, which know the record alone."""
    draw = random.Random(seed)
    pools, now_s = Pools(PoolsRecord(sizes=PoolSizes(draw.randint(0, 3), draw.randint(1, 3)))), 0.0
    num_events = draw.randint(0, 60)
    for step in range(400):
        now_s += 10.0
        is_calm = step > num_events
        if step == 5:
            pools.roll = pools.roll.begun(tuple(pools))
        pools.plan(now_s)
        if (old := pools.roll.replaced(tuple(pools), pools.sizes)) is not None:
            pools.dismiss(old.id)
        one = draw.choice(list(pools))
        kind = draw.random()
        if one.state is WorkerState.STARTING:
            if not is_calm and kind < 0.3:
                pools.lost(one.id, now_s, "it failed")
            else:
                pools.became_ready(one.id, ADDRESS)
        elif one.state is WorkerState.DRAINING:
            pools.forget(one.id)
        elif not is_calm and kind < 0.15:
            pools.lost(one.id, now_s)
        elif not is_calm and kind < 0.25:
            pools.resize(draw.randint(0, 3), draw.randint(1, 3))
        elif not is_calm and kind < 0.35:
            pools = Pools.from_json(pools.to_json())
        num_there = sum(one.role is Role.DECODE and one.state is not WorkerState.DRAINING for one in pools)
        assert num_there <= pools.sizes.decode + 1 or not is_calm
    assert {pools.roll.of(one.id) for one in pools} == {pools.roll.wanted}
    assert (pools.are_as_asked, pools.roll.before, pools.roll.surge) == (True, None, None)
    assert pools.roll.wanted == 1 or pools.roll.failed == 1
