import copy
import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from deploy.controller.pools import Pools, PoolsRecord
from deploy.roll.roll import Roll
from wire.errors import ConfigError, InvalidRequest, Overtaken, Unavailable, WorkerNotFound
from wire.ids import WorkerId
from wire.pools import PoolSizes, Role, Worker, WorkerState

ADDRESS = "127.0.0.1:1"
ALIKE = True
"""Whether workers of both roles are started alike."""
P0, P1, D0, D1, D2 = (WorkerId(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"))


def start(worker_id: WorkerId) -> Worker:
    return Worker(worker_id, Role(worker_id.partition("-")[0]))


def drain(worker_id: WorkerId) -> Worker:
    """A worker that serves, to be dismissed."""
    return replace(stop(worker_id), address=ADDRESS)


def stop(worker_id: WorkerId) -> Worker:
    """A worker that has not served yet, to be dismissed."""
    return replace(start(worker_id), state=WorkerState.DRAINING)


def pools(prefill: int, decode: int) -> Pools:
    """Pools that have just become what they should be."""
    made = Pools(PoolsRecord(sizes=PoolSizes(prefill, decode)))
    for worker in made.plan(0.0):
        made.became_ready(worker.id, ADDRESS)
    assert made.are_as_asked
    return made


def test_pools_without_a_record_are_of_the_workers_that_live_and_give_no_name_again() -> None:
    made = Pools.recovered(
        PoolSizes(1, 1), ["router", "decode-1", "node-abcdef01", "decode-0"], ["decode-6.x", "decode-5"]
    )
    assert made.sizes == PoolSizes(1, 2)
    assert [worker.id for worker in made] == [D1, D0]
    assert [worker.id for worker in made.plan(0.0)] == [P0]
    made.resize(decode=3)
    assert [worker.id for worker in made.plan(0.0)] == ["decode-6"]


def test_empty_pools_are_filled_once() -> None:
    made = Pools(PoolsRecord(sizes=PoolSizes(1, 2)))
    assert made.plan(0.0) == [start(P0), start(D0), start(D1)]
    assert made.plan(0.0) == []
    assert not made.are_as_asked


def test_pools_are_as_asked_only_when_all_are_ready() -> None:
    made = Pools(PoolsRecord(sizes=PoolSizes(1, 1)))
    made.plan(0.0)
    made.became_ready(P0, ADDRESS)
    assert not made.are_as_asked
    made.became_ready(D0, ADDRESS)
    assert made.are_as_asked


@pytest.mark.parametrize(
    ("before", "after", "actions"),
    [
        ((1, 1), (1, 1), []),
        ((1, 1), (2, None), [start(P1)]),
        ((1, 1), (None, 3), [start(D1), start(D2)]),
        ((1, 1), (0, None), [drain(P0)]),
        ((1, 2), (2, 1), [start(P1), drain(D1)]),
        ((0, 3), (None, 1), [drain(D2), drain(D1)]),
    ],
)
def test_resizing(before: tuple[int, int], after: tuple[int | None, int | None], actions: list[Worker]) -> None:
    made = pools(*before)
    made.resize(*after)
    assert made.plan(0.0) == actions
    assert made.plan(0.0) == []


@pytest.mark.parametrize(("prefill", "decode"), [(-1, None), (None, 0), (2, -1), (65, None), (2, 65), (1 << 31, None)])
def test_sizes_that_cannot_be_change_nothing(prefill: int | None, decode: int | None) -> None:
    made = pools(1, 1)
    with pytest.raises(InvalidRequest, match=r"pools\.\w+: must be between [01] and 64, not"):
        made.resize(prefill, decode)
    assert made.sizes == PoolSizes(1, 1)
    assert made.plan(0.0) == []


def test_a_draining_worker_is_there_until_it_has_ended() -> None:
    made = pools(1, 2)
    made.resize(None, 1)
    made.plan(0.0)
    assert (made[D1].state, made.are_as_asked) == (WorkerState.DRAINING, False)
    made.forget(D1)
    assert (D1 in made, made.are_as_asked) == (False, True)


def test_a_draining_worker_does_not_count_when_the_pool_grows_again() -> None:
    made = pools(1, 2)
    made.resize(None, 1)
    made.plan(0.0)
    made.resize(None, 2)
    assert made.plan(0.0) == [start(D2)]


def test_a_worker_that_still_starts_goes_first_and_has_nothing_to_drain() -> None:
    made = pools(0, 1)
    made.resize(None, 2)
    assert made.plan(0.0) == [start(D1)]
    made.resize(None, 1)
    assert made.plan(0.0) == [stop(D1)]
    made.became_ready(D1, ADDRESS)
    assert made[D1].state is WorkerState.DRAINING


@pytest.mark.parametrize("worker_id", [P0, D0])
def test_a_lost_worker_is_replaced_under_another_name(worker_id: WorkerId) -> None:
    made = pools(1, 1)
    role = made[worker_id].role
    made.lost(worker_id, 0.0)
    assert made.plan(0.0) == [Worker(WorkerId(f"{role.value}-1"), role)]


def test_a_worker_lost_while_draining_is_not_replaced() -> None:
    made = pools(1, 2)
    made.resize(None, 1)
    made.plan(0.0)
    made.lost(D1, 0.0)
    assert made.plan(0.0) == []
    assert made.are_as_asked


def test_what_never_starts_is_tried_again_after_longer_and_longer_pauses() -> None:
    made = Pools(PoolsRecord(sizes=PoolSizes(0, 1)))
    now_s, pauses = 0.0, []
    for _ in range(8):
        (started,) = made.plan(now_s)
        made.lost(started.id, now_s)
        pauses.append(next(pause for pause in range(100) if copy.deepcopy(made).plan(now_s + pause)))
        now_s += pauses[-1]
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]


def test_a_start_that_succeeds_ends_the_pauses() -> None:
    made = Pools(PoolsRecord(sizes=PoolSizes(0, 1)))
    for now_s in (0.0, 10.0, 20.0):
        (started,) = made.plan(now_s)
        made.lost(started.id, now_s)
    (started,) = made.plan(30.0)
    made.became_ready(started.id, ADDRESS)
    made.lost(started.id, 31.0)
    assert len(made.plan(31.0)) == 1


def test_one_pool_in_trouble_does_not_hold_up_the_other() -> None:
    made = Pools(PoolsRecord(sizes=PoolSizes(1, 1)))
    made.plan(0.0)
    made.lost(P0, 0.0)
    made.lost(D0, 0.0)
    made.resize(0, None)
    assert made.plan(0.5) == []
    made.became_ready(made.plan(1.0)[0].id, ADDRESS)
    assert made.are_as_asked


def fail_to_start(made: Pools, num_times: int) -> list[str]:
    """Lets so many starts of decode workers fail, one after the other, long after each other; returns the words."""
    words = []
    for number in range(num_times):
        started = [worker for worker in made if worker.state is WorkerState.STARTING] or made.plan(1000.0 * number)
        words.append(made.lost(started[0].id, 1000.0 * number, f"failure {number}"))
    return words


@pytest.mark.parametrize(
    ("asked", "num_ready", "num_failures", "size"),
    [
        pytest.param([3], 0, 2, 3, id="two failures are none"),
        pytest.param([3], 0, 3, 1, id="three: the size from before"),
        pytest.param([5], 2, 3, 3, id="the workers that did start stay"),
        pytest.param([3, 5], 0, 3, 1, id="a size that was asked for, but not reached"),
        pytest.param([3, 2], 2, 5, 2, id="a size that was reached is tried for ever"),
        pytest.param([1], 0, 5, 1, id="no order"),
    ],
)
def test_an_order_is_given_up_after_three_failed_starts_in_a_row(
    asked: list[int], num_ready: int, num_failures: int, size: int
) -> None:
    made = pools(0, 1)
    for decode in asked:
        made.resize(None, decode)
    if not made.plan(0.0):
        made.lost(D0, 0.0)
    for worker in [worker for worker in made if worker.state is WorkerState.STARTING][:num_ready]:
        made.became_ready(worker.id, ADDRESS)
    if made.are_as_asked:
        made.lost(D0, 0.0)
    words = fail_to_start(made, num_failures)
    assert made.sizes.decode == size
    given_up = f"decode stays at {size} of the {asked[-1]} workers asked for: failure 2"
    assert words == [given_up if number == 2 and size < asked[-1] else "" for number in range(num_failures)]


def test_an_order_that_was_given_up_can_be_given_again() -> None:
    made = pools(0, 1)
    first = made.resize(None, 2)
    fail_to_start(made, 3)
    with pytest.raises(Unavailable, match="decode stays at 1 of the 2 workers asked for: failure 2"):
        made.have_done(first)
    assert made.plan(9000.0) == []
    again = made.resize(None, 1)
    assert made.have_done(again)
    with pytest.raises(Overtaken, match="decode 1"):
        made.have_done(first)


def test_releasing_a_worker_shrinks_its_pool_by_that_one() -> None:
    made = pools(1, 2)
    assert made.release(D0) == drain(D0)
    assert made.sizes == PoolSizes(1, 1)
    assert made.release(D0) is None
    assert made.plan(0.0) == []
    made.forget(D0)
    assert made.are_as_asked
    assert [worker.id for worker in made] == [P0, D1]


def test_the_last_decode_worker_cannot_be_released() -> None:
    made = pools(1, 1)
    with pytest.raises(InvalidRequest, match="at least one decode"):
        made.release(D0)
    assert made.are_as_asked
    assert made.release(P0) == drain(P0)
    with pytest.raises(WorkerNotFound):
        made.release(WorkerId("decode-9"))


def change(worker_id: WorkerId) -> Worker:
    """A worker that serves, and is of the pool that its name does not tell from now on."""
    return replace(start(worker_id), role=start(worker_id).role.other, address=ADDRESS, state=WorkerState.CHANGING)


@pytest.mark.parametrize(
    ("before", "after", "changes", "rest"),
    [
        pytest.param((2, 2), (1, 3), [change(P1)], [], id="one"),
        pytest.param((1, 3), (3, 1), [change(D2), change(D1)], [], id="two, the youngest"),
        pytest.param((1, 2), (0, 3), [change(P0)], [], id="the last prefill worker, where none stays"),
        pytest.param((2, 1), (1, 3), [change(P1)], [start(D1)], id="and a start"),
        pytest.param((2, 2), (3, 1), [change(D1)], [], id="the other way"),
        pytest.param((1, 3), (2, 1), [change(D2)], [drain(D1)], id="and a drain"),
        pytest.param((2, 2), (1, 1), [], [drain(P1), drain(D1)], id="no pool grows"),
        pytest.param((2, 2), (3, 3), [], [start(WorkerId("prefill-2")), start(D2)], id="no pool shrinks"),
    ],
)
def test_a_pool_that_shrinks_gives_ready_workers_to_one_that_grows(
    before: tuple[int, int], after: tuple[int, int], changes: list[Worker], rest: list[Worker]
) -> None:
    made = pools(*before)
    made.resize(*after)
    assert made.plan(0.0, ALIKE) == [*changes, *rest]
    assert made.plan(0.0, ALIKE) == []
    assert not made.are_as_asked
    for worker in changes:
        made.became_ready(worker.id, ADDRESS)
    for worker in rest:
        made.forget(worker.id) if worker.state is WorkerState.DRAINING else made.became_ready(worker.id, ADDRESS)
    assert made.are_as_asked


def test_no_pool_gives_its_last_ready_worker_while_others_start() -> None:
    made = pools(1, 1)
    made.resize(0, 2)
    made.lost(P0, 0.0)
    made.plan(0.0)
    assert [worker.state for worker in made] == [WorkerState.READY, WorkerState.STARTING]
    made.resize(1, 1)
    assert made.plan(0.0, ALIKE) == [start(P1), stop(D1)]


def test_a_worker_that_still_changes_is_the_first_to_go_and_leaves_the_pool_that_it_came_from() -> None:
    made = pools(2, 1)
    made.resize(1, 2)
    assert made.plan(0.0, ALIKE) == [change(P1)]
    made.resize(1, 1)
    assert made.plan(0.0, ALIKE) == [drain(P1)]
    made.became_ready(P1, ADDRESS)
    assert made[P1] == drain(P1)


def test_an_order_that_is_reversed_amid_a_change_brings_the_same_worker_back_once_it_is_ready() -> None:
    made = pools(2, 1)
    made.resize(1, 2)
    assert made.plan(0.0, ALIKE) == [change(P1)]
    made.resize(2, 1)
    assert made.plan(0.0, ALIKE) == []
    made.became_ready(P1, ADDRESS)
    assert made.plan(0.0, ALIKE) == [replace(change(P1), role=Role.PREFILL)]
    made.became_ready(P1, ADDRESS)
    assert made.are_as_asked


def test_an_order_that_is_reversed_amid_a_change_that_fails_has_another_worker_start() -> None:
    made = pools(2, 1)
    made.resize(1, 2)
    made.plan(0.0, ALIKE)
    made.resize(2, 1)
    assert (made.plan(0.0, ALIKE), made.dismiss(P1)) == ([], drain(P1))
    assert made.plan(0.0, ALIKE) == [start(WorkerId("prefill-2"))]


def test_workers_that_change_are_waited_for_before_others_change_back() -> None:
    made = pools(3, 1)
    made.resize(2, 2)
    made.plan(0.0, ALIKE)
    made.became_ready(WorkerId("prefill-2"), ADDRESS)
    made.resize(1, 3)
    assert made.plan(0.0, ALIKE) == [change(P1)]
    made.resize(3, 1)
    assert made.plan(0.0, ALIKE) == [replace(change(WorkerId("prefill-2")), role=Role.PREFILL)], "one changes still"
    made.became_ready(P1, ADDRESS)
    assert made.plan(0.0, ALIKE) == [replace(change(P1), role=Role.PREFILL)]


def test_a_worker_that_changes_is_drained_where_a_roll_begins_and_the_order_is_reversed() -> None:
    made = pools(2, 1)
    made.resize(1, 2)
    made.plan(0.0, ALIKE)
    made.roll = made.roll.begun(tuple(made))
    made.resize(2, 1)
    assert made.plan(0.0, ALIKE) == [start(WorkerId("prefill-2")), drain(P1)]


def test_an_order_that_is_reversed_after_a_change_brings_the_same_worker_back() -> None:
    made = pools(2, 1)
    made.resize(1, 2)
    made.plan(0.0, ALIKE)
    made.became_ready(P1, ADDRESS)
    made.resize(2, 1)
    assert made.plan(0.0, ALIKE) == [replace(change(P1), role=Role.PREFILL)]


def test_a_worker_that_is_lost_while_it_changes_is_replaced_and_counts_as_no_failed_start() -> None:
    made = pools(2, 1)
    made.resize(1, 2)
    made.plan(0.0, ALIKE)
    assert made.lost(P1, 0.0, "it died") == ""
    assert made.plan(0.0) == [start(D1)]


def test_a_drain_by_name_of_a_worker_that_changes_shrinks_its_new_pool() -> None:
    made = pools(2, 1)
    made.resize(1, 2)
    made.plan(0.0, ALIKE)
    assert made.release(P1) == drain(P1)
    assert made.sizes == PoolSizes(1, 1)
    made.forget(P1)
    assert made.are_as_asked


def test_a_worker_that_changes_is_recorded_so() -> None:
    made = pools(2, 1)
    made.resize(1, 2)
    made.plan(0.0, ALIKE)
    assert Pools.from_json(made.to_json())[P1] == change(P1)


def test_workers_of_a_node_that_drains_go_and_others_start_at_once() -> None:
    made = pools(2, 2)
    made.vacate([P1, D1])
    assert made.plan(0.0) == [drain(P1), start(WorkerId("prefill-2")), drain(D1), start(D2)]
    assert (made.sizes, made.plan(0.0), made.are_as_asked) == (PoolSizes(2, 2), [], False)


def test_workers_of_a_node_that_drains_amid_a_roll_keep_their_revision_to_their_end() -> None:
    made = pools(0, 2)
    made.roll = replace(Roll(wanted=1, last=1), revisions={D0: 1, D1: 1}).begun(tuple(made))
    made.vacate([D0, D1])
    made.plan(0.0)
    assert (made.roll.of(D0), made.roll.of(D1), made.roll.wanted) == (1, 1, 2)
    made = Pools.from_json(made.to_json())
    made.forget(D0)
    made.plan(0.0)
    assert (made.roll.of(D0), made.roll.of(D1)) == (0, 1)


def test_the_last_decode_worker_goes_when_another_is_ready() -> None:
    made = pools(0, 2)
    made.vacate([D0, D1])
    assert made.plan(0.0) == [drain(D1), start(D2), start(WorkerId("decode-3"))]
    made = Pools.from_json(made.to_json())
    assert (made.plan(0.0), made.has(D0, WorkerState.READY), made.pool(Role.DECODE).ready) == ([], True, [])
    made.became_ready(D2, ADDRESS)
    assert made.plan(0.0) == [drain(D0)]


def test_a_worker_whose_place_is_taken_changes_no_role_and_is_shrunk_by_name_as_any() -> None:
    made = pools(2, 1)
    made.vacate([P1, P0])
    made.resize(1, 2)
    recorded = made.to_json()
    assert all(one.state is not WorkerState.CHANGING for one in made.plan(0.0, ALIKE))
    made = Pools.from_json(recorded)
    made.release(P1)
    assert made.sizes == PoolSizes(0, 2)


def test_pools_are_what_they_were_when_recorded() -> None:
    made = pools(1, 2)
    made.release(D1)
    made.lost(P0, 0.0)
    made.plan(0.0)
    read = Pools.from_json(made.to_json())
    assert read.sizes == PoolSizes(1, 1)
    assert list(read) == list(made) == [Worker(D0, Role.DECODE, ADDRESS, WorkerState.READY), drain(D1), start(P1)]
    read.lost(D0, 0.0)
    assert read.plan(0.0) == [start(D2)], "no name is given twice"


def test_a_record_of_version_1_is_read_and_its_sizes_were_reached() -> None:
    old = json.loads(pools(0, 2).to_json()) | {"version": 1}
    del old["orders"]
    read = Pools.from_json(json.dumps(old))
    assert read.sizes == PoolSizes(0, 2)
    read.lost(D0, 0.0)
    assert fail_to_start(read, 3) == ["", "", ""]
    assert read.sizes == PoolSizes(0, 2)


@pytest.mark.parametrize("change", [{"version": 3}, {"version": 0}, {"workers": [{"id": "d"}]}, {"more": 1}])
def test_a_record_of_other_pools_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Pools.from_json(json.dumps(json.loads(pools(1, 1).to_json()) | change))


def test_a_record_of_the_release_before_has_no_roll() -> None:
    """As that release wrote it: amid a drain of a node."""
    text = (
        '{"sizes": {"prefill": 1, "decode": 1}, "workers": [{"id": "prefill-0", "role": "prefill", "address": "h:1", '
        '"state": "ready"}, {"id": "decode-3", "role": "decode", "address": "h:2", "state": "draining"}], '
        '"num_named": {"prefill": 1, "decode": 4}, "orders": [{"role": "prefill", "number": 0, "reached": 1, '
        '"failure": ""}, {"role": "decode", "number": 2, "reached": 1, "failure": ""}], "leaving": ["n"], "version": 2}'
    )
    read = Pools.from_json(text)
    assert (read.roll, read.outdated, read.leaving) == (Roll(), [], {"n"})
    assert [one.id for one in read.plan(0.0)] == ["decode-4"]


class AnyEvents(RuleBasedStateMachine):
    """Any orders, deaths, failures, drains and takeovers, in any order; then it settles at the sizes asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.made = pools(1, 1)
        self.now_s = 0.0
        self.names = {worker.id for worker in self.made}

    @rule(prefill=st.integers(0, 4), decode=st.integers(1, 4))
    def resize(self, prefill: int, decode: int) -> None:
        self.made.resize(prefill, decode)

    @rule()
    def plan(self) -> None:
        self.now_s += 60.0
        serving = {role: self.num_serving(role) for role in Role}
        planned = self.made.plan(self.now_s, ALIKE)
        changing = [worker for worker in planned if worker.state is WorkerState.CHANGING]
        for role in {worker.role.other for worker in changing}:
            assert self.num_serving(role) or not self.made.sizes[role]
        assert not serving[Role.DECODE] or self.num_serving(Role.DECODE), "one decode worker serves on"
        assert all(worker.address for worker in changing)
        assert len({worker.id for worker in planned}) == len(planned)
        started = {worker.id for worker in planned if worker.state is WorkerState.STARTING}
        assert not started & self.names, "no name is given twice"
        self.names |= started
        assert self.made.plan(self.now_s, ALIKE) == [], "what has begun is not begun again"

    def num_serving(self, role: Role) -> int:
        return sum(worker.role is role and worker.state is WorkerState.READY for worker in self.made)

    def one(self, data: st.DataObject, *states: WorkerState) -> WorkerId | None:
        those = [worker.id for worker in self.made if worker.state in states]
        return data.draw(st.sampled_from(those)) if those else None

    @rule(data=st.data())
    def become_ready(self, data: st.DataObject) -> None:
        if worker_id := self.one(data, *WorkerState):
            self.made.became_ready(worker_id, ADDRESS)

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        if worker_id := self.one(data, *WorkerState):
            self.made.lost(worker_id, self.now_s, "it died")

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        if worker_id := self.one(data, WorkerState.CHANGING):
            assert self.made.dismiss(worker_id).state is WorkerState.DRAINING

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if worker_id := self.one(data, WorkerState.DRAINING):
            self.made.finished(worker_id)
            self.made.forget(worker_id)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if worker_id := self.one(data, *WorkerState):
            before = self.made.sizes
            with suppress(InvalidRequest):
                if self.made.release(worker_id) is None:
                    assert self.made.sizes == before
            assert self.made.sizes.decode >= 1

    @rule(data=st.data())
    def vacate(self, data: st.DataObject) -> None:
        if worker_id := self.one(data, *WorkerState):
            self.made.vacate([worker_id])

    @rule()
    def another_controller_takes_over(self) -> None:
        text = self.made.to_json()
        self.made = Pools.from_json(text)
        assert json.loads(self.made.to_json()) == json.loads(text)

    def teardown(self) -> None:
        for _ in range(4):
            self.plan()
            for worker in self.made:
                if worker.state is WorkerState.DRAINING:
                    self.made.forget(worker.id)
                else:
                    self.made.became_ready(worker.id, ADDRESS)
        assert self.made.are_as_asked


TestAnyEvents = AnyEvents.TestCase
TestAnyEvents.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
