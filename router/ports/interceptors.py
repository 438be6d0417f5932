"""The beginning and the end of each call at the router's gRPC servers.

Messages are parsed here, within bounds on number and time. Errors become statuses: a handler's bug becomes INTERNAL
with an incident number, and the log has the rest.
"""

import asyncio
import hmac
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import grpc.aio
from google.protobuf.descriptor_pb2 import DescriptorProto
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc_status import rpc_status

from router.requests.dispatch import Dispatcher
from wire import errors
from wire.errors import BatonError
from wire.load.limit import Limit, Pace
from wire.pb import inference_pb2
from wire.rpc import TOKEN_METADATA, asks_for_health, to_status
from wire.trust.key_ring import Key, KeyRing, Scope, bearer, page_key

Context = grpc.aio.ServicerContext[Any, Any]
Arriving = Callable[[], AbstractAsyncContextManager[None]]
"""A context in which a message is awaited and parsed."""

MAX_ARRIVAL_S = 10.0
"""Bound on the time in which a call sends its message."""
MAX_ARRIVING = 64
"""Bound on calls whose message has not arrived: each may take as much memory as the longest message."""
MAX_LISTED_BYTES = 64 << 10
"""Unknown fields of more bytes are not listed: a million of them would block the event loop for a second."""
MAX_NAMED = 4
MAX_UNPACED_BYTES = 256 << 10
PACE_BYTES_PER_S = 64 << 20
"""Rate at which messages are parsed: the event loop takes 10 to 20 ms for 4 MiB, at most 16 times a second."""
_PACKAGE = inference_pb2.DESCRIPTOR.package


class ArrivalLimit:
    """A bound on the messages on their way to one port. A message of `generate` needs room for a request, too."""

    def __init__(self, dispatcher: Dispatcher, generate: str) -> None:
        self._dispatcher = dispatcher
        self._generate = generate
        self.messages = Limit(MAX_ARRIVING, "messages are on their way")

    @asynccontextmanager
    async def arriving(self, method: str) -> AsyncIterator[None]:
        """Takes a unit while a message for a path is awaited. Raises Overloaded at once."""
        generating = self._dispatcher.arriving(CALLER.get()) if method == self._generate else nullcontext()
        with generating, self.messages.taken():
            yield


async def take_one(parse: Any, arriving: Arriving, pace: Pace, context: Context) -> Any:
    """Returns the only message of a call. Raises InvalidRequest, or DeadlineExceeded if it does not come."""
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
    """Yields the messages of a call as they come. Raises the errors of `take_one`."""
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
    """Bounds the wait for a message, which gRPC itself does not."""
    try:
        async with asyncio.timeout(MAX_ARRIVAL_S):
            yield
    except TimeoutError as error:
        raise errors.DeadlineExceeded(
            f"the message has not arrived within {MAX_ARRIVAL_S:g} s, the limit (fixed)"
        ) from error


def _parse(parse: Any, data: bytes) -> Any:
    """Parses a message; a message of Baton's services may have no unknown field. Raises InvalidRequest."""
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
    """Names the unknown fields of a message, or of the first nested message with such fields."""
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
    """Pairs the field numbers that a message's .proto reserves with the names, which have the same order there."""
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


Metadata = Iterable[tuple[str, str | bytes]]


CALLER: ContextVar[Key] = ContextVar("caller")
"""The key of the running call; unset for a call without KeyInterceptor, or with a token."""


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor that refuses calls without a key of its scope, before their message. Health checks need no key.

    token: the token and its `page_key` open the port, too.
    """

    def __init__(self, keys: KeyRing, scope: Scope, token: str = "") -> None:
        self._keys = keys
        self._scope = scope
        self._token, self._page_key = token.encode(), page_key(token).encode()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        metadata = tuple(handler_call_details.invocation_metadata or ())
        if not asks_for_health(handler_call_details) and not self._has_token(metadata):
            try:
                CALLER.set(self._keys.admit(credentials_of(metadata), self._scope))
            except BatonError as error:
                return grpc.stream_unary_rpc_method_handler(partial(_refuse, _status_of(error)))
        return await continuation(handler_call_details)

    def _has_token(self, metadata: Metadata) -> bool:
        given, shown = str(dict(metadata).get(TOKEN_METADATA, "")).encode(), bearer(credentials_of(metadata)).encode()
        is_right = hmac.compare_digest(given, self._token) | hmac.compare_digest(shown, self._page_key)
        return bool(self._token) and is_right


def credentials_of(metadata: Metadata | None) -> list[str]:
    """Returns the `authorization` fields of a call; a correct call has exactly one."""
    return [str(value) for name, value in metadata or () if name == "authorization"]


async def _refuse(status: Any, _messages: Any, context: Context) -> None:
    await context.abort_with_status(status)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor that turns handlers' exceptions into statuses; no exception text and no UNKNOWN leaves a server.

    Every handler takes a stream from gRPC, so that messages are awaited, counted and parsed here.

    arriving: makes, for a method's path, the context in which each message is awaited; may refuse by raising.
    """

    def __init__(self, arriving: Callable[[str], AbstractAsyncContextManager[None]] = lambda _: nullcontext()) -> None:
        self._arriving = arriving
        self._pace = Pace(MAX_UNPACED_BYTES, PACE_BYTES_PER_S)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        arriving = partial(self._arriving, handler_call_details.method)
        take_in = take_all if handler.request_streaming else take_one
        take = partial(take_in, handler.request_deserializer, arriving, self._pace)
        if not handler.response_streaming:
            method = handler.stream_unary or handler.unary_unary
            return grpc.stream_unary_rpc_method_handler(_guard_unary(method, take), None, handler.response_serializer)
        method = handler.stream_stream or handler.unary_stream
        # A handler that is no generator writes to its context, as that of grpc_health does.
        guard = _guard_stream if inspect.isasyncgenfunction(method) else _guard_unary
        return grpc.stream_stream_rpc_method_handler(guard(method, take), None, handler.response_serializer)


def _guard_unary(method: Any, take: Any) -> Any:
    async def call(_messages: Any, context: Context) -> Any:
        try:
            return await method(await take(context), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            status = _status_of(error)
        return await context.abort_with_status(status)

    return call


def _guard_stream(method: Any, take: Any) -> Any:
    async def call(_messages: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async for message in method(await take(context), context):
                yield message
            return
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            status = _status_of(error)
        await context.abort_with_status(status)

    return call


def _status_of(error: Exception) -> Any:
    """Makes the status of an error, and drops the error's frames, which refer to the message.

    The call keeps the status's exception: raised within `except`, that would keep the error and its frames.
    """
    reported = errors.known(error)
    error.__traceback__ = None
    return rpc_status.to_status(to_status(reported))
