"""A request's prompts in progress, answered whole or as a stream of events."""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from baton import AsyncClient, Chunk, Completion
from baton.client import AsyncStream
from baton.request import Options, Prompt
from baton.results import PromptPart, TokenLogprobs
from gateway.exchange import Events, Streamed
from wire.errors import BatonError, InvalidRequest
from wire.load.limit import Share
from wire.sampling import DEFAULT_MAX_TOKENS, MAX_TOLD_PROMPT_LEN, FinishReason
from wire.typed_reader import Read

MAX_ENTRIES = 1 << 22
"""Bound on an answer's echoed tokens and log-probabilities, likeliest tokens included."""
MAX_SLICE_ENTRIES = 512
"""Entries made at once; other streams run between two slices."""
ITEM_BYTES = 64
"""Memory of a piece of JSON in an unsent answer, besides its text."""
PROMPT_IDS = "prompt_token_ids"
MAX_ID_START = 40
"""Characters of the client's request id that begin the ids of its further prompts."""


class Dialect(Protocol):
    """The objects of one endpoint, for one request."""

    fields: Mapping[str, Read]
    wanted: str
    """The name of the field with the prompts."""
    sent: dict[str, str]
    """The client's names of fields that the router names differently, by the router's."""
    num_prompt_tokens: int = 0
    """Tokens of all prompts; set in a stream before its first event."""

    def take_prompts(self, taken: dict[str, Any]) -> list[Any]:
        """Takes the prompts out of the fields, and renames the rest for the router. Raises InvalidRequest."""

    def begin(self, generation: "Generation") -> None:
        """Begins the answer, before the first token."""

    def opening(self) -> bytes:
        """Writes the events before the first token; "" if `events` has written them, or there are none."""
        return b""

    def logprobs(self, chunk: Chunk, numbers: Sequence[int]) -> dict[str, list[Any]] | None:
        """Describes the log-probabilities of a chunk, which is the next of each of these choices."""

    def events(self, chunk: Chunk, numbers: Sequence[int]) -> Iterable[bytes]:
        """Writes the events of a chunk, which is the next of each of these choices."""

    def end(self, completions: Sequence[Completion]) -> bytes:
        """Writes the events at the end of a stream."""

    def failed(self, error: BatonError) -> bytes:
        """Writes the event of a failure within a stream."""

    def whole(self, drafts: Sequence["ChoiceDraft"], completions: Sequence[Completion]) -> list[bytes]:
        """Writes a whole answer in pieces. drafts: all choices."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A request after the gateway's own checks.

    usage: `include_usage` adds an event with usage at the end of a stream, `continuous_usage_stats` adds usage to each
    event. service_tier: the tier that serves the request, which its answer repeats; "" if it names none. timeline: adds
    each prompt's timeline to the usage, and implies the last event. returns_ids: adds token ids; prompts are echoed for
    their ids. hides_prompt: hides the text of that echo. headers: the answer's; `x-baton-adapted` and
    `x-baton-batch-invariant` are added.
    """

    request_id: str
    model: str
    prompts: Sequence[Prompt]
    options: Options
    usage: Mapping[str, bool]
    service_tier: str = ""
    timeline: bool = False
    returns_ids: bool = False
    hides_prompt: bool = False
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)

    def open(self, client: AsyncClient) -> list[AsyncStream]:
        """Sends the prompts. Raises InvalidRequest."""
        return [client.stream(prompt, **self._options(index)) for index, prompt in enumerate(self.prompts)]

    @property
    def named(self) -> dict[str, str]:
        """The fields by which an answer of OpenAI's paths names its model and tier."""
        return {"model": self.model, **({"service_tier": self.service_tier} if self.service_tier else {})}

    @property
    def num_entries(self) -> int:
        """An upper bound on the answer's entries; a text prompt counts a token a byte."""
        num_told = 0
        if self.options.get("echo"):
            lens = (len(one.encode(errors="replace") if isinstance(one, str) else one) for one in self.prompts)
            num_told = sum(min(length, MAX_TOLD_PROMPT_LEN) for length in lens)
        num_entries = num_told * (1 + self.options.get("prompt_logprobs", 0))
        if "logprobs" in self.options:
            num_tokens = len(self.prompts) * self.options.get("max_tokens", DEFAULT_MAX_TOKENS)
            num_entries += num_tokens * (1 + self.options["logprobs"])
        return self.num_choices * num_entries

    def require_bounded(self) -> None:
        """Raises InvalidRequest if the answer may have more than MAX_ENTRIES, or a session has several prompts."""
        if len(self.prompts) > 1 and "session" in self.options:
            raise InvalidRequest("session", "wants a single prompt: each of a session goes on from the one before")
        if self.num_entries > MAX_ENTRIES:
            param = "logprobs" if "logprobs" in self.options else "echo"
            raise InvalidRequest(param, f"the answer may have {self.num_entries} entries; at most {MAX_ENTRIES}")

    @property
    def hides_answer(self) -> bool:
        """Whether the client asked for the prompt alone; the router makes at least a token."""
        return bool(self.options.get("echo")) and not self.hides_prompt and self.options.get("max_tokens") == 0

    def told(self, completion: Completion) -> Completion:
        """Returns a completion without the token that its client has not asked for."""
        choices = tuple(
            replace(one, finish_reason=FinishReason.LENGTH, matched_stop=None) for one in completion.choices
        )
        usage = replace(completion.usage, completion_tokens=0)
        return replace(completion, choices=choices, usage=usage) if self.hides_answer else completion

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        return self.options.get("n", 1)

    def _options(self, index: int) -> Options:
        """Adds a request id: the client's for the first prompt; for the others the same with a random suffix."""
        name = f"{self.request_id[:MAX_ID_START]}-{index}-{secrets.token_hex(8)}" if index else self.request_id
        least: Options = {"max_tokens": 1} if self.hides_answer else {}
        return {**self.options, **least, "request_id": name}


