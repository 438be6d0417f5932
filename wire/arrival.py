"""How the messages of a call arrive at a server: bounded in time, counted, and parsed by us."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Any

import grpc.aio

from wire import errors

Context = grpc.aio.ServicerContext[Any, Any]
Arriving = Callable[[], AbstractContextManager[None]]
"""A context in which a message is waited for and parsed."""

MAX_ARRIVAL_S = 10.0
"""How long a call may take to send its message."""


async def take_one(parse: Any, arriving: Arriving, context: Context) -> Any:
    """The only message of a call. Raises InvalidRequest, or DeadlineExceeded if it does not come."""
    with arriving():
        first = await _read(context)
        if first is grpc.aio.EOF:
            raise errors.InvalidRequest("message", "missing")
        if await _read(context) is not grpc.aio.EOF:
            raise errors.InvalidRequest("message", "more than the one that this method takes")
        return _parse(parse, first)


async def take_all(parse: Any, arriving: Arriving, context: Context) -> AsyncIterator[Any]:
    """The messages of a call, as they come. Going through them raises as above."""
    return _each(parse, arriving, context)


async def _each(parse: Any, arriving: Arriving, context: Context) -> AsyncIterator[Any]:
    while (message := await _next(parse, arriving, context)) is not grpc.aio.EOF:
        yield message


async def _next(parse: Any, arriving: Arriving, context: Context) -> Any:
    with arriving():
        data = await _read(context)
        return data if data is grpc.aio.EOF else _parse(parse, data)


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
