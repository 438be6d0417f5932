"""The router's end of the line to one worker: orders of all requests go out, and updates come in, each to its attempt.

    begin, abort, end_choices, recall, prefetch, renew, release, ask ─▶ Outgoing ─▶ Transport ─▶ worker
    _Attempt.take(update) ◀─ Line._deliver ◀────────  Transport ◀─ one message per step of the engine
    Questions.answer(reply) ◀┘

A line ends once. Its running attempts and questions then fail with Unavailable; a new line serves later requests.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import Any, Protocol

from wire import errors
from wire.convert import error_from_pb
from wire.errors import BatonError, DeadlineExceeded, Unavailable
from wire.ids import AttemptId
from wire.pb import worker_pb2

MAX_PIECE_BYTES = 64 << 10
MAX_PREFETCHES = 4
"""Bound on prefetches that wait for the connection, of some 12 KB each."""
LAST_WORDS_S = 1.0
"""Time after a failed write to read the worker's last messages, which may have the true reason."""
Take = Callable[[worker_pb2.Update], bool]
"""A function that takes an update, without waiting, and returns whether more are wanted.

An exception ends the attempt alone.
"""


class Transport(Protocol):
    """A connection to a worker, of whole messages. Twins: `GrpcTransport` and `LocalTransport`."""

    async def write(self, request: worker_pb2.ConnectRequest) -> None:
        """Waits until the connection has room for more. Raises BatonError once it is broken."""

    async def read(self) -> worker_pb2.ConnectResponse | None:
        """Returns the next message; None at the end. Raises BatonError once the connection is broken."""

    async def close(self) -> None: ...


Connect = Callable[[str], Transport]
"""A function that opens a connection to an address, without waiting for it."""


class Outgoing:
    """The orders that wait for the connection. Short orders go first, and between the pieces of a long Begin."""

    def __init__(self) -> None:
        self._short = worker_pb2.ConnectRequest()
        self._begins: OrderedDict[AttemptId, worker_pb2.Begin] = OrderedDict()
        self._pieces: deque[worker_pb2.BeginPart] = deque()
        self._changed = asyncio.Event()

    def begin(self, begin: worker_pb2.Begin) -> None:
        self._begins[AttemptId(begin.id)] = begin
        self._changed.set()

    def abort(self, attempt: AttemptId) -> None:
        """Withdraws a waiting Begin; sends an abort only if the worker may have the Begin."""
        if self._begins.pop(attempt, None) is None:
            self._short.aborts.append(attempt)
        if self._pieces and self._pieces[0].id == attempt:
            self._pieces.clear()
        self._changed.set()

    def prefetch(self, order: worker_pb2.Prefetch) -> bool:
        """Adds an order to read ahead; returns False, and drops it, if too many wait."""
        has_room = len(self._short.prefetches) < MAX_PREFETCHES
        if has_room:
            self.short().prefetches.append(order)
        return has_room

    def renew(self, attempts: Sequence[AttemptId]) -> None:
        """Replaces a waiting renewal."""
        short = self.short()
        del short.renewals[:]
        short.renewals.extend(attempts)

    def short(self) -> worker_pb2.ConnectRequest:
        """Returns the next message's short orders, to add to; wakes the writer."""
        self._changed.set()
        return self._short

    async def take(self) -> worker_pb2.ConnectRequest:
        """Waits for the next message to write."""
        while (request := self.next()) is None:
            self._changed.clear()
            await self._changed.wait()
        return request

    def next(self) -> worker_pb2.ConnectRequest | None:
        """Returns the next message, if any: all short orders, and attempts to begin or a piece of a long Begin."""
        message, self._short = self._short, worker_pb2.ConnectRequest()
        num_bytes = message.ByteSize()
        if not self._pieces:
            self._add_begins(message, num_bytes)
        if self._pieces and not num_bytes:
            message.piece.CopyFrom(self._pieces.popleft())
        return message if message.ByteSize() else None

    def _add_begins(self, message: worker_pb2.ConnectRequest, num_bytes: int) -> None:
        """Adds attempts to begin up to a message's size; cuts a Begin in pieces if it exceeds a message."""
        while self._begins:
            begin = next(iter(self._begins.values()))
            num_bytes += begin.ByteSize()
            if num_bytes > MAX_PIECE_BYTES and message.ByteSize():
                return
            self._begins.popitem(last=False)
            if num_bytes > MAX_PIECE_BYTES:
                self._pieces.extend(_pieces_of(begin))
                return
            message.begins.append(begin)


