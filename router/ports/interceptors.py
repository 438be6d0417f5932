"""How the router's gRPC servers end each call: errors become statuses.

A handler's bug becomes INTERNAL with an opaque id; the log has the rest.
"""

import hmac
import inspect
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc_status import rpc_status

from router.ports.arrivals import MAX_UNPACED_BYTES, PACE_BYTES_PER_S, Context, take_all, take_one
from wire import errors
from wire.errors import BatonError
from wire.limit import Pace
from wire.rpc import TOKEN_METADATA, asks_for_health
from wire.rpc_status import to_status
from wire.trust.key_ring import Key, KeyRing, Scope

Metadata = Iterable[tuple[str, str | bytes]]


CALLER: ContextVar[Key] = ContextVar("caller")
"""The key of the running call; without a value for a call that no KeyInterceptor has let in, or that showed a token."""


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor that refuses calls without a key of its scope, before their message is there. Health needs none.

    token: opens the port, too.
    """

    def __init__(self, keys: KeyRing, scope: Scope, token: str = "") -> None:
        self._keys = keys
        self._scope = scope
        self._token = token.encode()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        metadata = tuple(handler_call_details.invocation_metadata or ())
        if not asks_for_health(handler_call_details) and not self._has_token(metadata):
            try:
                CALLER.set(self._keys.admit(credentials_of(metadata), self._scope))
            except BatonError as error:
                return grpc.stream_unary_rpc_method_handler(partial(_refuse, _status_of(error)))
        return await continuation(handler_call_details)

    def _has_token(self, metadata: Metadata) -> bool:
        given = str(dict(metadata).get(TOKEN_METADATA, "")).encode()
        return bool(self._token) and hmac.compare_digest(given, self._token)


def credentials_of(metadata: Metadata | None) -> list[str]:
    """Returns the `authorization` fields of a call; a correct one has one."""
    return [str(value) for name, value in metadata or () if name == "authorization"]


async def _refuse(status: Any, _messages: Any, context: Context) -> None:
    await context.abort_with_status(status)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what handlers raise into statuses. Nothing else leaves a server: no exception text, no UNKNOWN.

    To gRPC every handler takes a stream, so that messages are waited for, counted and parsed here.

    arriving: of a method's path, a context in which each message of such a call is waited for; may refuse by raising.
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
    """Makes the status of an error, and lets go of the frames that the error came through, with the message in them.

    The call keeps the status's own exception: raised within `except`, it would keep this error and these frames.
    """
    reported = error if isinstance(error, BatonError) else errors.report(error)
    error.__traceback__ = None
    return rpc_status.to_status(to_status(reported))
