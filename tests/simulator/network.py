"""Connections between router and workers: whole messages, in order, each after a while; they break or go mute."""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from typing import Any, cast

from tests.simulator.virtual_time import Process
from wire.errors import Unavailable
from wire.pb import worker_pb2
from worker.server import WorkerApi
from worker.service import WorkerService

KEEPALIVE_S = 15.0
"""After so long a silence both ends take a connection for broken."""


class Pipe:
    """One direction of a connection.

    delay_s: of each message. num_twice: so many of the next messages come twice. is_mute: no message arrives.
    """

    def __init__(self, draw: random.Random) -> None:
        self.delay_s = 0.0
        self.num_twice = 0
        self.is_mute = False
        self._draw = draw
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[tuple[bytes, asyncio.Future[None]]] = deque()
        self._arrived: deque[bytes] = deque()
        self._is_broken = self._has_ended = False
        self._changed = asyncio.Event()

    async def send(self, message: bytes) -> None:
        """Returns when the message has arrived. Raises Unavailable once the connection is broken."""
        if self._is_broken or self._has_ended:
            raise Unavailable("the connection is broken")
        arrived = self._loop.create_future()
        self._under_way.append((message, arrived))
        latency_s = self._draw.choice([0.0, 0.0001, 0.001]) + self._draw.random() * 0.001
        self._loop.call_later(latency_s + self.delay_s, self._arrive, context=Context())
        await arrived

    async def receive(self) -> bytes | None:
        """Waits for a message; None after the end. Raises Unavailable once the connection is broken."""
        while not (self._arrived or self._is_broken or (self._has_ended and not self._under_way)):
            self._changed.clear()
            await self._changed.wait()
        if self._arrived:
            return self._arrived.popleft()
        if self._is_broken:
            raise Unavailable("the connection is broken")
        return None

    def end(self) -> None:
        """Ends the direction after the messages that are under way."""
        self._has_ended = True
        self._changed.set()

    def break_off(self) -> None:
        """Loses the messages that are under way."""
        self._is_broken = True
        self._changed.set()
        for _, arrived in self._under_way:
            if not arrived.done():
                arrived.set_exception(Unavailable("the connection is broken"))
                arrived.exception()
        self._under_way.clear()

    def _arrive(self) -> None:
        if self.is_mute or not self._under_way:
            return
        message, arrived = self._under_way.popleft()
        self._arrived.extend([message] * (2 if self.num_twice else 1))
        self.num_twice = max(0, self.num_twice - 1)
        self._changed.set()
        if not arrived.done():
            arrived.set_result(None)


class Connection:
    """A Transport to a worker, and the context of its call there, which the worker's own servicer serves.

    note: takes each message with the step that it is for the worker: begin or update. num_lost_pages, num_old_pages: so
    many of the next pages of block events do not come, or an earlier one comes in their place.
    """

    def __init__(
        self, process: Process, service: WorkerService, draw: random.Random, note: Callable[[str, str], None]
    ) -> None:
        self.to_worker, self.to_router = Pipe(draw), Pipe(draw)
        self.num_lost_pages = self.num_old_pages = 0
        self._pages: list[worker_pb2.EventPage] = []
        self._draw = draw
        self._note = note
        self._loop = asyncio.get_running_loop()
        if process.is_dead:
            self.break_off()
        else:
            process.spawn(self._serve(WorkerApi(service.connect)))

    async def write(self, request: worker_pb2.ConnectRequest) -> None:
        await self.to_worker.send(request.SerializeToString())

    async def read(self) -> worker_pb2.ConnectResponse | None:
        message = await self.to_router.receive()
        return None if message is None else worker_pb2.ConnectResponse.FromString(message)

    async def close(self) -> None:
        self.to_worker.end()
        self.to_router.break_off()

    def break_off(self) -> None:
        """Breaks both directions."""
        self.to_worker.break_off()
        self.to_router.break_off()

    def lose(self, pipe: Pipe) -> None:
        """Loses all messages of one direction, until the keepalive breaks the connection."""
        pipe.is_mute = True
        self._loop.call_later(KEEPALIVE_S, self.break_off, context=Context())

    async def _serve(self, api: WorkerApi) -> None:
        try:
            await api.Connect(self._requests(), cast(Any, _Context(self)))
        except Unavailable:
            return
        self.to_router.end()

    async def _requests(self) -> AsyncIterator[worker_pb2.ConnectRequest]:
        while (message := await self._next_request()) is not None:
            request = worker_pb2.ConnectRequest.FromString(message)
            for begin in request.begins:
                self._note("begin", begin.id)
            yield request

    async def _next_request(self) -> bytes | None:
        try:
            return await self.to_worker.receive()
        except Unavailable:
            return None

    async def respond(self, response: worker_pb2.ConnectResponse) -> None:
        """Sends a message of the worker."""
        for update in response.updates:
            what = "end" if update.HasField("end") else ""
            self._note("update", f"{update.id} {_tokens_of(update)} {what}".rstrip())
        for answer in [one for one in response.answers if one.HasField("events")]:
            self._spoil(response, answer)
        await self.to_router.send(response.SerializeToString())

    def _spoil(self, response: worker_pb2.ConnectResponse, answer: worker_pb2.WorkerReply) -> None:
        """Loses a page of block events, or puts an earlier one in its place, if it is to be so."""
        if self.num_lost_pages:
            self.num_lost_pages -= 1
            response.answers.remove(answer)
        elif self.num_old_pages and self._pages:
            self.num_old_pages -= 1
            answer.events.CopyFrom(self._draw.choice(self._pages))
        else:
            self._pages.append(answer.events)


class _Context:
    """A call's context, as far as a servicer uses it."""

    def __init__(self, connection: Connection) -> None:
        self.write = connection.respond


def _tokens_of(update: worker_pb2.Update) -> str:
    return " ".join(f"{one.index}:{one.first_position}+{len(one.token_ids)}" for one in update.choices)
