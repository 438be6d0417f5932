"""How much of the arena hand-offs take, which prefills wait for it, and the renewals of their holds."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.workers.holds import LOOK_EVERY_S, NO_CLAIM, Claim, HoldBudget, HoldBudgets
from router.workers.line import Line
from router.workers.local_transport import LocalTransport
from router.workers.members import Member, Members
from tests.harness.cluster import until
from tests.harness.fake_worker import FINGERPRINT, LAYOUT
from tests.harness.scripted_worker import ScriptedWorker
from wire.errors import Unavailable
from wire.ids import AttemptId, BlockKey, WorkerId
from wire.load.fairness import FairShares
from wire.pb import worker_pb2
from wire.pools import Role, Worker, WorkerState


def keys(*numbers: int) -> Sequence[BlockKey]:
    return [BlockKey(bytes([number]) * 32) for number in numbers]


def attempt(name: str, number: int = 1) -> AttemptId:
    return AttemptId(f"{name}/{number}")


A, B, C = map(attempt, "abc")
FIVE = keys(*range(5))


def room(num_blocks_of_others: int, num_routers: int) -> worker_pb2.HoldRoom:
    return worker_pb2.HoldRoom(blocks_of_others=num_blocks_of_others, routers=num_routers)


@pytest.fixture
def budget() -> HoldBudget:
    """Over an arena of eight blocks."""
    budget = HoldBudget()
    budget.resize(8)
    return budget


def test_no_prefill_starts_while_more_than_half_is_held(budget: HoldBudget) -> None:
    assert budget.ask(A, keys(1, 2, 3, 4)) == [A]
    assert budget.ask(B, keys(5)) == [B]
    assert budget.ask(C, keys(6)) == []
    assert budget.num_blocks == 5
    assert budget.release(B) == [C]
    assert budget.num_blocks == 5


def of_tenants() -> HoldBudget:
    """A budget over 40 blocks, of a tenant with room and a long queue, and of another one."""
    shares = FairShares()
    for tenant in "hl":
        shares.enter(tenant)
    budget = HoldBudget(shares)
    budget.resize(40)
    for number in range(8):
        budget.ask(attempt("h", number + 1), keys(*range(7 * number, 7 * number + 7)), Claim("h", 100.0))
    return budget


def test_a_tenant_with_less_than_its_part_has_room_behind_a_queue() -> None:
    budget = of_tenants()
    assert (budget.num_blocks, budget.num_waiting) == (21, 5)
    assert budget.ask(A, keys(101, 102), Claim("l", 100.0)) == [A], "into the third quarter of the arena"
    assert budget.ask(B, keys(*range(111, 120)), Claim("l", 100.0)) == [B]
    assert budget.ask(C, keys(121), Claim("l", 100.0)) == [], "three quarters are held"
    assert budget.release(B) == [C], "and its tenant had less"
    assert budget.release(attempt("h", 1)) == [attempt("h", 4)], "less than half is held"
    assert budget.release(C) == [], "the other tenant has its part"


def test_tenants_that_wait_take_turns_by_what_they_had() -> None:
    budget = of_tenants()
    for name, number in ((A, 1), (B, 2)):
        budget.ask(name, keys(*range(60 + 20 * number, 80 + 20 * number)), Claim("l", 250.0))
    granted = [one for number in range(1, 4) for one in budget.release(attempt("h", number))]
    assert granted == [attempt("h", 4), attempt("h", 5)], "A has most of the holds"
    assert budget.release(A) == [B], "there is room, and its tenant had 250 for 500"
    assert budget.release(attempt("h", 4)) == [attempt("h", 6)]


def test_a_prompt_larger_than_the_arena_starts_alone(budget: HoldBudget) -> None:
    assert budget.ask(A, keys(*range(20))) == [A]
    assert budget.ask(B, keys(1)) == []
    assert budget.release(A) == [B]


def test_shared_blocks_count_once(budget: HoldBudget) -> None:
    for name in "abcdef":
        assert budget.ask(attempt(name), keys(1, 2, 3, 4)) == [attempt(name)]
    assert budget.num_blocks == 4
    for name in "abcde":
        budget.release(attempt(name))
    assert budget.num_blocks == 4
    budget.release(attempt("f"))
    assert budget.num_blocks == 0


def test_turns_come_in_order(budget: HoldBudget) -> None:
    assert budget.ask(A, keys(*range(5))) == [A]
    assert budget.ask(C, keys(11, 12, 13, 14, 15)) == []
    assert budget.ask(B, keys(6)) == []
    assert budget.release(A) == [C]
    assert budget.release(C) == [B]


def test_an_attempt_that_stops_waiting_lets_the_next_one_in(budget: HoldBudget) -> None:
    budget.ask(A, keys(*range(5)))
    budget.ask(B, keys(6))
    budget.ask(C, keys(7))
    assert budget.release(B) == []
    assert budget.release(A) == [C]


def test_room_that_other_routers_take_is_not_given_out_again(budget: HoldBudget) -> None:
    budget.share(room(1, 2))
    assert budget.ask(A, keys(1, 2, 3, 4)) == [A]
    assert budget.ask(B, keys(5)) == [], "theirs and ours are more than half"
    assert budget.num_asked == 5, "a router that waits counts as one that holds"
    assert budget.share(room(0, 1)) == [B]


def test_a_router_has_its_part_whatever_others_hold(budget: HoldBudget) -> None:
    budget.share(room(8, 2))
    assert budget.ask(A, keys(1, 2)) == [A]
    assert budget.ask(B, keys(3)) == [B]
    assert budget.ask(C, keys(4)) == []


def test_asking_again_is_free(budget: HoldBudget) -> None:
    assert budget.ask(A, keys(*range(5))) == [A]
    assert budget.ask(A, keys(*range(5))) == []
    budget.release(A)
    assert budget.num_blocks == 0


def test_a_larger_arena_lets_more_in(budget: HoldBudget) -> None:
    budget.ask(A, keys(*range(5)))
    budget.ask(B, keys(6))
    assert budget.resize(100) == [B]


def test_attempts_at_one_request_are_apart(budget: HoldBudget) -> None:
    """The late end of an attempt ends no hold of the one that follows."""
    first, second = attempt("a", 1), attempt("a", 2)
    budget.ask(first, keys(1, 2))
    budget.ask(second, keys(1, 2))
    budget.keep(first)
    budget.keep(second)
    budget.release(first)
    assert (budget.kept, budget.num_blocks) == ([second], 2)


def test_only_what_was_answered_and_not_released_is_renewed(budget: HoldBudget) -> None:
    budget.ask(A, keys(1))
    budget.ask(B, keys(2))
    budget.keep(A)
    budget.keep(B)
    budget.release(A)
    assert budget.kept == [B]


def of_three_tenants() -> HoldBudget:
    """A budget over 40 blocks, 14 held by one tenant, 9 by "l" and 2 by "m"."""
    budget = HoldBudget()
    budget.resize(40)
    for name, tenant, blocks in (("d", "h", range(14)), ("e", "l", range(21, 30)), ("f", "m", range(31, 33))):
        budget.ask(attempt(name), keys(*blocks), Claim(tenant))
    return budget


def test_a_hold_makes_the_equal_part_of_others_larger() -> None:
    budget = of_three_tenants()
    assert budget.ask(A, keys(30), Claim("l")) == [], "its nine are more than a third of 25"
    assert budget.ask(B, keys(*range(41, 45)), Claim("m")) == [B, A], "and less than a third of 29"


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcghi"), st.booleans(), st.sampled_from("hlm"), st.integers(1, 6))))
def test_a_waiting_attempt_is_returned_once_and_a_released_one_holds_nothing(
    steps: list[tuple[str, bool, str, int]],
) -> None:
    budget = of_three_tenants()
    waiting, held = set[AttemptId](), set[AttemptId]()
    for name, asks, tenant, size in steps:
        one, first = attempt(name), 100 + 10 * (ord(name) - ord("a"))
        if asks and one not in waiting | held:
            waiting.add(one)
            may_start = budget.ask(one, keys(*range(first, first + size)), Claim(tenant))
        else:
            may_start = budget.release(one)
            waiting.discard(one)
            held.discard(one)
        assert waiting.issuperset(may_start)
        waiting.difference_update(may_start)
        held.update(may_start)
        assert budget.num_waiting == len(waiting)
        assert budget.num_blocks <= 36, "three quarters of the arena, and one attempt more"
    for name in "abcdefghi":
        budget.release(attempt(name))
    assert budget.num_blocks == 0
    assert budget.ask(A, keys(1)) == [A]


class Pair:
    """Holds before two workers whose arena has eight blocks."""

    def __init__(self) -> None:
        self.members = Members(FINGERPRINT, LAYOUT.encode())
        self.workers = [ScriptedWorker(WorkerId(f"d{index}"), Role.DECODE, num_arena_blocks=8) for index in range(2)]
        self.holds = HoldBudgets(self.members, renew_every_s=0.01)

    async def join(self) -> None:
        for worker in self.workers:
            line = Line(LocalTransport(worker))
            listed = Worker(worker.worker_id, Role.DECODE, "", WorkerState.READY)
            self.members.add(Member(worker=listed, info=await line.questions.info(5.0), line=line))
        self.holds.resize()
        self.holds.start()

    async def leave(self) -> None:
        await self.holds.stop()
        for member in self.members:
            await member.line.close(Unavailable("the test is over"))

    def begin(self, attempt: AttemptId, keys: Sequence[BlockKey], claim: Claim = NO_CLAIM) -> asyncio.Task[None]:
        """Holds in a task of its own, until that is cancelled."""

        async def be_held() -> None:
            async with self.holds.hold(attempt, keys, "", claim):
                self.holds.keep(attempt)
                await asyncio.Event().wait()

        return asyncio.create_task(be_held())


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.join()
    yield pair
    assert pair.holds.check() == []
    await pair.leave()


async def test_holds_are_renewed_from_the_answer_until_the_release(pair: Pair) -> None:
    first = pair.workers[0]
    async with pair.holds.hold(A, FIVE, ""):
        await asyncio.sleep(0.03)
        assert first.renewed == []
        pair.holds.keep(A)
        await until(lambda: len(first.renewed) >= 2)
        assert first.renewed[0] == [A]
        pair.holds.release(A)
        await until(lambda: first.releases)
        num_renewals = len(first.renewed)
        pair.holds.keep(A)
        await asyncio.sleep(0.03)
        assert len(first.renewed) == num_renewals
        pair.holds.release(A)
    await asyncio.sleep(0.01)
    assert first.releases == [A], "once, however often it is asked for"


async def test_a_hold_whose_blocks_have_moved_makes_room_and_is_renewed_no_more(pair: Pair) -> None:
    told = pair.workers[0]
    tasks = [pair.begin(A, FIVE), pair.begin(B, keys(7))]
    await until(lambda: len(told.renewed) >= 2)
    assert pair.holds.budgets[""].num_waiting == 1
    assert told.renewed[-1] == [A]
    told.line.say_ended(A)
    await until(lambda: told.renewed[-1] == [B])
    assert (pair.holds.budgets[""].num_waiting, pair.holds.budgets[""].num_blocks) == (0, 1)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_where_prefills_wait_holds_are_renewed_before_their_time(pair: Pair) -> None:
    await pair.holds.stop()
    pair.holds = HoldBudgets(pair.members, renew_every_s=1000.0)
    pair.holds.resize()
    pair.holds.start()
    first = pair.begin(A, FIVE)
    await asyncio.sleep(2 * LOOK_EVERY_S)
    assert pair.workers[0].renewed == []
    second = pair.begin(B, keys(7))
    await until(lambda: pair.workers[0].renewed)
    for task in (first, second):
        task.cancel()
    await asyncio.wait([first, second])


async def test_a_hold_ends_with_its_context(pair: Pair) -> None:
    with pytest.raises(ZeroDivisionError):
        async with pair.holds.hold(A, FIVE, ""):
            raise ZeroDivisionError
    assert pair.holds.check() == []
    await until(lambda: pair.workers[0].releases == [A])


async def test_what_is_held_shows_in_the_check(pair: Pair) -> None:
    tasks = [pair.begin(A, FIVE), pair.begin(B, FIVE)]
    await until(lambda: len(pair.holds.check()) == 3)
    assert [problem.split()[0] for problem in pair.holds.check()] == ["5", "2", "1"]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_one_worker_speaks_for_the_node_and_the_next_one_if_it_is_lost(pair: Pair) -> None:
    pair.members[WorkerId("d0")].state = WorkerState.LOST
    async with pair.holds.hold(A, FIVE, ""):
        pair.holds.keep(A)
        await until(lambda: pair.workers[1].renewed)
    await until(lambda: pair.workers[1].releases)
    assert (pair.workers[0].renewed, pair.workers[0].releases) == ([], [])


async def test_renewals_go_to_every_worker_for_one_may_hang(pair: Pair) -> None:
    async with pair.holds.hold(A, FIVE, ""):
        pair.holds.keep(A)
        await until(lambda: all(worker.renewed for worker in pair.workers))
    await until(lambda: pair.workers[0].releases)
    assert pair.workers[1].releases == []


async def test_a_worker_whose_line_has_ended_is_passed_over(pair: Pair) -> None:
    await pair.members[WorkerId("d0")].line.close(Unavailable("it is gone"))
    async with pair.holds.hold(A, FIVE, ""):
        pass
    await until(lambda: pair.workers[1].releases)


async def test_without_a_worker_holds_run_out_and_that_is_logged(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    for member in pair.members:
        member.state = WorkerState.LOST
    async with pair.holds.hold(A, FIVE, ""):
        pair.holds.keep(A)
        await until(lambda: "no worker can be told of holds" in caplog.text)


async def test_an_attempt_lets_in_another_whose_part_grew(pair: Pair) -> None:
    pair.holds.budgets[""] = of_three_tenants()
    tasks = [pair.begin(A, keys(30), Claim("l"))]
    await asyncio.sleep(0)
    assert pair.holds.budgets[""].num_waiting == 1
    tasks.append(pair.begin(B, keys(*range(41, 45)), Claim("m")))
    await until(lambda: pair.holds.budgets[""].kept == [A, B])
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for name in "def":
        pair.holds.budgets[""].release(attempt(name))


async def test_a_turn_comes_when_there_is_room(pair: Pair) -> None:
    first = pair.begin(A, FIVE)
    await asyncio.sleep(0)
    second = pair.begin(B, [*FIVE[:1], BlockKey(b"x" * 32)])
    await asyncio.sleep(0.01)
    assert (pair.holds.budgets[""].num_waiting, pair.holds.budgets[""].kept) == (1, [A])
    first.cancel()
    await until(lambda: pair.holds.budgets[""].kept == [B])
    assert pair.holds.budgets[""].num_blocks == 2
    second.cancel()
    await asyncio.wait([second])


@pytest.mark.parametrize("num_turns", range(4))
async def test_an_attempt_that_stops_waiting_has_no_turn_and_the_next_one_has(pair: Pair, num_turns: int) -> None:
    """It stops before, while and after its turn comes."""
    first = pair.begin(A, FIVE)
    await asyncio.sleep(0)
    waiting, last = pair.begin(B, FIVE), pair.begin(C, FIVE)
    await asyncio.sleep(0)
    first.cancel()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    waiting.cancel()
    await until(lambda: pair.holds.budgets[""].kept == [C])
    await until(lambda: pair.workers[0].releases)
    assert pair.workers[0].releases[0] == A
    last.cancel()
    await asyncio.wait([last])


async def test_an_attempt_that_only_waited_releases_nothing_at_the_worker(pair: Pair) -> None:
    first = pair.begin(A, FIVE)
    await asyncio.sleep(0)
    waiting = pair.begin(B, FIVE)
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    first.cancel()
    await until(lambda: pair.workers[0].releases)
    assert pair.workers[0].releases == [A]


async def test_each_node_has_a_budget_and_hears_of_its_own_holds(pair: Pair) -> None:
    pair.members[WorkerId("d1")].info.node_id = "other"
    pair.holds.resize()
    async with pair.holds.hold(A, FIVE, ""):
        assert not pair.holds.budgets[""].has_room
        async with pair.holds.hold(B, FIVE, "other"):
            pair.holds.keep(B)
            await until(lambda: pair.workers[1].renewed)
    await until(lambda: [worker.releases for worker in pair.workers] == [[A], [B]])
    assert pair.workers[0].renewed == []


async def test_the_budget_of_a_node_that_is_gone_goes_with_its_last_hold(pair: Pair) -> None:
    async with pair.holds.hold(A, FIVE, "gone"):
        pair.holds.resize()
        assert set(pair.holds.budgets) == {"", "gone"}
    pair.holds.resize()
    assert set(pair.holds.budgets) == {""}


async def test_on_a_node_that_has_lost_its_workers_nothing_waits(pair: Pair) -> None:
    tasks = [pair.begin(attempt, FIVE) for attempt in (A, B, C)]
    await until(lambda: pair.holds.budgets[""].num_waiting == 2)
    gone = [pair.members.remove(member.id) for member in pair.members]
    pair.holds.resize()
    await until(lambda: set(pair.holds.budgets[""].kept) == {A, B, C})
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for member in gone:
        await member.line.close(Unavailable("the test is over"))
