"""The worker's end of the line to one router: orders come in, and updates of its attempts go out.

Unsent updates join: however slowly the router reads, an attempt has one update here, which grows by tokens only.
No step of the engine waits for the line.
"""

import asyncio
from collections import OrderedDict
from typing import Protocol

from google.protobuf.message import DecodeError

from wire.errors import BatonError, InvalidRequest
from wire.ids import AttemptId
from wire.pb import worker_pb2
from worker.inbox import Call
from worker.messages import update_to_pb
from worker.update import End, Update

MAX_MESSAGE_TOKENS = 4096
"""Of one message, about: with logprobs a token may take a kilobyte."""
MAX_UPDATE_TOKENS = 512
"""Of one attempt in one message. Their log-probabilities take the router some milliseconds."""
MAX_BEGIN_BYTES = 64 << 20


class Orders(Protocol):
    """The orders of a router to a worker. No call blocks; errors go back on the line."""

    def begin(self, call: Call, begin: worker_pb2.Begin) -> None:
        """Begins an attempt. Raises BatonError if it cannot begin."""
        ...

    def abort(self, line: "WorkerLine", attempt: AttemptId) -> None: ...

    def end_choice(self, line: "WorkerLine", attempt: AttemptId, index: int) -> None: ...

    def renew(self, line: "WorkerLine", attempts: list[AttemptId]) -> None: ...

    def release(self, attempts: list[AttemptId]) -> None: ...

    def answer(self, line: "WorkerLine", ask: worker_pb2.Ask) -> None: ...

    def line_ended(self, line: "WorkerLine") -> None: ...


class PartialBegin:
    """A Begin that comes in pieces. It keeps at most MAX_BEGIN_BYTES of them."""

    def __init__(self, attempt: AttemptId) -> None:
        self.attempt = attempt
        self._data = bytearray()
        self._num_bytes = 0

    def add(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes <= MAX_BEGIN_BYTES:
            self._data.extend(data)

    def parse(self) -> worker_pb2.Begin:
        """Puts the message together. Raises InvalidRequest if it is too long, no Begin, or of another attempt."""
        if self._num_bytes > MAX_BEGIN_BYTES:
            raise InvalidRequest("begin", f"has more than {MAX_BEGIN_BYTES} bytes")
        try:
            begin = worker_pb2.Begin.FromString(bytes(self._data))
        except DecodeError as error:
            raise InvalidRequest("begin", "not the message that it claims to be") from error
        if begin.id != self.attempt:
            raise InvalidRequest("begin", "its pieces are of another attempt")
        return begin


class WorkerLine:
    """A line of one router. Belongs to one event loop; gRPC, or the twin, calls `take` and `next` until `close`."""

    def __init__(self, orders: Orders, worker_id: str) -> None:
        self._orders = orders
        self._worker_id = worker_id
        self._updates: OrderedDict[AttemptId, Update] = OrderedDict()
        self._news = worker_pb2.ConnectResponse()
        self._partial: PartialBegin | None = None
        self._is_closed = False
        self._changed = asyncio.Event()

    def take(self, request: worker_pb2.ConnectRequest) -> None:
        """Carries out orders, ends before the others; errors go back on the line. Does nothing after its end."""
        if self._is_closed:
            return
        for message in request.aborts:
            self._abort(AttemptId(message))
        for ended in request.ended_choices:
            self._orders.end_choice(self, AttemptId(ended.attempt), ended.index)
        if request.renewals:
            self._orders.renew(self, list(map(AttemptId, request.renewals)))
        if request.releases:
            self._orders.release(list(map(AttemptId, request.releases)))
        for ask in request.asks:
            self._orders.answer(self, ask)
        for begin in request.begins:
            self._begin(begin)
        if request.HasField("piece"):
            self._take_piece(request.piece)

    def send(self, attempt: AttemptId, update: Update) -> None:
        """Joins an update to the unsent update of its attempt. Does nothing after the end."""
        if not self._is_closed:
            earlier = self._updates.get(attempt)
            self._updates[attempt] = update if earlier is None else earlier.followed_by(update)
            self._changed.set()

    def send_answer(self, answer: worker_pb2.Answer) -> None:
        if not self._is_closed:
            self._news.answers.append(answer)
            self._changed.set()

    def send_ended_holds(self, attempts: list[AttemptId]) -> None:
        if attempts and not self._is_closed:
            self._news.ended_holds.extend(attempts)
            self._changed.set()

    async def next(self) -> worker_pb2.ConnectResponse | None:
        """Returns all unsent updates, answers and ends of holds, once there are any; None after the end."""
        while not (self._updates or self._has_news or self._is_closed):
            self._changed.clear()
            await self._changed.wait()
        if not (self._updates or self._has_news):
            return None
        news, self._news = self._news, worker_pb2.ConnectResponse()
        news.updates.extend(self._take_updates())
        return news

    def finish(self) -> None:
        """Ends the line after its unsent updates."""
        self._is_closed = True
        self._changed.set()

    def close(self) -> None:
        """Ends the line at once, and aborts its attempts. A second call does nothing."""
        self.finish()
        self._updates.clear()
        self._news.Clear()
        self._orders.line_ended(self)

    @property
    def _has_news(self) -> bool:
        return bool(self._news.answers or self._news.ended_holds)

    def _take_updates(self) -> list[worker_pb2.Update]:
        """Takes as much as a message may have; the rest of an update that is too long stays the first."""
        updates, num_tokens, is_cut = [], 0, False
        while self._updates and num_tokens < MAX_MESSAGE_TOKENS and not is_cut:
            attempt, update = self._updates.popitem(last=False)
            is_cut = update.num_tokens > MAX_UPDATE_TOKENS
            if is_cut:
                update, self._updates[attempt] = update.cut(MAX_UPDATE_TOKENS)
                self._updates.move_to_end(attempt, last=False)
            updates.append(update_to_pb(attempt, update, self._worker_id))
            num_tokens += update.num_tokens
        return updates

    def _abort(self, attempt: AttemptId) -> None:
        if self._partial is not None and self._partial.attempt == attempt:
            self._partial = None
        self._updates.pop(attempt, None)
        self._orders.abort(self, attempt)

    def _begin(self, begin: worker_pb2.Begin) -> None:
        attempt = AttemptId(begin.id)
        try:
            self._orders.begin(Call(attempt, self), begin)
        except BatonError as error:
            self.send(attempt, Update(end=End(error)))

    def _take_piece(self, piece: worker_pb2.Piece) -> None:
        attempt = AttemptId(piece.id)
        if self._partial is None or self._partial.attempt != attempt:
            self._partial = PartialBegin(attempt)
        self._partial.add(piece.data)
        if piece.last:
            partial, self._partial = self._partial, None
            try:
                self._begin(partial.parse())
            except InvalidRequest as error:
                self.send(attempt, Update(end=End(error)))