class Questions:
    """The unanswered questions to a worker. send: puts a question on the line, or raises the reason of its end."""

    def __init__(self, send: Callable[[worker_pb2.Ask], None]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[worker_pb2.WorkerReply]] = {}
        self._num_asked = 0

    @property
    def unanswered(self) -> list[asyncio.Future[worker_pb2.WorkerReply]]:
        return [*self._waiting.values()]

    async def info(self, timeout_s: float) -> worker_pb2.WorkerInfo:
        """Asks for the worker's description. Raises BatonError, DeadlineExceeded after `timeout_s`."""
        return (await self._ask(worker_pb2.Ask(info=worker_pb2.GetInfo()), timeout_s)).info

    async def status(self, check: bool, timeout_s: float) -> worker_pb2.WorkerStatus:
        """Asks for the worker's status, with `check` for violated invariants, too. Raises the errors of `info`."""
        return (await self._ask(worker_pb2.Ask(status=worker_pb2.GetStatus(check=check)), timeout_s)).status

    async def events(self, after: worker_pb2.EventCursor, timeout_s: float) -> worker_pb2.EventPage:
        """Waits at most a second for block events of the worker's node after a place. Raises the errors of `info`."""
        return (await self._ask(worker_pb2.Ask(events=worker_pb2.GetEvents(after=after)), timeout_s)).events

    async def room(self, router: str, num_blocks: int, timeout_s: float) -> worker_pb2.HoldRoom:
        """Tells what the router's holds take of the node's arena; returns what others' take. Raises as `info`."""
        question = worker_pb2.Ask(room=worker_pb2.ShareRoom(router=router, blocks=num_blocks))
        return (await self._ask(question, timeout_s)).room

    async def holdings(self, question: worker_pb2.Ask, timeout_s: float) -> worker_pb2.Holdings:
        """Counts, clears or drops blocks of the worker or of its node. Raises the errors of `info`."""
        return (await self._ask(question, timeout_s)).holdings

    def answer(self, answer: worker_pb2.WorkerReply) -> None:
        """Passes an answer to the call that waits for it; drops a late answer."""
        waiting = self._waiting.get(answer.number)
        if waiting is None or waiting.done():
            return
        if answer.HasField("error"):
            waiting.set_exception(error_from_pb(answer.error))
        else:
            waiting.set_result(answer)

    async def _ask(self, question: worker_pb2.Ask, timeout_s: float) -> worker_pb2.WorkerReply:
        self._num_asked += 1
        asked = worker_pb2.Ask(number=self._num_asked)
        asked.MergeFrom(question)
        answer: asyncio.Future[worker_pb2.WorkerReply] = asyncio.get_running_loop().create_future()
        self._waiting[asked.number] = answer
        try:
            self._send(asked)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise DeadlineExceeded("the worker did not answer in time") from error
        finally:
            del self._waiting[asked.number]