@dataclass
class ChoiceDraft:
    """A choice of an unfinished whole answer: its text, and lists of log-probabilities and ids, as JSON."""

    text: list[str] = field(default_factory=list)
    lists: dict[str, list[bytes]] = field(default_factory=dict)
    ids: dict[str, list[bytes]] = field(default_factory=dict)

    def pieces(self, described: dict[str, Any]) -> list[bytes]:
        """Joins a description, the log-probabilities and the ids."""
        pieces = [json.dumps(described)[:-1].encode(), b', "logprobs": ']
        if self.lists:
            first, *rest = members(self.lists)
            pieces += [b"{", first.removeprefix(b", "), *rest, b"}"]
        return [*pieces, *([] if self.lists else [b"null"]), *members(self.ids), b"}"]


def members(lists: Mapping[str, Sequence[bytes]]) -> list[bytes]:
    """Writes lists as members of an object, each after a comma."""
    return [piece for name, items in lists.items() for piece in (b', "%b": [' % name.encode(), *items, b"]")]


async def answer(generation: Generation, dialect: Dialect, client: AsyncClient, room: Share) -> list[bytes]:
    """Returns the whole answer in pieces; takes their bytes from `room` as they come.

    Raises BatonError; a failed prompt ends the others.
    """
    dialect.begin(generation)
    drafts = [ChoiceDraft() for _ in range(len(generation.prompts) * generation.num_choices)]
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(stream) for stream in generation.open(client)]
        await _admitted(generation, streams)
        slices = await stack.enter_async_context(aclosing(_slices(generation, streams)))
        async for numbers, chunk in slices:
            gained = (dialect.logprobs(chunk, numbers) or {}, ids_of(chunk) if generation.returns_ids else {})
            room.take(_add(chunk.text, gained, [drafts[number] for number in numbers]))
    return dialect.whole(drafts, [generation.told(stream.completion) for stream in streams])


def events(generation: Generation, dialect: Dialect, client: AsyncClient) -> Streamed:
    """Returns the answer as events; the stream may begin before a token, once each prompt has a worker."""
    dialect.begin(generation)
    admitted = asyncio.Event()

    async def opening() -> bytes:
        await admitted.wait()
        return dialect.opening()

    return Streamed(_events(generation, dialect, client, admitted), opening, dialect.failed)


async def _events(generation: Generation, dialect: Dialect, client: AsyncClient, admitted: asyncio.Event) -> Events:
    """Yields events as tokens come. Raises BatonError. Sets `admitted` unless a prompt is refused."""
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(stream) for stream in generation.open(client)]
        prompt_lens = await _admitted(generation, streams)
        dialect.num_prompt_tokens = sum(prompt_lens)
        if all(prompt_lens):
            admitted.set()
        slices = await stack.enter_async_context(aclosing(_slices(generation, streams)))
        async for numbers, chunk in slices:
            for event in dialect.events(chunk, numbers):
                yield event
    yield dialect.end([generation.told(stream.completion) for stream in streams])


