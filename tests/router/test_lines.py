"""The contract of a line to a worker, over gRPC and over its twin; and the order in which orders go out."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from kv_store.node_store import HOLD_TTL_S
from router.workers.grpc_transport import GrpcTransport
from router.workers.holds import HoldBudgets
from router.workers.line import MAX_PIECE_BYTES, MAX_PREFETCHES, Line, Outgoing, Transport
from router.workers.members import Member, Members
from tests.harness.cluster import WAIT_S, until
from tests.harness.fake_cluster import expected
from tests.harness.fake_worker import FINGERPRINT, LAYOUT, FakeWorker
from tests.harness.faulty_transport import Faults, FaultyTransport
from tests.harness.scripted_worker import ScriptedWorker, tokens
from tests.router.worker_server import served
from tests.simulator import virtual_time
from wire.errors import BatonError, DeadlineExceeded, InvalidRequest, Unavailable, WireError, WorkerLeaving
from wire.ids import AttemptId, BlockKey, WorkerId
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.pools import Role, Worker, WorkerState

TOKEN = "the cluster's token"
LEFT = WorkerLeaving("it is not needed any more")
A, B, C = (AttemptId(f"{name}/1") for name in "abc")


def begin(attempt: AttemptId, num_prompt: int = 12, time_left_s: float = 20.0) -> worker_pb2.Begin:
    """A Begin of six tokens, the first of which the client has."""
    prompt = b"hello, world" if num_prompt == 12 else [token * 7919 % 150_000 for token in range(num_prompt)]
    return worker_pb2.Begin(
        id=attempt,
        prompt=pb.TokenIds(ids=prompt),
        sampling_params=pb.SamplingParams(seed=1, n=1, max_tokens=6),
        choices=[worker_pb2.UnfinishedChoice(index=0, output=pb.TokenIds(ids=expected(6)[:1]))],
        time_left_s=time_left_s,
    )


@dataclass
class Heard:
    """What an attempt was told. `wanted`: so many updates are taken, and no more are wanted then."""

    updates: list[worker_pb2.Update] = field(default_factory=list)
    wanted: int | None = None

    def take(self, update: worker_pb2.Update) -> bool:
        self.updates.append(update)
        return len(self.updates) != self.wanted

    @property
    def token_ids(self) -> list[int]:
        return [token for update in self.updates for choice in update.choices for token in choice.token_ids]


@dataclass
class Pair:
    """A worker and a line to it. `cut` makes the worker go away at once."""

    worker: FakeWorker
    line: Line
    cut: Callable[[], Awaitable[None]]
    ended_for: list[BatonError]


Opening = Callable[[FakeWorker], AsyncIterator[Pair]]


async def local(worker: FakeWorker) -> AsyncIterator[Pair]:
    transport = FaultyTransport(worker)
    ended_for: list[BatonError] = []

    async def kill() -> None:
        transport.kill()

    line = Line(transport, ended_for.append)
    yield Pair(worker, line, kill, ended_for)
    await line.close(LEFT)


async def over_grpc(worker: FakeWorker) -> AsyncIterator[Pair]:
    async with served(worker, TOKEN) as (server, address):
        ended_for: list[BatonError] = []
        line = Line(GrpcTransport(address, TOKEN), ended_for.append)
        yield Pair(worker, line, lambda: server.stop(None), ended_for)
        await line.close(LEFT)


@pytest.fixture(params=[local, over_grpc])
def opening(request: pytest.FixtureRequest) -> Opening:
    opened: Opening = request.param
    return opened


@pytest.fixture
async def pair(opening: Opening) -> AsyncIterator[Pair]:
    async for pair in opening(FakeWorker(WorkerId("w"), Role.DECODE)):
        yield pair


@dataclass
class Script:
    """A line to a worker that says what the test says."""

    worker: ScriptedWorker
    line: Line


@pytest.fixture
async def script(opening: Opening) -> AsyncIterator[Script]:
    worker = ScriptedWorker(WorkerId("w"), Role.DECODE)
    async for pair in opening(worker):
        yield Script(worker, pair.line)


async def outcome_of(call: Awaitable[None]) -> BatonError | None:
    async with asyncio.timeout(WAIT_S):
        try:
            await call
        except BatonError as error:
            return error
    return None


async def test_orders_arrive_and_are_answered(pair: Pair) -> None:
    assert (await pair.line.questions.info(5.0)).worker_id == "w"
    assert (await pair.line.questions.status(False, 5.0)).state == "ready"
    heard = Heard()
    assert await outcome_of(pair.line.run(begin(A), heard.take)) is None
    assert heard.token_ids == expected(6)[1:]
    assert heard.updates[0].HasField("prompt")
    assert heard.updates[-1].end.spans[0].name == "decode.run"
    pair.line.renew([A])
    pair.line.release(A)
    pair.line.release(B)
    await until(lambda: len(pair.worker.released) == 2)
    assert (pair.worker.renewed, pair.worker.released) == ([[A]], [A, B])
    assert pair.line.is_open
    assert (pair.line.num_attempts, pair.line.questions.unanswered) == (0, [])


async def test_attempts_share_a_line(pair: Pair) -> None:
    heard = {attempt: Heard() for attempt in (A, B, C)}
    await asyncio.gather(*(pair.line.run(begin(attempt), one.take) for attempt, one in heard.items()))
    assert [one.token_ids for one in heard.values()] == [expected(6)[1:]] * 3


async def test_an_error_of_the_worker_arrives(pair: Pair) -> None:
    pair.worker.refusal = InvalidRequest("prompt", "is poison")
    error = await outcome_of(pair.line.run(begin(A), Heard().take))
    assert isinstance(error, InvalidRequest)
    assert (error.message, error.ids) == ("prompt: is poison", {"param": "prompt"})
    pair.worker.status_refusal = Unavailable("the store does not answer")
    with pytest.raises(Unavailable, match="the store"):
        await pair.line.questions.status(True, 5.0)


async def test_an_attempt_ends_in_the_time_that_its_begin_gives_it(pair: Pair) -> None:
    pair.worker.may_go.clear()
    error = await outcome_of(pair.line.run(begin(A, time_left_s=0.05), Heard().take))
    assert isinstance(error, DeadlineExceeded)
    await until(lambda: not pair.worker.open_calls)


async def test_a_question_that_is_not_answered_in_time(script: Script) -> None:
    script.worker.answers = False
    with pytest.raises(DeadlineExceeded):
        await script.line.questions.info(0.05)
    script.worker.answers = True
    assert (await script.line.questions.info(5.0)).worker_id == "w"
    assert script.line.questions.unanswered == []


async def test_a_cancelled_attempt_is_aborted_on_the_worker(pair: Pair) -> None:
    pair.worker.may_go.clear()
    call = asyncio.create_task(pair.line.run(begin(A), Heard().take))
    await until(lambda: pair.worker.open_calls)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: not pair.worker.open_calls)


async def test_an_attempt_of_which_no_more_is_wanted_is_aborted_on_the_worker(pair: Pair) -> None:
    heard = Heard(wanted=2)
    await pair.line.run(begin(A), heard.take)
    await until(lambda: not pair.worker.open_calls)
    assert len(heard.updates) == 2


async def test_an_attempt_that_its_worker_has_ended_is_not_aborted(script: Script) -> None:
    call = asyncio.create_task(script.line.run(begin(A), Heard(wanted=1).take))
    await until(lambda: script.worker.open_calls)
    script.worker.say(ends=True)
    await call
    await script.line.questions.info(5.0)
    assert script.worker.aborts == []


async def test_an_old_attempt_is_heard_no_more(script: Script) -> None:
    first, second = Heard(), Heard()
    call = asyncio.create_task(script.line.run(begin(A), first.take))
    await until(lambda: script.worker.open_calls)
    call.cancel()
    again = asyncio.create_task(script.line.run(begin(AttemptId("a/2")), second.take))
    await until(lambda: len(script.worker.begins) == 2)
    script.worker.say(tokens("z", 1), number=1)
    script.worker.say(number=1, ends=True, error=InvalidRequest("prompt", "is poison"))
    script.worker.say(tokens("y", 1), number=2, ends=True)
    await again
    assert (first.token_ids, second.token_ids) == ([], list(b"y"))


async def test_a_bug_in_one_attempt_ends_that_one_alone(script: Script) -> None:

    def stumble(update: worker_pb2.Update) -> bool:
        raise ZeroDivisionError

    heard = Heard()
    calls = [
        asyncio.create_task(script.line.run(begin(A), stumble)),
        asyncio.create_task(script.line.run(begin(B), heard.take)),
    ]
    await until(lambda: script.worker.open_calls == 2)
    script.worker.say(tokens("y", 1), number=1, request_id="a")
    script.worker.say(tokens("y", 1), number=1, request_id="b", ends=True)
    with pytest.raises(ZeroDivisionError):
        await calls[0]
    await calls[1]
    assert heard.token_ids == list(b"y")
    await until(lambda: script.worker.aborts == [A])


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("error", [None, WireError("a gap")])
async def test_an_attempt_that_is_cancelled_by_its_own_update_leaves_the_line_to_others(
    script: Script, ends: bool, error: BatonError | None
) -> None:
    """So does a request whose outbox is full: its task is cancelled while it takes an update, maybe the last."""

    def take(update: worker_pb2.Update) -> bool:
        call.cancel()
        if error is not None:
            raise error
        return True

    heard = Heard()
    call = asyncio.create_task(script.line.run(begin(A), take))
    other = asyncio.create_task(script.line.run(begin(B), heard.take))
    await until(lambda: script.worker.open_calls == 2)
    script.worker.say(tokens("y", 1), number=1, request_id="a", ends=ends)
    script.worker.say(tokens("y", 1), number=1, request_id="b", ends=True)
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(other, WAIT_S)
    assert heard.token_ids == list(b"y")
    assert script.line.is_open


async def test_a_worker_that_goes_away_is_unavailable_to_all_that_is_under_way(pair: Pair) -> None:
    pair.worker.may_go.clear()
    calls = [asyncio.create_task(pair.line.run(begin(attempt), Heard().take)) for attempt in (A, B)]
    await until(lambda: pair.worker.open_calls == 2)
    await pair.cut()
    for call in calls:
        assert isinstance(await outcome_of(call), Unavailable)
    for late in (pair.line.run(begin(C), Heard().take), pair.line.questions.status(False, 5.0)):
        with pytest.raises(Unavailable):
            await late
    assert len(pair.ended_for) == 1
    assert not pair.line.is_open
    assert (pair.line.num_attempts, pair.line.questions.unanswered) == (0, [])
    await until(lambda: not pair.worker.open_calls)


async def test_a_closed_line_tells_its_reason_to_all_that_is_under_way(pair: Pair) -> None:
    pair.worker.may_go.clear()
    calls = [asyncio.create_task(pair.line.run(begin(attempt), Heard().take)) for attempt in (A, B)]
    await until(lambda: pair.worker.open_calls == 2)
    await pair.line.close(LEFT)
    for call in calls:
        assert type(await outcome_of(call)) is WorkerLeaving
    with pytest.raises(WorkerLeaving):
        await pair.line.questions.info(5.0)
    assert pair.ended_for == [], "only an end that was not asked for is told"
    await until(lambda: not pair.worker.open_calls)


async def test_an_address_without_a_worker_is_unavailable() -> None:
    line = Line(GrpcTransport("127.0.0.1:1", TOKEN))
    with pytest.raises(Unavailable):
        await line.questions.info(5.0)
    await line.close(LEFT)


async def test_the_wrong_token_ends_the_line() -> None:
    async with served(FakeWorker(WorkerId("w"), Role.DECODE), TOKEN) as (_, address):
        line = Line(GrpcTransport(address, "another"))
        for call in (line.questions.info(5.0), line.run(begin(A), Heard().take)):
            with pytest.raises(Unavailable, match="token"):
                await call
        assert not line.is_open
        await line.close(LEFT)


async def test_a_write_after_the_end_tells_why_the_line_ended() -> None:
    async with served(FakeWorker(WorkerId("w"), Role.DECODE), TOKEN) as (_, address):
        transport = GrpcTransport(address, "another")
        for use in (transport.read, lambda: transport.write(worker_pb2.ConnectRequest())):
            with pytest.raises(Unavailable, match="token"):
                await use()
        await transport.close()


async def test_a_worker_that_comes_back_is_reached_on_a_new_line() -> None:
    worker = FakeWorker(WorkerId("w"), Role.DECODE)
    async with served(worker, TOKEN) as (_, address), line_to(GrpcTransport(address, TOKEN)) as line:
        await line.questions.info(5.0)
    async with line_to(GrpcTransport(address, TOKEN)) as line:
        with pytest.raises(Unavailable):
            await line.questions.info(5.0)
    async with served(worker, TOKEN, address), line_to(GrpcTransport(address, TOKEN)) as line:
        assert (await line.questions.info(5.0)).worker_id == "w"


async def test_a_connection_that_fails_in_an_unknown_way_ends_its_line() -> None:
    class Broken:
        async def write(self, request: worker_pb2.ConnectRequest) -> None:
            await asyncio.Event().wait()

        async def read(self) -> worker_pb2.ConnectResponse | None:
            raise KeyError("a bug")

        async def close(self) -> None: ...

    async with line_to(Broken()) as line:
        with pytest.raises(Unavailable, match="incident"):
            await line.questions.info(5.0)


@asynccontextmanager
async def line_to(transport: Transport) -> AsyncIterator[Line]:
    line = Line(transport)
    try:
        yield line
    finally:
        await line.close(LEFT)


async def test_a_begin_of_100_000_tokens_arrives_whole(script: Script) -> None:
    long = begin(A, num_prompt=100_000)
    assert long.ByteSize() > 2 * MAX_PIECE_BYTES
    call = asyncio.create_task(script.line.run(long, Heard().take))
    await until(lambda: script.worker.begins)
    assert script.worker.begins == [long]
    script.worker.say(ends=True)
    await call


@pytest.mark.parametrize("fail_after", [0, 1, 3])
async def test_a_fault_comes_after_so_many_updates(fail_after: int) -> None:
    heard = Heard()
    async with line_to(FaultyTransport(FakeWorker(WorkerId("w"), Role.DECODE), Faults(fail_after=fail_after))) as line:
        with pytest.raises(Unavailable):
            await line.run(begin(A), heard.take)
    assert len(heard.updates) == fail_after


async def test_dropped_updates_are_missing() -> None:
    heard = Heard()
    async with line_to(FaultyTransport(FakeWorker(WorkerId("w"), Role.DECODE), Faults(drop=frozenset({2})))) as line:
        await line.run(begin(A), heard.take)
    assert heard.token_ids == [expected(6)[1], *expected(6)[3:]]


async def test_orders_to_read_ahead_go_before_the_begin_of_their_attempt_and_no_more_wait_than_fit() -> None:
    outgoing = Outgoing()
    outgoing.begin(begin(B))
    orders = [worker_pb2.Prefetch(id=A, first_block=place) for place in range(MAX_PREFETCHES + 1)]
    assert [outgoing.prefetch(order) for order in orders] == [*[True] * MAX_PREFETCHES, False]
    message = outgoing.next()
    assert message is not None
    assert [*message.prefetches] == orders[:-1]
    assert [one.id for one in message.begins] == [B]
    assert outgoing.prefetch(orders[-1])


async def test_a_worker_that_knows_no_orders_to_read_ahead_goes_on(script: Script) -> None:
    """An earlier release skips the field, as it skips every field that it does not know."""
    assert script.line.prefetch(worker_pb2.Prefetch(id=A))
    call = asyncio.create_task(script.line.run(begin(A), Heard().take))
    await until(lambda: script.worker.begins)
    script.worker.say(ends=True)
    await call


def test_fifty_prompts_of_100_000_tokens_on_a_line_of_1_mb_per_s_delay_no_renewal() -> None:
    virtual_time.run(renew_on_a_slow_line())


async def renew_on_a_slow_line() -> None:
    worker = ScriptedWorker(WorkerId("w"), Role.DECODE)
    members = Members(FINGERPRINT, LAYOUT.encode())
    holds = HoldBudgets(members)
    prompts = [begin(AttemptId(f"r{number}/1"), num_prompt=100_000) for number in range(50)]
    async with line_to(FaultyTransport(worker, Faults(bytes_per_s=1e6))) as line:
        members.add(
            Member(
                worker=Worker(worker.worker_id, worker.role, "", WorkerState.READY),
                info=await line.questions.info(5.0),
                line=line,
            )
        )
        holds.resize()
        holds.start()
        async with holds.hold(A, [BlockKey(b"a block")], ""):
            holds.keep(A)
            calls = [asyncio.create_task(line.run(prompt, Heard().take)) for prompt in prompts]
            renewed_at_s = await times_of_renewals(worker, until_begun=50)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
        await holds.stop()
    assert worker.begins == prompts
    assert renewed_at_s[-1] > HOLD_TTL_S, "the prompts are longer on their way than a hold lives"
    assert max(later - earlier for earlier, later in pairwise([0.0, *renewed_at_s])) < HOLD_TTL_S / 2


async def times_of_renewals(worker: ScriptedWorker, until_begun: int) -> list[float]:
    times_s: list[float] = []
    while len(worker.begins) < until_begun:
        await asyncio.sleep(0.01)
        now_s = asyncio.get_running_loop().time()
        times_s.extend([now_s] * (len(worker.renewed) - len(times_s)))
    return times_s


def written(outgoing: Outgoing) -> Iterator[worker_pb2.ConnectRequest]:
    """All that waits, in the order in which it is written; stops where nothing waits."""
    while (request := outgoing.next()) is not None:
        yield request


def long_begin(attempt: AttemptId) -> worker_pb2.Begin:
    """A Begin of three pieces."""
    return begin(attempt, num_prompt=MAX_PIECE_BYTES)


async def test_a_long_backlog_of_updates_arrives(opening: Opening) -> None:
    """More than the 4 MiB that other messages may have."""
    ids = list(range(1_200_000, 2_600_000))

    class Prolific(FakeWorker):
        async def decode(self, begin: worker_pb2.Begin) -> AsyncIterator[worker_pb2.Update]:
            tokens = worker_pb2.ChoiceTokens(first_position=1, token_ids=ids)
            yield worker_pb2.Update(choices=[tokens], end=worker_pb2.End())

    updates: list[worker_pb2.Update] = []

    def take(update: worker_pb2.Update) -> bool:
        updates.append(update)
        return True

    async for pair in opening(Prolific(WorkerId("w"), Role.DECODE)):
        await pair.line.run(begin(A), take)
        assert updates[0].ByteSize() > 4 << 20
        assert list(updates[0].choices[0].token_ids) == ids


class TestOutgoing:
    """The order of orders, without a line."""

    def test_short_orders_go_together_and_before_any_begin(self) -> None:
        outgoing = Outgoing()
        outgoing.begin(begin(A))
        outgoing.renew([B])
        outgoing.short().releases.append(C)
        outgoing.short().asks.append(worker_pb2.Ask(number=1, info=worker_pb2.GetInfo()))
        outgoing.abort(C)
        (message,) = written(outgoing)
        assert [AttemptId(one) for one in (*message.renewals, *message.releases, *message.aborts)] == [B, C, C]
        assert [ask.number for ask in message.asks] == [1]
        assert list(message.begins) == [begin(A)]

    def test_begins_go_in_their_order_as_many_at_once_as_a_piece_is_long(self) -> None:
        outgoing = Outgoing()
        num_tokens = MAX_PIECE_BYTES // 8
        for attempt in (B, A, C):
            outgoing.begin(begin(attempt, num_tokens))
        first, second = written(outgoing)
        assert [AttemptId(begin.id) for begin in first.begins] == [B, A]
        assert [AttemptId(begin.id) for begin in second.begins] == [C]
        assert first.ByteSize() <= MAX_PIECE_BYTES + 64

    def test_a_long_begin_goes_in_pieces_between_which_short_orders_pass(self) -> None:
        outgoing = Outgoing()
        outgoing.begin(long_begin(A))
        outgoing.begin(begin(B))
        first = outgoing.next()
        outgoing.renew([C])
        short, *pieces, last = written(outgoing)
        assert first is not None
        assert [AttemptId(one) for one in short.renewals] == [C]
        assert [AttemptId(begin.id) for begin in last.begins] == [B]
        data = b"".join(request.piece.data for request in (first, *pieces))
        assert worker_pb2.Begin.FromString(data) == long_begin(A)
        assert [request.piece.last for request in pieces] == [*[False] * (len(pieces) - 1), True]
        assert max(len(request.piece.data) for request in (first, *pieces)) == MAX_PIECE_BYTES

    def test_an_abort_withdraws_a_begin_that_waits(self) -> None:
        outgoing = Outgoing()
        for attempt in (A, B):
            outgoing.begin(begin(attempt))
        outgoing.abort(A)
        assert [AttemptId(begin.id) for request in written(outgoing) for begin in request.begins] == [B]

    def test_an_abort_amid_the_pieces_takes_back_the_rest(self) -> None:
        outgoing = Outgoing()
        for attempt in (A, B):
            outgoing.begin(long_begin(attempt))
        outgoing.next()
        outgoing.abort(A)
        short, *pieces = written(outgoing)
        assert [AttemptId(one) for one in short.aborts] == [A]
        assert {AttemptId(request.piece.id) for request in pieces} == {B}

    def test_a_renewal_takes_the_place_of_one_that_waits(self) -> None:
        outgoing = Outgoing()
        outgoing.renew([A, B])
        outgoing.renew([B, C])
        (short,) = written(outgoing)
        assert [AttemptId(one) for one in short.renewals] == [B, C]

    async def test_a_writer_waits_for_an_order(self) -> None:
        outgoing = Outgoing()
        taking = asyncio.create_task(outgoing.take())
        await asyncio.sleep(0)
        assert not taking.done()
        outgoing.short().releases.append(A)
        assert [AttemptId(one) for one in (await taking).releases] == [A]
