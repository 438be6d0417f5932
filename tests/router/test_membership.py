"""Who is a member: joining, being refused, being lost and coming back."""

from collections.abc import AsyncIterator

import pytest

from router.workers.controller_port import LocalController
from router.workers.local_worker_client import LocalWorkerClient
from router.workers.members import Member, Members
from router.workers.membership import Membership
from tests.router.fake_cluster import until
from tests.router.fake_worker import FINGERPRINT, LAYOUT, FakeWorker
from wire.errors import PairRefused, Unavailable, WorkerLeaving, WorkerNotFound
from wire.ids import PROTOCOL_VERSION, WorkerId
from wire.pb import worker_pb2
from wire.pools import PoolSizes, Role, Worker, WorkerState

D0, D1 = WorkerId("d0"), WorkerId("d1")


class Club:
    """A membership whose workers are found by their address."""

    def __init__(self) -> None:
        self.workers = {"here": FakeWorker(D0, Role.DECODE), "there": FakeWorker(D1, Role.DECODE, num_blocks=7)}
        self.clients: dict[str, LocalWorkerClient] = {}
        self.members = Members(FINGERPRINT, LAYOUT.encode())
        self.port = LocalController(PoolSizes(0, 2))
        self.num_changes = 0
        self.membership = Membership(self.members, self._connect, self.port, self._changed)

    async def list(self, *addresses: str, draining: bool = False) -> dict[WorkerId, str]:
        listed = [
            Worker(
                self.workers[one].worker_id, Role.DECODE, one, WorkerState.DRAINING if draining else WorkerState.READY
            )
            for one in addresses
        ]
        return await self.membership.set(listed)

    @property
    def ready(self) -> set[str]:
        return {member.worker_id for member in self.members.ready(Role.DECODE)}

    def _connect(self, address: str) -> LocalWorkerClient:
        self.clients[address] = LocalWorkerClient(self.workers[address])
        return self.clients[address]

    def _changed(self) -> None:
        self.num_changes += 1


@pytest.fixture
async def club() -> AsyncIterator[Club]:
    club = Club()
    yield club
    await club.membership.close()


async def test_who_is_listed_joins_and_who_is_not_leaves(club: Club) -> None:
    assert await club.list("here", "there") == {}
    assert club.ready == {"d0", "d1"}
    assert club.members.num_pool_blocks == 7
    await club.list("here")
    assert club.ready == {"d0"}
    with pytest.raises(Unavailable):
        await club.clients["there"].get_info(1.0)
    assert club.num_changes == 2


@pytest.mark.parametrize(("is_draining", "reason"), [(False, Unavailable), (True, WorkerLeaving)])
async def test_calls_to_who_leaves_end_with_the_reason(
    club: Club, is_draining: bool, reason: type[Unavailable]
) -> None:
    await club.list("here", "there", draining=is_draining)
    await club.list("there", draining=is_draining)
    with pytest.raises(Unavailable) as told:
        await club.clients["here"].get_info(1.0)
    assert type(told.value) is reason


async def test_who_stays_keeps_its_connection(club: Club) -> None:
    await club.list("here")
    client = club.clients["here"]
    await club.list("here", "there")
    assert club.members[D0].client is client


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("fingerprint", b"another model", "fingerprint"),
        ("layout", b"another layout", "layout"),
        ("protocol_version", PROTOCOL_VERSION + 1, "protocol"),
    ],
)
async def test_unequal_workers_are_not_paired(field: str, value: object, reason: str) -> None:
    info = await FakeWorker(D0, Role.DECODE).get_info(worker_pb2.GetInfoRequest())
    setattr(info, field, value)
    members = Members(FINGERPRINT, LAYOUT.encode())
    client = LocalWorkerClient(FakeWorker(D0, Role.DECODE))
    with pytest.raises(PairRefused, match=reason) as refused:
        members.add(Member(D0, Role.DECODE, "", info, client))
    assert refused.value.ids == {"worker_id": "d0"}
    assert D0 not in members


async def test_a_refused_worker_is_told_of_and_may_be_listed_again(club: Club) -> None:
    club.workers["there"].fingerprint = b"another model"
    refused = await club.list("here", "there")
    assert list(refused) == ["d1"]
    assert "fingerprint" in refused[D1]
    assert club.ready == {"d0"}
    club.workers["there"].fingerprint = FINGERPRINT
    assert await club.list("here", "there") == {}
    assert club.ready == {"d0", "d1"}


async def test_another_worker_at_the_address_is_refused(club: Club) -> None:
    club.workers["here"].worker_id = D1
    refused = await club.membership.set([Worker(D0, Role.DECODE, "here")])
    assert "another worker" in refused[D0]


async def test_a_worker_that_does_not_answer_is_lost_and_reported(club: Club) -> None:
    await club.list("here", "there")
    club.clients["here"].kill()
    club.membership.suspect(D0)
    assert club.ready == {"d1"}
    await until(lambda: club.port.lost)
    club.membership.suspect(D0)
    assert club.port.lost == ["d0"]


async def test_a_worker_that_answers_after_all_is_back(club: Club) -> None:
    await club.list("here")
    club.membership.suspect(D0)
    assert club.ready == set()
    await until(lambda: club.ready == {"d0"})
    assert club.port.lost == []


async def test_a_worker_that_answers_that_it_drains_is_not_chosen(club: Club) -> None:
    await club.list("here")
    club.workers["here"].state = "draining"
    club.membership.suspect(D0)
    await until(lambda: club.members[D0].state is WorkerState.DRAINING)
    assert club.ready == set()


async def test_a_worker_that_drains_is_not_taken_for_lost_when_its_calls_break(club: Club) -> None:
    await club.list("here")
    await club.membership.start_drain(D0)
    client = club.clients["here"]
    club.membership.suspect(D0)
    assert club.members[D0].state is WorkerState.DRAINING
    await club.list("there")
    with pytest.raises(WorkerLeaving):
        await client.get_info(1.0)
    assert not club.port.lost


async def test_a_worker_that_answers_that_it_is_broken_stays_lost(club: Club) -> None:
    await club.list("here")
    club.workers["here"].state = "broken"
    club.membership.suspect(D0)
    await until(lambda: club.port.lost)
    assert club.members[D0].state is WorkerState.LOST


async def test_a_lost_worker_is_probed_no_more_once_it_is_not_listed(club: Club) -> None:
    await club.list("here")
    club.clients["here"].kill()
    club.membership.suspect(D0)
    await until(lambda: club.port.lost)
    await club.list("there")
    assert D0 not in club.members


async def test_suspicion_of_a_stranger_is_nothing(club: Club) -> None:
    club.membership.suspect(D0)
    assert club.num_changes == 0


async def test_a_drain_is_told_to_the_worker(club: Club) -> None:
    await club.list("here", "there")
    await club.membership.start_drain(D0)
    assert club.ready == {"d1"}
    assert club.workers["here"].state == "draining"
    with pytest.raises(WorkerNotFound):
        await club.membership.start_drain(WorkerId("nobody"))


async def test_the_controller_may_list_a_worker_as_draining(club: Club) -> None:
    await club.list("here")
    await club.list("here", draining=True)
    assert club.ready == set()
    assert D0 in club.members