class Line:
    """A connection, from its opening to its end. Belongs to the running event loop.

    on_end: called once, with the reason, unless `close` ends the line.
    """

    def __init__(self, transport: Transport, on_end: Callable[[BatonError], None] = lambda _: None) -> None:
        self._transport = transport
        self._on_end = on_end
        self._outgoing = Outgoing()
        self._attempts: dict[AttemptId, _Attempt] = {}
        self.questions = Questions(self._send)
        self._ended_holds: list[AttemptId] = []
        self._ended_for: BatonError | None = None
        self._tasks = [asyncio.create_task(self._write_all()), asyncio.create_task(self._read_all())]

    @property
    def is_open(self) -> bool:
        return self._ended_for is None

    async def run(self, begin: worker_pb2.Begin, take: Take) -> None:
        """Begins an attempt and passes its updates on, until the worker ends it or `take` wants no more.

        Raises the worker's error, or Unavailable at the line's end. The worker then aborts an unfinished attempt.
        """
        self._require_open()
        attempt_id = AttemptId(begin.id)
        attempt = self._attempts[attempt_id] = _Attempt(take)
        self._outgoing.begin(begin)
        try:
            await attempt.over
        finally:
            del self._attempts[attempt_id]
            if not attempt.has_ended:
                self._outgoing.abort(attempt_id)

    def end_choices(self, attempt: AttemptId, indices: Iterable[int]) -> None:
        """Ends choices of a running attempt; the worker goes on with the others."""
        ended = (worker_pb2.EndedChoice(attempt=attempt, index=index) for index in indices)
        self._outgoing.short().ended_choices.extend(ended)

    def prefetch(self, order: worker_pb2.Prefetch) -> bool:
        """Has the worker read blocks of an attempt that may begin there; returns False if the line is behind."""
        return self._outgoing.prefetch(order)

    def recall(self, attempt: AttemptId) -> None:
        """Has the worker end an attempt with PromptReturned if it has not begun the prompt."""
        self._outgoing.short().recalls.append(attempt)

    def renew(self, attempts: Sequence[AttemptId]) -> None:
        """Renews the holds of these attempts."""
        self._outgoing.renew(attempts)

    def take_ended_holds(self) -> list[AttemptId]:
        """Returns the renewed attempts whose holds had ended, by the worker's answers since the last call."""
        ended, self._ended_holds = self._ended_holds, []
        return ended

    def release(self, attempt: AttemptId) -> None:
        """Ends the hold of an attempt."""
        self._outgoing.short().releases.append(attempt)

    async def close(self, reason: BatonError) -> None:
        """Ends open attempts with this error, and closes the connection."""
        self._on_end = lambda _: None
        self._end(reason)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._transport.close()

    @property
    def num_attempts(self) -> int:
        """The number of running attempts."""
        return len(self._attempts)

    def _send(self, question: worker_pb2.Ask) -> None:
        self._require_open()
        self._outgoing.short().asks.append(question)

    async def _write_all(self) -> None:
        try:
            while True:
                await self._transport.write(await self._outgoing.take())
        except Exception as error:
            await asyncio.sleep(LAST_WORDS_S)
            self._end(_reason_of(error))

    async def _read_all(self) -> None:
        try:
            while (response := await self._transport.read()) is not None:
                for update in response.updates:
                    self._deliver(update)
                for answer in response.answers:
                    self.questions.answer(answer)
                self._ended_holds += map(AttemptId, response.ended_holds)
            self._end(Unavailable("the worker has closed the line"))
        except Exception as error:
            self._end(_reason_of(error))

    def _deliver(self, update: worker_pb2.Update) -> None:
        """Passes an update to its attempt; drops an ended attempt's update."""
        attempt = self._attempts.get(AttemptId(update.id))
        if attempt is not None:
            attempt.take(update)

    def _end(self, reason: BatonError) -> None:
        if self._ended_for is not None:
            return
        self._ended_for = reason
        waiting: list[asyncio.Future[Any]] = [attempt.over for attempt in self._attempts.values()]
        for future in (*waiting, *self.questions.unanswered):
            if not future.done():
                future.set_exception(copy(reason))
        for task in self._tasks:
            task.cancel()
        self._on_end(reason)

    def _require_open(self) -> None:
        if self._ended_for is not None:
            raise copy(self._ended_for) from None


class _Attempt:
    """A running attempt. has_ended: the worker has ended it."""

    def __init__(self, take: Take) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_ended = False
        self._take = take

    def take(self, update: worker_pb2.Update) -> None:
        """Passes an update on; the last update ends the attempt."""
        self.has_ended = update.HasField("end")
        if self.over.done():
            return
        error: Exception | None = error_from_pb(update.end.error) if update.end.HasField("error") else None
        try:
            wants_more = self._take(update)
        except Exception as bug:  # raised again in `run`: a bug in one request ends that one alone
            error = bug
        if self.over.done():
            return  # the request was stopped from within `take`
        if error is not None:
            self.over.set_exception(error)
        elif self.has_ended or not wants_more:
            self.over.set_result(None)


def _reason_of(error: Exception) -> BatonError:
    """Returns the reason of a line's end. A bug ends it, too, for a stuck line would block all requests."""
    return error if isinstance(error, BatonError) else Unavailable(errors.report(error).message)


def _pieces_of(begin: worker_pb2.Begin) -> Iterator[worker_pb2.BeginPart]:
    data = begin.SerializeToString()
    for start in range(0, len(data), MAX_PIECE_BYTES):
        end = start + MAX_PIECE_BYTES
        yield worker_pb2.BeginPart(id=begin.id, data=data[start:end], last=end >= len(data))
