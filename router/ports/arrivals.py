"""Arrival of messages at a server: bounded in number and time, and parsed here."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import grpc.aio
from google.protobuf.descriptor_pb2 import DescriptorProto
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from router.requests.dispatch import Dispatcher
from wire import errors
from wire.limit import Limit, Pace
from wire.pb import inference_pb2

Context = grpc.aio.ServicerContext[Any, Any]
Arriving = Callable[[], AbstractAsyncContextManager[None]]
"""A context in which a message is waited for and parsed."""

MAX_ARRIVAL_S = 10.0
"""How long a call may take to send its message."""
MAX_ARRIVING = 64
"""Calls whose message is not there yet: each may hold as much memory as a message may have bytes."""
MAX_LISTED_BYTES = 64 << 10
"""Unknown fields of more bytes are not listed: a million of them would hold up the event loop for a second."""
MAX_NAMED = 4
MAX_UNPACED_BYTES = 256 << 10
PACE_BYTES_PER_S = 64 << 20
"""The event loop takes 10 to 20 ms for a message of 4 MiB, and may do so 16 times a second."""
_PACKAGE = inference_pb2.DESCRIPTOR.package


class ArrivalLimit:
    """Bounds the messages on their way to one port. A message of `generate` needs room for a request too."""

    def __init__(self, dispatcher: Dispatcher, generate: str) -> None:
        self._dispatcher = dispatcher
        self._generate = generate
        self.messages = Limit(MAX_ARRIVING, "messages are on their way")

    @asynccontextmanager
    async def arriving(self, method: str) -> AsyncIterator[None]:
        """While a message for that path is waited for. Raises Overloaded at once."""
        with self._dispatcher.arriving() if method == self._generate else nullcontext():
            async with self.messages.taken():
                yield


async def take_one(parse: Any, arriving: Arriving, pace: Pace, context: Context) -> Any:
    """The only message of a call. Raises InvalidRequest, or DeadlineExceeded if it does not come."""
    async with arriving():
        async with _in_time():
            first = await context.read()
            if first is grpc.aio.EOF:
                raise errors.InvalidRequest("message", "missing")
            if await context.read() is not grpc.aio.EOF:
                raise errors.InvalidRequest("message", "more than the one that this method takes")
            await pace.wait(len(first))
        return _parse(parse, first)


async def take_all(parse: Any, arriving: Arriving, pace: Pace, context: Context) -> AsyncIterator[Any]:
    """The messages of a call, as they come. Going through them raises as above."""
    return _each(parse, arriving, pace, context)


async def _each(parse: Any, arriving: Arriving, pace: Pace, context: Context) -> AsyncIterator[Any]:
    while (message := await _next(parse, arriving, pace, context)) is not grpc.aio.EOF:
        yield message


async def _next(parse: Any, arriving: Arriving, pace: Pace, context: Context) -> Any:
    async with arriving():
        async with _in_time():
            data = await context.read()
            if data is not grpc.aio.EOF:
                await pace.wait(len(data))
        return data if data is grpc.aio.EOF else _parse(parse, data)


@asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    """Bounds the wait for a message; gRPC itself would wait for ever for one that never comes."""
    try:
        async with asyncio.timeout(MAX_ARRIVAL_S):
            yield
    except TimeoutError as error:
        raise errors.DeadlineExceeded(
            f"the message has not arrived within {MAX_ARRIVAL_S:g} s, the limit (fixed)"
        ) from error


def _parse(parse: Any, data: bytes) -> Any:
    """Parses a message; one of ours may have no unknown field. Raises InvalidRequest."""
    try:
        message = parse(data)
    except Exception as error:
        raise errors.InvalidRequest("message", "not a valid protobuf message of this type") from error
    if message.DESCRIPTOR.file.package == _PACKAGE:
        num_bytes = message.ByteSize()
        message.DiscardUnknownFields()
        num_unknown_bytes = num_bytes - message.ByteSize()
        if num_unknown_bytes > MAX_LISTED_BYTES:
            raise errors.InvalidRequest("message", f"has {num_unknown_bytes} bytes of unknown fields; leave them out")
        if num_unknown_bytes:
            raise _refusal_of_unknown(parse(data))
    return message


def _refusal_of_unknown(message: Message) -> errors.InvalidRequest:
    """Names the unknown fields of a message, or of the first message within it that has some."""
    at_fault = next(one for one in _messages_of(message) if len(UnknownFieldSet(one)))
    kind, unknown = at_fault.DESCRIPTOR, UnknownFieldSet(at_fault)
    numbers = sorted({unknown[index].field_number for index in range(len(unknown))})
    reserved = reserved_names(type(at_fault))
    for number in numbers:
        if number in reserved:
            return errors.InvalidRequest(reserved[number], f"field {number} of {kind.name} is not offered yet")
        if number in kind.fields_by_number:
            name = kind.fields_by_number[number].name
            return errors.InvalidRequest(name, f"field {number} of {kind.name} was sent with another wire type")
    named = ", ".join(map(str, numbers[:MAX_NAMED]))
    return errors.InvalidRequest("message", f"{kind.name} has no field {named}; leave it out")


def reserved_names(kind: type[Message]) -> dict[int, str]:
    """Pairs the numbers that a message's .proto reserves with the names, which are in the same order there."""
    proto = DescriptorProto()
    kind.DESCRIPTOR.CopyToProto(proto)
    numbers = [number for one in proto.reserved_range for number in range(one.start, one.end)]
    return dict(zip(numbers, proto.reserved_name, strict=False))


def _messages_of(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for one in [value] if isinstance(value, Message) else value:
                yield from _messages_of(one)
