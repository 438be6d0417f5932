"""The members of a router: workers join, are refused, get lost and come back."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from router.workers.controller_port import LocalController
from router.workers.line import Line
from router.workers.members import Member, Members
from router.workers.membership import Membership
from tests.harness.cluster import until
from tests.harness.fake_worker import FINGERPRINT, LAYOUT, FakeWorker
from tests.harness.faulty_transport import Faults, FaultyTransport
from wire import ids
from wire.errors import PairRefused, Unavailable, WorkerLeaving, WorkerNotFound
from wire.ids import PROTOCOL_VERSION, WorkerId
from wire.pb import worker_pb2
from wire.pools import PoolSizes, Role, Worker, WorkerState

D0, D1 = WorkerId("d0"), WorkerId("d1")


class Club:
    """A membership whose workers are found by their address."""

    def __init__(self) -> None:
        self.workers = {"here": FakeWorker(D0, Role.DECODE), "there": FakeWorker(D1, Role.DECODE, num_blocks=7)}
        self.faults: dict[str, Faults] = {}
        self.transports: dict[str, FaultyTransport] = {}
        self.members = Members(FINGERPRINT, LAYOUT.encode())
        self.port = LocalController(PoolSizes(0, 2))
        self.num_changes = 0
        self.connect: Callable[[str], FaultyTransport] = self._connect
        self.membership = Membership(self.members, lambda address: self.connect(address), self.port, self._changed)

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
        return {member.id for member in self.members.ready(Role.DECODE)}

    def line(self, worker: WorkerId) -> Line:
        return self.members[worker].line

    def _connect(self, address: str) -> FaultyTransport:
        self.transports[address] = FaultyTransport(self.workers[address], self.faults.setdefault(address, Faults()))
        return self.transports[address]

    def _changed(self) -> None:
        self.num_changes += 1


@pytest.fixture
async def club() -> AsyncIterator[Club]:
    club = Club()
    yield club
    assert club.membership.check() == []
    await club.membership.close()
    assert (list(club.members), club.membership.check()) == ([], [])


async def test_a_listed_worker_joins_and_another_leaves(club: Club) -> None:
    assert await club.list("here", "there") == {}
    assert club.ready == {"d0", "d1"}
    assert club.members.num_pool_blocks == 7
    line = club.line(D1)
    await club.list("here")
    assert club.ready == {"d0"}
    with pytest.raises(Unavailable):
        await line.questions.info(1.0)
    assert club.num_changes == 2


@pytest.mark.parametrize(("is_draining", "reason"), [(False, Unavailable), (True, WorkerLeaving)])
async def test_the_line_to_a_worker_that_leaves_ends_with_the_reason(
    club: Club, is_draining: bool, reason: type[Unavailable]
) -> None:
    await club.list("here", "there", draining=is_draining)
    line = club.line(D0)
    await club.list("there", draining=is_draining)
    with pytest.raises(Unavailable) as told:
        await line.questions.info(1.0)
    assert type(told.value) is reason


async def test_a_worker_that_stays_keeps_its_line(club: Club) -> None:
    await club.list("here")
    line = club.line(D0)
    await club.list("here", "there")
    assert club.line(D0) is line
    assert line.is_open


async def test_a_worker_at_another_address_has_a_new_line(club: Club) -> None:
    await club.list("here")
    line = club.line(D0)
    club.workers["elsewhere"] = FakeWorker(D0, Role.DECODE)
    await club.list("elsewhere")
    assert club.line(D0) is not line
    assert (line.is_open, club.ready) == (False, {"d0"})


async def test_a_worker_of_another_role_has_left_and_come(club: Club) -> None:
    await club.list("here", "there")
    member, line = club.members[D0], club.line(D0)
    club.workers["here"].role = Role.PREFILL
    await club.membership.set([Worker(D0, Role.PREFILL, "here", WorkerState.READY)])
    assert not line.is_open
    assert club.members[D0] is not member
    assert [one.id for one in club.members.ready(Role.PREFILL)] == [D0]
    assert club.ready == set()


@pytest.mark.parametrize(("state", "ready"), [("ready", {D0, D1}), ("draining", {D1})])
async def test_a_worker_that_is_listed_as_ready_again_is_asked_what_it_is(
    club: Club, state: str, ready: set[WorkerId]
) -> None:
    """It changed its role and back, of which the router heard the beginning only; or it drains by itself."""
    await club.list("here", "there")
    await club.list("here", "there", draining=True)
    line = club.line(D0)
    club.workers["here"].state = state
    await club.list("here", "there")
    await until(lambda: not club.membership.check() and club.ready == ready)
    assert (club.members[D0].state.value, club.line(D0)) == (state, line)


async def test_a_router_that_has_not_heard_of_a_change_gives_the_worker_no_more_work(
    club: Club, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.workers.membership.PROBE_EVERY_S", 0.01)
    await club.list("here", "there")
    worker, num_asked = club.workers["here"], 0
    worker.role, status = Role.PREFILL, worker.status

    async def told(check: bool) -> worker_pb2.WorkerStatus:
        nonlocal num_asked
        num_asked += 1
        return await status(check)

    monkeypatch.setattr(worker, "status", told)
    club.transports["here"].kill()
    await until(lambda: club.port.lost)
    club.faults["here"].is_dead = False
    await until(lambda: num_asked > 1)
    assert club.ready == {D1}


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("fingerprint", b"another model", "fingerprint"),
        ("layout", b"another layout", "layout"),
        ("oldest_protocol_version", PROTOCOL_VERSION + 1, "protocol"),
    ],
)
async def test_unequal_workers_are_not_paired(field: str, value: object, reason: str) -> None:
    worker = FakeWorker(D0, Role.DECODE)
    info = await worker.info()
    setattr(info, field, value)
    members = Members(FINGERPRINT, LAYOUT.encode())
    line = Line(FaultyTransport(worker))
    with pytest.raises(PairRefused, match=reason) as refused:
        members.add(Member(worker=Worker(D0, Role.DECODE, "", WorkerState.READY), info=info, line=line))
    await line.close(refused.value)
    assert refused.value.ids == {"worker_id": "d0"}
    assert D0 not in members


@pytest.mark.parametrize(
    ("oldest", "newest", "oldest_here", "is_taken"),
    [
        (PROTOCOL_VERSION, PROTOCOL_VERSION + 1, PROTOCOL_VERSION, True),
        (PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 1, PROTOCOL_VERSION, False),
        (0, PROTOCOL_VERSION, PROTOCOL_VERSION, True),
        (0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION, False),
        (0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION - 1, True),
    ],
)
async def test_a_worker_of_another_release_is_taken_where_the_versions_meet(
    club: Club, oldest: int, newest: int, oldest_here: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of a release that tells no range speaks its one version."""
    monkeypatch.setattr(ids, "OLDEST_PROTOCOL_VERSION", oldest_here)
    club.workers["there"].versions = (oldest, newest)
    refused = await club.list("here", "there")
    assert (D1 in club.members, "protocol version" in refused.get(D1, "")) == (is_taken, not is_taken)


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
    club.transports["here"].kill()
    club.membership.mark_lost(D0)
    assert club.ready == {"d1"}
    await until(lambda: club.port.lost)
    club.membership.mark_lost(D0)
    assert club.port.lost == ["d0"]


