"""A request's prompts under way: answered whole, or as a stream of events."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

from baton import AsyncClient, Chunk, Completion
from baton.client import AsyncStream
from baton.request import Options, Prompt
from gateway.fields import Read
from wire.errors import Overloaded, reached
from wire.sampling import MAX_TOLD_PROMPT_LEN

MAX_ECHOED_TOKENS = 16 * MAX_TOLD_PROMPT_LEN
"""Of prompts whose log-probabilities are in whole answers at a time; each may take a kilobyte."""
MAX_WAITING = 64
"""Requests that wait for room; each may have as many bytes as a message."""
MAX_ID_START = 40
"""Characters of a client's id in the ids of its further prompts."""
MAX_TURN_S = 60.0
TURN_AGAIN_S = 1.0
DONE = b"data: [DONE]\n\n"


class Dialect(Protocol):
    """The objects of one endpoint. Of a chunk and of a choice it makes JSON."""

    fields: Mapping[str, Read]
    object_name: str
    event_name: str
    id_prefix: str

    def take_prompts(self, taken: dict[str, Any]) -> list[Any]:
        """Takes the prompts out of the fields, and gives the rest the router's names. Raises InvalidRequest."""

    def choice(self, completion: Completion, index: int, number: int) -> dict[str, Any]:
        """Describes choice `index` of a completion, under its number in the answer."""

    def event(self, chunk: Chunk, number: int) -> str:
        """Writes the gain of a choice, or a part of its prompt."""

    def last_event(self, completion: Completion, index: int, number: int) -> str:
        """Writes how a choice ended."""


@dataclass(frozen=True)
class Generation:
    """A request, read and checked as far as that is the gateway's. `usage`: whether a stream is to end with it."""

    request_id: str
    model: str
    prompts: Sequence[Prompt]
    options: Options
    usage: bool

    def open(self, client: AsyncClient) -> list[AsyncStream]:
        """Sends the prompts. Raises InvalidRequest."""
        return [client.stream(prompt, **self._options(index)) for index, prompt in enumerate(self.prompts)]

    @property
    def num_echoed(self) -> int:
        """Tokens of prompts, at most, whose log-probabilities the answer has."""
        if "prompt_logprobs" not in self.options:
            return 0
        lens = (len(prompt.encode(errors="replace") if isinstance(prompt, str) else prompt) for prompt in self.prompts)
        return self.num_choices * sum(min(length, MAX_TOLD_PROMPT_LEN) for length in lens)

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        return self.options.get("n", 1)

    def _options(self, index: int) -> Options:
        """Adds a request id: the client's for the first prompt, for others one that begins so and no client meets."""
        name = f"{self.request_id[:MAX_ID_START]}-{index}-{secrets.token_hex(8)}" if index else self.request_id
        return {**self.options, "request_id": name}


class EchoLimit:
    """A bound on the tokens told of prompts in whole answers: requests beyond it wait, the first come first."""

    def __init__(self) -> None:
        self._num_echoed = 0
        self._num_waiting = 0
        self._turn = asyncio.Lock()
        self._has_left = asyncio.Event()

    @asynccontextmanager
    async def taken(self, num_echoed: int) -> AsyncIterator[None]:
        """Waits for room, for all of it where a request wants more than there is.

        Raises Overloaded after MAX_TURN_S, and at once if MAX_WAITING others wait.
        """
        if num_echoed == 0:
            yield
            return
        num_echoed = min(num_echoed, MAX_ECHOED_TOKENS)
        await self._take(num_echoed)
        try:
            yield
        finally:
            self._num_echoed -= num_echoed
            self._has_left.set()

    async def _take(self, num_echoed: int) -> None:
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(reached(MAX_WAITING, "requests wait to echo their prompts"), TURN_AGAIN_S)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(MAX_TURN_S), self._turn:
                while self._num_echoed + num_echoed > MAX_ECHOED_TOKENS:
                    self._has_left.clear()
                    await self._has_left.wait()
                self._num_echoed += num_echoed
        except TimeoutError as error:
            raise Overloaded(
                reached(MAX_ECHOED_TOKENS, "tokens of prompts may be echoed at a time"), TURN_AGAIN_S
            ) from error
        finally:
            self._num_waiting -= 1


