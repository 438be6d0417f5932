import asyncio
from collections.abc import AsyncIterator

import pytest

from router.workers.hold_keeper import HoldKeeper
from router.workers.local_worker_client import LocalWorkerClient
from router.workers.members import Member, Members
from tests.router.fake_cluster import until
from tests.router.fake_worker import FINGERPRINT, LAYOUT, FakeWorker
from wire.errors import Unavailable
from wire.ids import BlockKey, RequestId, WorkerId
from wire.pb import worker_pb2
from wire.pools import Role, WorkerState

A, B = RequestId("a"), RequestId("b")
FIVE = [BlockKey(bytes([number]) * 32) for number in range(5)]


class Pair:
    """A keeper before two workers whose arena has eight blocks."""

    def __init__(self) -> None:
        self.members = Members(FINGERPRINT, LAYOUT.encode())
        self.workers = [FakeWorker(WorkerId(f"d{index}"), Role.DECODE, num_arena_blocks=8) for index in range(2)]
        self.keeper = HoldKeeper(self.members, renew_every_s=0.01)

    async def join(self) -> None:
        for worker in self.workers:
            info = await worker.get_info(worker_pb2.GetInfoRequest())
            self.members.add(Member(worker.worker_id, Role.DECODE, "", info, LocalWorkerClient(worker)))
        self.keeper.resize()
        self.keeper.start()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.join()
    yield pair
    await pair.keeper.stop()


async def test_holds_are_renewed_from_the_answer_until_the_release(pair: Pair) -> None:
    await pair.keeper.enter(A, FIVE)
    pair.keeper.keep(A)
    first = pair.workers[0]
    await until(lambda: len(first.renewed) >= 2)
    assert first.renewed[0] == [A]
    pair.keeper.release(A)
    await until(lambda: first.released)
    num_renewals = len(first.renewed)
    await asyncio.sleep(0.03)
    assert len(first.renewed) == num_renewals
    assert first.released == [A]


async def test_one_worker_speaks_for_the_node_and_the_next_one_if_it_is_lost(pair: Pair) -> None:
    pair.members[WorkerId("d0")].state = WorkerState.LOST
    await pair.keeper.enter(A, FIVE)
    pair.keeper.release(A)
    await until(lambda: pair.workers[1].released)
    assert pair.workers[0].released == []


async def test_a_worker_that_does_not_take_word_is_passed_over(pair: Pair) -> None:
    await pair.members[WorkerId("d0")].client.close(Unavailable("it is gone"))
    await pair.keeper.enter(A, FIVE)
    pair.keeper.release(A)
    await until(lambda: pair.workers[1].released)


async def test_a_turn_comes_when_there_is_room(pair: Pair) -> None:
    await pair.keeper.enter(A, FIVE)
    waiting = asyncio.create_task(pair.keeper.enter(B, [*FIVE[:1], BlockKey(b"x" * 32)]))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    pair.keeper.release(A)
    await waiting
    assert pair.keeper.num_blocks == 2


async def test_who_stops_waiting_has_no_turn(pair: Pair) -> None:
    await pair.keeper.enter(A, FIVE)
    waiting = asyncio.create_task(pair.keeper.enter(B, FIVE))
    await asyncio.sleep(0)
    waiting.cancel()
    pair.keeper.release(B)
    pair.keeper.release(A)
    assert pair.keeper.num_blocks == 0
    await until(lambda: pair.workers[0].released)
    assert pair.workers[0].released == [A]
