"""The worker's end of the line to one router: orders come in, and updates of its attempts go out.

    StepOutput ─▶ Job.take ─▶ Update ─▶ WorkerLine.send ═ ConnectResponse ═▶ Line ─▶ Attempt ─▶ ChoiceStreams

An update is one message all the way: a job writes it, and the line joins it to unsent updates. If the router reads
slowly, an attempt's updates here grow only by tokens. No step of the engine waits for a line.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from google.protobuf.message import DecodeError

from wire.errors import BatonError, InvalidRequest
from wire.ids import AttemptId
from wire.pb import worker_pb2
from worker.convert import ended_with

MAX_MESSAGE_TOKENS = 4096
"""Approximate bound on the tokens of a message: with logprobs a token may take a kilobyte."""
MAX_UPDATE_TOKENS = 512
"""Bound on an attempt's tokens in a message: their log-probabilities take the router some milliseconds."""
MAX_BEGIN_BYTES = 64 << 20


class AttemptOrders(Protocol):
    """A router's orders about attempts on its line. No call blocks, or fails for an attempt that has ended."""

    def begin(self, line: "WorkerLine", begin: worker_pb2.Begin) -> None:
        """Begins an attempt. Raises BatonError if it cannot begin."""

    def abort(self, line: "WorkerLine", attempt_id: AttemptId) -> None: ...

    def end_choice(self, line: "WorkerLine", attempt_id: AttemptId, index: int) -> None: ...

    def recall(self, line: "WorkerLine", attempt_id: AttemptId) -> None: ...

    def prefetch(self, order: worker_pb2.Prefetch) -> None:
        """Begins to read blocks of an attempt that may come; a wrong order is logged, and dropped."""


class Orders(Protocol):
    """A router's other orders, about holds and the worker itself. No call blocks; errors go back on the line."""

    def renew(self, line: "WorkerLine", attempts: list[AttemptId]) -> None: ...

    def release(self, attempts: list[AttemptId]) -> None: ...

    def answer(self, line: "WorkerLine", ask: worker_pb2.Ask) -> None: ...

    def line_ended(self, line: "WorkerLine") -> None: ...