async def _admitted(generation: Generation, streams: Sequence[AsyncStream]) -> list[int]:
    """Waits until each prompt has a worker. Returns the lengths of the prompts.

    Adds the header `x-baton-adapted` if a chat was changed for its template, and `x-baton-batch-invariant` where a
    failover does not promise the very same tokens.
    """
    if adapted := await streams[0].adapted():
        generation.headers.append((b"x-baton-adapted", adapted.encode()))
    if not await streams[0].is_batch_invariant():
        generation.headers.append((b"x-baton-batch-invariant", b"false"))
    return [await stream.admitted() for stream in streams]


def ids_of(chunk: Chunk) -> dict[str, list[int]]:
    """Returns the token ids of a chunk under vLLM's names."""
    return {PROMPT_IDS if isinstance(chunk, PromptPart) else "token_ids": [*chunk.token_ids]}


def _add(text: str, gained: tuple[Mapping[str, list[Any]], ...], drafts: Sequence[ChoiceDraft]) -> int:
    """Appends text, log-probabilities and ids to choices, which share the JSON. Returns the bytes of memory used."""
    lists, ids = ({name: json.dumps(one)[1:-1].encode() for name, one in each.items() if one} for each in gained)
    for draft in drafts:
        draft.text.append(text)
        for kept, items in ((draft.lists, lists), (draft.ids, ids)):
            for name, item in items.items():
                known = kept.setdefault(name, [])
                known += [b", ", item] if known else [item]
    # JSON takes six bytes for a character at most.
    num_bytes = sum(ITEM_BYTES + len(item) for item in (*lists.values(), *ids.values()))
    return len(drafts) * (ITEM_BYTES + 6 * len(text)) + num_bytes


async def _slices(
    generation: Generation, streams: Sequence[AsyncStream]
) -> AsyncGenerator[tuple[Sequence[int], Chunk], None]:
    """Yields chunks in slices, each with the numbers of its choices; a part of a prompt has all choices' numbers.

    The prompts' streams forget yielded chunks; other streams run after each MAX_SLICE_ENTRIES. Raises BatonError.
    """
    num_choices, num_made = generation.num_choices, 0
    async with aclosing(_gained(streams)) as gained:
        async for place, chunk in gained:
            streams[place].forget()
            first = place * num_choices
            is_prompt = isinstance(chunk, PromptPart)
            numbers = range(first, first + num_choices) if is_prompt else (first + chunk.index,)
            if generation.hides_answer and not is_prompt:
                continue
            if is_prompt and generation.hides_prompt:
                chunk = replace(chunk, text="", logprobs=())
            for part in _cut(chunk):
                if num_made >= MAX_SLICE_ENTRIES:
                    num_made = 0
                    await asyncio.sleep(0)
                num_made += len(part.logprobs) * _entries_a_token(part)
                yield numbers, part


def _cut(chunk: Chunk) -> Iterator[Chunk]:
    """Yields a chunk in slices of MAX_SLICE_ENTRIES, or of a token; the first slice has the text."""
    num_tokens = max(1, MAX_SLICE_ENTRIES // _entries_a_token(chunk))
    for start in range(0, max(1, len(chunk.logprobs)), num_tokens):
        logprobs = chunk.logprobs[start : start + num_tokens]
        yield chunk if len(logprobs) == len(chunk.logprobs) else _slice(chunk, start, logprobs)


def _entries_a_token(chunk: Chunk) -> int:
    return 1 + len(chunk.logprobs[-1].top) if chunk.logprobs else 1


def _slice(chunk: Chunk, start: int, logprobs: tuple[TokenLogprobs, ...]) -> Chunk:
    token_ids = chunk.token_ids[start : start + len(logprobs)]
    return replace(chunk, text="" if start else chunk.text, token_ids=token_ids, logprobs=logprobs)


async def _gained(streams: Sequence[AsyncStream]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yields the chunks of all streams as they come, each with the place of its stream. Raises BatonError."""
    if len(streams) == 1:
        async for chunk in streams[0].pieces():
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
        async for chunk in stream.pieces():
            await queue.put((place, chunk))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
