"""What every gRPC server and client of ours does alike: errors as statuses, the cluster's token, channel options.

On the wire an error is its gRPC code, its message, and a google.rpc.ErrorInfo (reason, ids, `retryable`);
Overloaded adds google.rpc.RetryInfo. A handler's bug becomes INTERNAL with an opaque id; the log has the rest.
"""

import asyncio
import hmac
import inspect
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from wire import errors, incident
from wire.errors import BatonError

Context = grpc.aio.ServicerContext[Any, Any]

TOKEN_METADATA = "baton-cluster-token"
DOMAIN = "baton"
MAX_MESSAGE_BYTES = 4 << 20
MAX_METADATA_BYTES = 16 << 10
MAX_ARRIVAL_S = 10.0
"""How long a call may take to send its message."""
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # else 60 s, where gRPC waits for the answer to a ping of its own just then
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # gRPC takes what is below the first, refuses what is over the second, and between the two leaves it to chance.
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    # Of a connection on which nobody says anything: before HTTP/2 begins, and with no call open.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.so_reuseport", 0),
)
_ERROR_CLASSES = {
    cls.__new__(cls).reason: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, BatonError)
}


def to_status(error: BatonError) -> status_pb2.Status:
    """The google.rpc.Status of an error."""
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=DOMAIN,
        metadata={**error.ids, "retryable": str(error.status.retryable).lower()},
    )
    details = [_pack(info)]
    if isinstance(error, errors.Overloaded) and error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    code: int = getattr(grpc.StatusCode, error.status.grpc).value[0]
    return status_pb2.Status(code=code, message=error.message, details=details)


def from_rpc_error(failure: grpc.aio.AioRpcError) -> BatonError:
    """The error a server of ours raised, or the nearest one for a failure of the call itself."""
    status = rpc_status.from_call(_SyncCall(failure))
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.reason in _ERROR_CLASSES:
            return _rebuild(_ERROR_CLASSES[info.reason], failure.details() or "", dict(info.metadata))
    return _from_code(failure.code(), failure.details() or "")


def _rebuild(cls: type[BatonError], message: str, ids: dict[str, str]) -> BatonError:
    ids.pop("retryable", None)
    error = cls.__new__(cls)
    BatonError.__init__(error, message, **ids)
    if isinstance(error, errors.Overloaded):
        error.retry_after_s = None
    return error


def _from_code(code: grpc.StatusCode, details: str) -> BatonError:
    by_code: dict[grpc.StatusCode, Callable[[str], BatonError]] = {
        grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
        grpc.StatusCode.CANCELLED: errors.Cancelled,
        grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
        grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    }
    return by_code.get(code, BatonError)(details or code.name)


class _SyncCall:
    """The view of an AioRpcError that grpc_status reads."""

    def __init__(self, failure: grpc.aio.AioRpcError) -> None:
        self._failure = failure

    def trailing_metadata(self) -> Any:
        return self._failure.trailing_metadata()

    def code(self) -> grpc.StatusCode:
        return self._failure.code()

    def details(self) -> str | None:
        return self._failure.details()


def _pack(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what handlers raise into statuses. Nothing else leaves a server: no exception text, no UNKNOWN.

    To gRPC every handler takes a stream, so that messages are waited for, counted and parsed here.
    """

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        take = partial(_take_all if handler.request_streaming else _take_one, handler.request_deserializer)
        if not handler.response_streaming:
            method = handler.stream_unary or handler.unary_unary
            return grpc.stream_unary_rpc_method_handler(_guard_unary(method, take), None, handler.response_serializer)
        method = handler.stream_stream or handler.unary_stream
        # A handler that is no generator writes to its context, as that of grpc_health does.
        guard = _guard_stream if inspect.isasyncgenfunction(method) else _guard_unary
        return grpc.stream_stream_rpc_method_handler(guard(method, take), None, handler.response_serializer)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls that do not carry the cluster's token; health checks need none."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if handler_call_details.method.startswith("/grpc.health.v1."):
            return await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_METADATA, "")
        if hmac.compare_digest(str(given).encode(), self._token):
            return await continuation(handler_call_details)
        return grpc.stream_unary_rpc_method_handler(_refuse)


async def _refuse(_messages: Any, context: Context) -> None:
    await _abort(context, errors.Unauthenticated("the cluster's token is missing or wrong"))


def _guard_unary(method: Any, take: Any) -> Any:
    async def call(_messages: Any, context: Context) -> Any:
        try:
            return await method(await take(context), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error if isinstance(error, BatonError) else incident.report(error))

    return call


def _guard_stream(method: Any, take: Any) -> Any:
    async def call(_messages: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async for message in method(await take(context), context):
                yield message
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error if isinstance(error, BatonError) else incident.report(error))

    return call


async def _take_one(parse: Any, context: Context) -> Any:
    """The only message of a call."""
    first = await _read(context)
    if first is grpc.aio.EOF:
        raise errors.InvalidRequest("message", "missing")
    if await _read(context) is not grpc.aio.EOF:
        raise errors.InvalidRequest("message", "more than the one that this method takes")
    return _parse(parse, first)


async def _take_all(parse: Any, context: Context) -> AsyncIterator[Any]:
    """The messages of a call, as they come."""
    return _each(parse, context)


async def _each(parse: Any, context: Context) -> AsyncIterator[Any]:
    while (data := await _read(context)) is not grpc.aio.EOF:
        yield _parse(parse, data)


async def _read(context: Context) -> Any:
    """The next message as bytes, or EOF. gRPC itself would wait for ever for one that never comes."""
    try:
        async with asyncio.timeout(MAX_ARRIVAL_S):
            return await context.read()
    except TimeoutError as error:
        raise errors.DeadlineExceeded("the message has not arrived in time") from error


def _parse(parse: Any, data: bytes) -> Any:
    try:
        return parse(data)
    except Exception as error:
        raise errors.InvalidRequest("message", "not a valid protobuf message of this type") from error


async def _abort(context: Context, error: BatonError) -> None:
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