class PartialBegin:
    """A Begin that comes in pieces, of which it keeps at most MAX_BEGIN_BYTES."""

    def __init__(self, attempt: AttemptId) -> None:
        self.attempt = attempt
        self._data = bytearray()
        self._num_bytes = 0

    def add(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes <= MAX_BEGIN_BYTES:
            self._data.extend(data)

    def parse(self) -> worker_pb2.Begin:
        """Parses the joined message. Raises InvalidRequest if it is too long, no Begin, or another attempt's."""
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
    """A line to one router. Belongs to one event loop; gRPC, or the twin, calls `take` and `next` until `close`."""

    def __init__(self, attempts: AttemptOrders, orders: Orders) -> None:
        self._attempts = attempts
        self._orders = orders
        self._unsent: OrderedDict[str, list[worker_pb2.Update]] = OrderedDict()
        self._news = worker_pb2.ConnectResponse()
        self._partial: PartialBegin | None = None
        self._is_closed = False
        self._changed = asyncio.Event()

    def take(self, request: worker_pb2.ConnectRequest) -> None:
        """Carries out orders, ends first and recalls last; errors go back on the line. Does nothing after its end."""
        if self._is_closed:
            return
        for message in request.aborts:
            self._abort(AttemptId(message))
        for ended in request.ended_choices:
            self._attempts.end_choice(self, AttemptId(ended.attempt), ended.index)
        if request.renewals:
            self._orders.renew(self, list(map(AttemptId, request.renewals)))
        if request.releases:
            self._orders.release(list(map(AttemptId, request.releases)))
        for ask in request.asks:
            self._orders.answer(self, ask)
        for prefetch in request.prefetches:
            self._attempts.prefetch(prefetch)
        for begin in request.begins:
            self._begin(begin)
        if request.HasField("piece"):
            self._take_piece(request.piece)
        for message in request.recalls:
            self._attempts.recall(self, AttemptId(message))

    def send(self, update: worker_pb2.Update) -> None:
        """Joins an update to its attempt's unsent updates. Does nothing after the end."""
        if self._is_closed:
            return
        unsent = self._unsent.setdefault(update.id, [])
        for part in _parts(update):
            if unsent and _num_tokens(unsent[-1]) + _num_tokens(part) <= MAX_UPDATE_TOKENS:
                join(unsent[-1], part)
            else:
                unsent.append(part)
        self._changed.set()

    def send_answer(self, answer: worker_pb2.WorkerReply) -> None:
        if not self._is_closed:
            self._news.answers.append(answer)
            self._changed.set()

    def send_ended_holds(self, attempts: list[AttemptId]) -> None:
        if attempts and not self._is_closed:
            self._news.ended_holds.extend(attempts)
            self._changed.set()

    async def next(self) -> worker_pb2.ConnectResponse | None:
        """Returns unsent updates, answers and ends of holds, once there are any; None after the end."""
        while not (self._unsent or self._has_news or self._is_closed):
            self._changed.clear()
            await self._changed.wait()
        if not (self._unsent or self._has_news):
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
        self._unsent.clear()
        self._news.Clear()
        self._orders.line_ended(self)

    @property
    def _has_news(self) -> bool:
        return bool(self._news.answers or self._news.ended_holds)

    def _take_updates(self) -> Iterator[worker_pb2.Update]:
        """Takes updates for a message, at most one part of each attempt; the rest comes first in the next message."""
        num_tokens = 0
        while self._unsent and num_tokens < MAX_MESSAGE_TOKENS:
            attempt, (part, *rest) = self._unsent.popitem(last=False)
            num_tokens += _num_tokens(part)
            yield part
            if rest:
                self._unsent[attempt] = rest
                self._unsent.move_to_end(attempt, last=False)
                return

    def _abort(self, attempt: AttemptId) -> None:
        if self._partial is not None and self._partial.attempt == attempt:
            self._partial = None
        self._unsent.pop(attempt, None)
        self._attempts.abort(self, attempt)

    def _begin(self, begin: worker_pb2.Begin) -> None:
        try:
            self._attempts.begin(self, begin)
        except BatonError as error:
            self.send(ended_with(AttemptId(begin.id), error))

    def _take_piece(self, piece: worker_pb2.BeginPart) -> None:
        attempt = AttemptId(piece.id)
        if self._partial is None or self._partial.attempt != attempt:
            self._partial = PartialBegin(attempt)
        self._partial.add(piece.data)
        if piece.last:
            partial, self._partial = self._partial, None
            try:
                self._begin(partial.parse())
            except InvalidRequest as error:
                self.send(ended_with(attempt, error))


def _num_tokens(update: worker_pb2.Update) -> int:
    """Counts the tokens of all choices, and the scored tokens of the prompt."""
    num_scored = len(update.scores.logprobs) if update.HasField("scores") else 0
    return num_scored + sum([len(one.token_ids) for one in update.choices])


def _parts(update: worker_pb2.Update) -> list[worker_pb2.Update]:
    """Cuts long scores of a prompt into parts of one message each; the last part has everything else."""
    parts: list[worker_pb2.Update] = []
    while update.HasField("scores") and len(update.scores.logprobs) > MAX_UPDATE_TOKENS:
        scores, first = update.scores, update.scores.first_position
        part = worker_pb2.PromptScores(first_position=first, logprobs=scores.logprobs[:MAX_UPDATE_TOKENS])
        parts.append(worker_pb2.Update(id=update.id, scores=part))
        del scores.logprobs[:MAX_UPDATE_TOKENS]
        scores.first_position = first + MAX_UPDATE_TOKENS
    return [*parts, update]


def join(update: worker_pb2.Update, later: worker_pb2.Update) -> None:
    """Appends the next update of the same attempt. Modifies `later`."""
    for tokens in list(later.choices):
        earlier = next((one for one in update.choices if one.index == tokens.index), None)
        if earlier is None:
            update.choices.append(tokens)
        else:
            tokens.first_position = earlier.first_position
            earlier.MergeFrom(tokens)
    del later.choices[:]
    if update.HasField("scores") and later.HasField("scores"):
        later.scores.first_position = update.scores.first_position
    update.MergeFrom(later)