async def answer(generation: Generation, dialect: Dialect, client: AsyncClient) -> bytes:
    """Returns the whole answer. Raises BatonError; a prompt that fails ends the others."""
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(stream) for stream in generation.open(client)]
        async with aclosing(_gained(streams)) as gained:
            async for _ in gained:
                pass
    completions = [stream.completion for stream in streams]
    body = _head(generation, dialect, dialect.object_name) | {
        "choices": [
            dialect.choice(completion, choice.index, place * generation.num_choices + choice.index)
            for place, completion in enumerate(completions)
            for choice in completion.choices
        ],
        "usage": usage_of(completions),
    }
    return json.dumps(body).encode()


async def events(generation: Generation, dialect: Dialect, client: AsyncClient) -> AsyncGenerator[bytes, None]:
    """Yields events as tokens come. Going through them raises BatonError, before the first event as a rule."""
    head = json.dumps(_head(generation, dialect, dialect.event_name))[:-1].encode()
    tail = b'],"usage":null}\n\n' if generation.usage else b"]}\n\n"
    start = b"data: " + head + b',"choices":['
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(stream) for stream in generation.open(client)]
        gained = await stack.enter_async_context(aclosing(_gained(streams)))
        echoed: set[int] = set()
        async for place, chunk in gained:
            if place not in echoed:
                echoed.add(place)
                for part, index in product(streams[place].prompt, range(generation.num_choices)):
                    number = place * generation.num_choices + index
                    yield start + dialect.event(part, number).encode() + tail
            number = place * generation.num_choices + chunk.index
            yield start + dialect.event(chunk, number).encode() + tail
    completions = [stream.completion for stream in streams]
    ends = []
    for place, completion in enumerate(completions):
        for choice in completion.choices:
            number = place * generation.num_choices + choice.index
            ends.append(start + dialect.last_event(completion, choice.index, number).encode() + tail)
    if generation.usage:
        ends.append(start + b'],"usage":' + json.dumps(usage_of(completions)).encode() + b"}\n\n")
    yield b"".join((*ends, DONE))


def usage_of(completions: Sequence[Completion]) -> dict[str, Any]:
    """Adds the tokens of all prompts up."""
    num_prompt = sum(one.usage.prompt_tokens for one in completions)
    num_new = sum(one.usage.completion_tokens for one in completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": sum(sum(one.usage.cached_tokens.values()) for one in completions)},
    }


def _head(generation: Generation, dialect: Dialect, name: str) -> dict[str, Any]:
    return {
        "id": f"{dialect.id_prefix}-{generation.request_id}",
        "object": name,
        "created": int(time.time()),
        "model": generation.model,
    }


async def _gained(streams: Sequence[AsyncStream]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yields the chunks of all streams as they come, each with the place of its stream. Raises BatonError."""
    if len(streams) == 1:
        async for chunk in streams[0]:
            yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk] | Exception | None] = asyncio.Queue(1)
    tasks = [asyncio.create_task(_pass_on(stream, place, queue)) for place, stream in enumerate(streams)]
    num_open = len(streams)
    try:
        while num_open:
            gained = await queue.get()
            if isinstance(gained, Exception):
                raise gained
            if gained is None:
                num_open -= 1
            else:
                yield gained
    finally:
        for task in tasks:
            task.cancel()


async def _pass_on(
    stream: AsyncStream, place: int, queue: "asyncio.Queue[tuple[int, Chunk] | Exception | None]"
) -> None:
    try:
        async for chunk in stream:
            await queue.put((place, chunk))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
