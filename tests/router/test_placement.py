"""The choice of a worker for each step of a request, and the wait for one where there is none."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from router.block_index import BlockIndex
from router.config import Disaggregation
from router.placement import Placement, PrefixMap, Route
from router.workers.line import Line
from router.workers.local_transport import LocalTransport
from router.workers.members import LONG_STEP_S, Member, Members
from tests.harness.fake_worker import FINGERPRINT, LAYOUT, FakeWorker
from wire.errors import Unavailable
from wire.ids import BlockKey, WorkerId
from wire.pb import worker_pb2
from wire.pools import Role, Worker, WorkerState

KEYS = [BlockKey(bytes([number]) * 32) for number in range(3)]
NUM_PROMPT = 12


class Pools:
    """A placement over members that join by name: p... prefills, d... decodes."""

    def __init__(self) -> None:
        self.members = Members(FINGERPRINT, LAYOUT.encode())
        self.index = BlockIndex(LAYOUT)
        self.prefixes = PrefixMap(100)
        self.placement = Placement(
            self.members, self.prefixes, self.index, LAYOUT.block_size, 0.1, Disaggregation.ALWAYS
        )

    async def join(self, *names: str) -> None:
        for name in names:
            worker = FakeWorker(WorkerId(name), Role.PREFILL if name.startswith("p") else Role.DECODE)
            line = Line(LocalTransport(worker))
            listed = Worker(worker.worker_id, worker.role, "", WorkerState.READY)
            self.members.add(Member(worker=listed, info=await line.questions.info(5.0), line=line))
        self.placement.wake()

    def route(self, full: Sequence[str] = ()) -> Route:
        return self.placement.route(KEYS, NUM_PROMPT, frozenset(full))

    def prefill(self) -> str | None:
        member = self.placement.choose_prefill(self.route())
        return None if member is None else member.id

    async def decode(self, prefilled_by: WorkerId | None = None) -> str:
        route = self.route()
        return (await self.placement.choose_decode(route.through(prefilled_by) if prefilled_by else route)).id

    def uses_prefill(self) -> bool:
        return self.route().prefill_node is not None


@pytest.fixture
async def pools() -> AsyncIterator[Pools]:
    pools = Pools()
    yield pools
    for member in pools.members:
        await member.line.close(Unavailable("the test is over"))


async def test_a_prefill_worker_is_chosen_by_load_and_by_where_the_prefix_went(pools: Pools) -> None:
    await pools.join("p0", "p1", "d0")
    assert pools.uses_prefill()
    with pools.members[WorkerId("p0")].assigned(1, 5):
        assert pools.prefill() == "p1"
    with pools.members[WorkerId("p1")].assigned(1, 5):
        assert pools.prefill() == "p1", "twelve tokens of it are there"


async def test_only_ready_workers_of_the_role_are_chosen(pools: Pools) -> None:
    await pools.join("d0", "p0", "d1")
    for state in (WorkerState.LOST, WorkerState.DRAINING):
        pools.members[WorkerId("p0")].state = pools.members[WorkerId("d0")].state = state
        assert (pools.uses_prefill(), pools.prefill()) == (False, None)
        assert await pools.decode() == "d1"


async def test_decode_goes_where_the_prompt_is_only_where_decode_workers_prefill(pools: Pools) -> None:
    await pools.join("d0", "d1")
    with pools.members[WorkerId("d0")].assigned(0, 1):
        assert await pools.decode() == "d1"
    with pools.members[WorkerId("d1")].assigned(0, 5):
        assert await pools.decode() == "d1"
        assert await pools.decode(WorkerId("p0")) == "d0", "prefill left it in the store"


async def test_a_request_waits_for_a_decode_worker(pools: Pools) -> None:
    waiting = [asyncio.create_task(pools.decode()) for _ in range(2)]
    await asyncio.sleep(0)
    pools.placement.wake()
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    await pools.join("d0")
    assert await asyncio.gather(*waiting) == ["d0", "d0"]


async def test_the_wait_for_a_decode_worker_is_bounded_whatever_wakes_it(pools: Pools) -> None:
    waiting = asyncio.create_task(pools.decode())
    while not waiting.done():
        pools.placement.wake()
        await asyncio.sleep(0.01)
    with pytest.raises(Unavailable, match="no decode worker"):
        await waiting


async def test_a_prompt_goes_straight_to_decode_where_prefill_is_far_behind(pools: Pools) -> None:
    """Both take 1 ms a token: 25 tokens and a hand-off, or 12 and as many again for each that decode has to do."""
    await pools.join("p0", "d0")
    conditional = Placement(
        pools.members, PrefixMap(100), pools.index, LAYOUT.block_size, 0.1, Disaggregation.CONDITIONAL
    )
    conditional.hand_off.learn([], [])

    def uses_prefill() -> bool:
        return conditional.route(KEYS, NUM_PROMPT, frozenset()).prefill_node is not None

    with pools.members[WorkerId("p0")].assigned(1, 13):
        assert uses_prefill(), "nothing is learned yet"
        pools.members[WorkerId("p0")].prefill_token_s = 0.001
        assert not uses_prefill()
        assert pools.uses_prefill()
        with pools.members[WorkerId("d0")].prefilling(14) as end:
            assert uses_prefill(), "decode has a prompt already"
            end()
            assert not uses_prefill()
    assert not pools.members.check()


async def test_decode_prefills_while_every_prefill_engine_is_silent_and_it_is_not(pools: Pools) -> None:
    await pools.join("p0", "p1", "d0")
    for name, uses_prefill in (("p0", True), ("p1", False), ("d0", True)):
        pools.members[WorkerId(name)].engine_silent_s = LONG_STEP_S
        assert pools.uses_prefill() is uses_prefill
    pools.members[WorkerId("p1")].engine_silent_s = 0.0
    assert pools.uses_prefill()


async def test_a_prompt_goes_to_a_node_with_room(pools: Pools) -> None:
    await pools.join("p0", "p1", "d0")
    pools.members[WorkerId("p1")].info.node_id = "other"
    assert pools.route().prefill_node == ""
    assert pools.route(full=["", "other"]).prefill_node == "", "there it waits"
    there = pools.route(full=[""])
    assert there.prefill_node == "other"
    assert pools.placement.choose_prefill(there) is pools.members[WorkerId("p1")]
    pools.members.remove(WorkerId("p1"))
    assert pools.placement.choose_prefill(there) is None


async def test_blocks_are_looked_for_on_the_nodes_of_workers_that_had_the_prefix(pools: Pools) -> None:
    await pools.join("p0", "d0")
    prefill, decode = pools.members[WorkerId("p0")], pools.members[WorkerId("d0")]
    prefill.info.MergeFrom(worker_pb2.WorkerInfo(node_id="a", block_address="a:1"))
    decode.info.MergeFrom(worker_pb2.WorkerInfo(node_id="b", block_address="b:1"))
    route, addresses = pools.route(), pools.placement.block_addresses
    assert addresses(route, decode) == []
    pools.placement.choose_prefill(route)
    assert addresses(route.through(prefill.id), decode) == addresses(pools.route(), decode) == ["a:1"]
    assert addresses(pools.route(), prefill) == [], "its own node is none of the others"
    assert await pools.decode(prefill.id) == "d0"
    next_turn = pools.placement.route([*KEYS, KEYS[0]], NUM_PROMPT, frozenset())
    assert addresses(next_turn, prefill) == ["b:1"]
    pools.members.remove(WorkerId("d0"))
    assert addresses(next_turn, prefill) == []


def tell(pools: Pools, node_id: str, num_blocks: int) -> None:
    """Lets the index know that a node has the first blocks of the prompt, and no others."""
    page = worker_pb2.EventPage(node_id=node_id, after=pools.index.cursor(node_id))
    page.cursor.CopyFrom(worker_pb2.EventCursor(epoch="e", number=page.after.number + 1))
    page.events.add(kind="cleared", tier="host")
    page.events.add(kind="stored", tier="host", keys=KEYS[:num_blocks])
    pools.index.take(page)


async def test_a_known_node_counts_by_its_blocks_and_another_by_what_it_was_sent(pools: Pools) -> None:
    await pools.join("p0", "p1", "d0")
    member = pools.members[WorkerId("p1")]
    member.info.node_id, member.info.block_address = "other", "other:1"
    tell(pools, "other", 2)
    assert (pools.route().prefill_node, pools.route().cached) == ("other", {"p1": 8})
    assert pools.placement.block_addresses(pools.route(), pools.members[WorkerId("p0")]) == ["other:1"]
    pools.prefixes.record(KEYS, WorkerId("p0"))
    pools.prefixes.record(KEYS, WorkerId("p1"))
    assert pools.route().cached == {"p0": 12, "p1": 8}, "the first node is not known"
    tell(pools, "", 0)
    assert pools.route().cached == {"p1": 8}, "it lost what it was sent"
    pools.index.break_off("other")
    assert pools.route().cached == {"p1": 12}


async def test_of_workers_on_a_known_node_that_cost_alike_the_one_sent_the_prompt_is_chosen(pools: Pools) -> None:
    await pools.join("p0", "p1", "d0", "d1")
    tell(pools, "", 3)
    pools.prefixes.record(KEYS, WorkerId("p1"))
    assert pools.prefill() == "p1"
    with pools.members[WorkerId("p1")].assigned(1, 1):
        assert pools.prefill() == "p0", "the arena has it for both"


async def test_blocks_under_way_on_a_worker_count_as_its_own(pools: Pools) -> None:
    await pools.join("p0", "p1", "d0")
    tell(pools, "", 1)
    other = BlockKey(bytes(32))
    with pools.members[WorkerId("p1")].assigned(1, 3, [*KEYS[:2], other, other]):
        assert pools.route().cached == {"p0": 4, "p1": 8, "d0": 4}
    assert pools.route().cached == {"p0": 4, "p1": 4, "d0": 4}
    assert not pools.members[WorkerId("p1")].under_way


async def test_a_decode_worker_that_has_read_the_prompt_may_have_as_much_more_work(pools: Pools) -> None:
    await pools.join("p0", "d0", "d1")
    rest = pools.route().through(WorkerId("p0"))
    likely = pools.placement.likely_decode(rest)
    assert likely is not None
    ahead = replace(rest, prefetched={likely.id: NUM_PROMPT})
    for num_more, is_chosen in [(NUM_PROMPT, True), (NUM_PROMPT + 1, False)]:
        with likely.assigned(0, num_more):
            assert (await pools.placement.choose_decode(ahead) is likely) is is_chosen
            assert await pools.placement.choose_decode(rest) is not likely


async def test_no_decode_worker_is_likely_where_none_is_ready(pools: Pools) -> None:
    await pools.join("p0")
    assert pools.placement.likely_decode(pools.route()) is None