async def test_the_end_of_a_line_makes_its_worker_suspect(club: Club) -> None:
    await club.list("here", "there")
    club.transports["here"].kill()
    await until(lambda: club.ready == {"d1"})
    await until(lambda: club.port.lost == ["d0"])


async def test_a_lost_worker_comes_back_on_a_new_line(club: Club, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.workers.membership.PROBE_EVERY_S", 0.01)
    await club.list("here")
    line = club.line(D0)
    club.transports["here"].kill()
    await until(lambda: club.port.lost)
    club.faults["here"].is_dead = False
    await until(lambda: club.ready == {"d0"})
    assert club.line(D0) is not line
    assert (await club.line(D0).questions.info(1.0)).worker_id == "d0"
    assert club.port.lost == ["d0"]


async def test_a_line_that_ends_with_the_answer_to_a_probe_is_not_taken_for_good(
    club: Club, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker answers that it is ready, and its line ends before the router has taken that in."""
    monkeypatch.setattr("router.workers.membership.PROBE_EVERY_S", 0.01)
    await club.list("here")
    ask, transport = club.line(D0).questions.status, club.transports["here"]

    async def answer_and_die(check: bool, timeout_s: float) -> worker_pb2.WorkerStatus:
        status = await ask(check, timeout_s)
        transport.kill()
        await until(lambda: not club.line(D0).is_open)
        return status

    monkeypatch.setattr(club.line(D0).questions, "status", answer_and_die)
    club.membership.mark_lost(D0)
    await until(lambda: club.port.lost == ["d0"])
    assert club.ready == set()


async def test_the_controller_is_told_of_a_lost_worker_until_it_hears(
    club: Club, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.workers.membership.PROBE_EVERY_S", 0.01)
    await club.list("here")
    club.port.is_shut_down = True
    club.transports["here"].kill()
    await until(lambda: not club.ready)
    await asyncio.sleep(0.03)
    club.port.is_shut_down = False
    await until(lambda: club.port.lost)
    await asyncio.sleep(0.03)
    assert club.port.lost == ["d0"]


async def test_a_worker_that_answers_after_all_is_back(club: Club) -> None:
    await club.list("here")
    club.membership.mark_lost(D0)
    assert club.ready == set()
    await until(lambda: club.ready == {"d0"})
    assert club.port.lost == []


async def test_a_worker_that_answers_that_it_drains_is_not_chosen(club: Club) -> None:
    await club.list("here")
    club.workers["here"].state = "draining"
    club.membership.mark_lost(D0)
    await until(lambda: club.members[D0].state is WorkerState.DRAINING)
    assert club.ready == set()


async def test_a_worker_that_drains_is_not_taken_for_lost_when_its_line_breaks(club: Club) -> None:
    await club.list("here")
    await club.list("here", draining=True)
    line = club.line(D0)
    club.membership.mark_lost(D0)
    assert club.members[D0].state is WorkerState.DRAINING
    await club.list("there")
    with pytest.raises(WorkerLeaving):
        await line.questions.info(1.0)
    assert not club.port.lost


@pytest.mark.parametrize(("state", "able"), [("ready", {D0}), ("draining", set())])
async def test_a_last_worker_of_a_version_that_drains_is_asked_before_it_gets_attempts_again(
    club: Club, state: str, able: set[WorkerId], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call on it has failed: it may hang, drain by itself, or have lost a connection."""
    monkeypatch.setattr("router.workers.membership.PROBE_EVERY_S", 0.01)
    await club.list("here")
    await club.list("here", draining=True)
    club.members.versions.insert(0, (b"another model", LAYOUT.encode()))
    last = club.members.of((FINGERPRINT, LAYOUT.encode()))
    assert [one.id for one in last.ready(Role.DECODE)] == [D0]
    club.workers["here"].state = "broken"
    club.membership.mark_lost(D0)
    assert last.ready(Role.DECODE) == []
    await club.members[D0].line.questions.status(False, 1.0)
    assert (club.members[D0].line.is_open, last.ready(Role.DECODE)) == (True, [])
    club.workers["here"].state, num_changes = state, club.num_changes
    await until(lambda: club.num_changes == num_changes + 1)
    assert {one.id for one in last.ready(Role.DECODE)} == able


async def test_a_worker_that_answers_that_it_is_broken_stays_lost(club: Club) -> None:
    await club.list("here")
    club.workers["here"].state = "broken"
    club.membership.mark_lost(D0)
    await until(lambda: club.port.lost)
    assert club.members[D0].state is WorkerState.LOST


async def test_a_lost_worker_is_probed_no_more_once_it_is_not_listed(club: Club) -> None:
    await club.list("here")
    club.transports["here"].kill()
    club.membership.mark_lost(D0)
    await until(lambda: club.port.lost)
    await club.list("there")
    assert D0 not in club.members
    assert club.membership.check() == []


async def test_suspicion_of_an_unknown_worker_is_nothing(club: Club) -> None:
    club.membership.mark_lost(D0)
    assert club.num_changes == 0


async def test_members_of_one_version_follow_the_pools_and_know_no_other_worker() -> None:
    members = Members(FINGERPRINT, LAYOUT.encode())
    members.versions.append((b"another model", LAYOUT.encode()))
    ours, others = (members.of(version) for version in members.versions)
    for worker in (FakeWorker(D0, Role.DECODE), FakeWorker(D1, Role.DECODE)):
        info = await worker.info()
        info.fingerprint = FINGERPRINT if worker.worker_id == D0 else b"another model"
        listed = Worker(worker.worker_id, Role.DECODE, "", WorkerState.READY)
        members.add(Member(worker=listed, info=info, line=Line(FaultyTransport(worker))))
    assert [D0 in one for one in (members, ours, others)] == [True, True, False]
    assert others[D1] is members[D1]
    with pytest.raises(WorkerNotFound):
        ours[D1]
    with pytest.raises(WorkerNotFound):
        others.remove(D0)
    members.sizes = PoolSizes(2, 3)
    assert (ours.sizes, others.sizes) == (PoolSizes(2, 3), PoolSizes(2, 3))
    for member in members:
        await member.line.close(Unavailable("the test is over"))


async def test_an_unknown_worker_is_named() -> None:
    with pytest.raises(WorkerNotFound) as unknown:
        Members(FINGERPRINT, LAYOUT.encode())[WorkerId("x" * 100)]
    assert unknown.value.ids == {"worker_id": "x" * 64}


async def test_the_controller_may_list_a_worker_as_draining(club: Club) -> None:
    await club.list("here")
    await club.list("here", draining=True)
    assert club.ready == set()
    assert D0 in club.members


async def test_a_worker_whose_line_ends_while_it_joins_is_lost(club: Club) -> None:
    connect = club.connect

    class Brief(FaultyTransport):
        """A connection that ends after the worker's first word."""

        num_read = 0

        async def read(self) -> worker_pb2.ConnectResponse | None:
            self.num_read += 1
            return await super().read() if self.num_read == 1 else None

    club.connect = lambda address: Brief(club.workers[address])
    await club.list("here")
    assert club.ready == set()
    club.connect = connect
    await until(lambda: club.ready == {"d0"})
