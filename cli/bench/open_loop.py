"""Clients that send a schedule at its times, over gRPC or HTTP, whatever the answers do, and record the answers."""

import asyncio
import json
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Self
from urllib.parse import urlsplit

import httptools

from baton import AsyncClient
from baton.request import Message, Prompt
from baton.results import Span
from cli.bench.latency import Record
from cli.bench.schedule import Arrival
from wire.errors import BatonError, InvalidRequest, Unavailable

NO_CONTEXT_LEN = 1 << 31
"""The context of a model whose server does not name it."""
MAX_REASON_CHARS = 200
_READ_BYTES = 64 << 10
_DATA = b"data: "
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work number night point home water room mother area money story fact
month right study book eye job word business issue side kind head house service friend father power hour game line end
member law car city name team minute idea body back parent face level office door health person art war history party
result change morning reason girl moment air teacher force foot boy age policy music market sense nation plan college
"""
"""Words that most vocabularies have as one token each, with the space before it."""


class RequestTiming:
    """The answer to a request as it comes in. Times are seconds from the start of the round, by the event loop.

    prompt_len: the service's count, None until the usage arrives. error, reason: status and words of a failure.
    """

    def __init__(self, start: float) -> None:
        self.chunks: list[tuple[float, int]] = []
        self.prompt_len: int | None = None
        self.cached_len = 0
        self.error: str | None = None
        self.reason = ""
        self.spans: tuple[Span, ...] = ()
        self._clock = asyncio.get_running_loop().time
        self._start = start

    def note(self, num_tokens: int) -> None:
        """Notes a message with tokens that has just come."""
        self.chunks.append((self._clock() - self._start, num_tokens))

    def fail(self, status: str, reason: str = "") -> None:
        """Notes a failure."""
        self.error, self.reason = status, reason[:MAX_REASON_CHARS]

    def settle(self, num_tokens: int) -> None:
        """Adds tokens to the last message until the answer has `num_tokens`."""
        missing = num_tokens - sum(count for _, count in self.chunks)
        if missing > 0 and self.chunks:
            at_s, count = self.chunks[-1]
            self.chunks[-1] = (at_s, count + missing)


class OpenLoopClient(AbstractAsyncContextManager["OpenLoopClient"], ABC):
    """A client of a service; subclasses speak its protocol. timeout_s: bounds each request."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    async def run(
        self,
        schedule: Sequence[Arrival],
        concurrency: int | None = None,
        tell: Callable[[Record], object] = lambda record: None,
    ) -> list[Record]:
        """Sends every request at its time and waits for all to end; calls `tell` with each record.

        concurrency: the most requests under way; further requests wait, and are sent late.
        """
        start = asyncio.get_running_loop().time()
        places = asyncio.Semaphore(concurrency or max(1, len(schedule)))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._send(arrival, start, places, tell)) for arrival in schedule]
        return [task.result() for task in tasks]

    @abstractmethod
    async def ask(self, arrival: Arrival, answer: RequestTiming) -> None:
        """Sends a request and notes its answer, until its end or the client's timeout."""

    @abstractmethod
    async def max_context_len(self) -> int:
        """Returns the context length of the served model. Raises BatonError."""

    async def _send(
        self, arrival: Arrival, start: float, places: asyncio.Semaphore, tell: Callable[[Record], object]
    ) -> Record:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(start + arrival.at_s - clock())
        async with places:
            sent_s = clock() - start
            answer = RequestTiming(start)
            await self.ask(arrival, answer)
        record = Record(
            scheduled_s=arrival.at_s,
            sent_s=sent_s,
            chunks=tuple(answer.chunks),
            ended_s=clock() - start,
            prompt_len=answer.prompt_len or len(arrival.prompt),
            cached_len=answer.cached_len,
            error=answer.error,
            reason=answer.reason,
            spans=answer.spans,
        )
        tell(record)
        return record


def token_ids(arrival: Arrival) -> Prompt:
    """Returns the prompt as it is."""
    return arrival.prompt


def chat(arrival: Arrival) -> list[Message]:
    """Makes a chat of one turn, with a word for each token of the prompt."""
    words = _WORDS.split()
    return [{"role": "user", "content": " ".join(words[one % len(words)] for one in arrival.prompt)}]


class LoadClient(OpenLoopClient):
    """A connection to a Baton service over gRPC. api_key: see `baton.Client`. prompt_of: makes the prompt."""

    def __init__(
        self,
        address: str,
        timeout_s: float,
        api_key: str | None = None,
        prompt_of: Callable[[Arrival], Prompt] = token_ids,
    ) -> None:
        super().__init__(timeout_s)
        self._prompt_of = prompt_of
        self._client = AsyncClient(address, timeout_s=timeout_s, api_key=api_key)

    async def __aenter__(self) -> Self:
        await self._client.list_models()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def max_context_len(self) -> int:
        return (await self._client.list_models())[0].max_context_len

    async def ask(self, arrival: Arrival, answer: RequestTiming) -> None:
        sampling = {"temperature": 0.0, "max_tokens": arrival.output_len, "ignore_eos": True}
        try:
            async with self._client.stream(self._prompt_of(arrival), **sampling) as stream:  # type: ignore[arg-type]
                async for chunk in stream:
                    if chunk.token_ids:
                        answer.note(len(chunk.token_ids))
            answer.cached_len = sum(stream.completion.usage.cached_tokens.values())
            answer.prompt_len = stream.completion.usage.prompt_tokens
            answer.spans = stream.completion.timeline.spans
        except BatonError as error:
            answer.fail(error.status.grpc, error.message)


class CompletionsClient(OpenLoopClient):
    """A client of OpenAI's completions over HTTP, streamed, with a connection for each request.

    url: the base URL, such as http://127.0.0.1:8000/v1. model: "" asks the server. ignore_eos: a field of vLLM, SGLang
    and this gateway; None leaves it out.
    """

    _endpoint = "/completions"

    def __init__(
        self, url: str, timeout_s: float, model: str = "", api_key: str = "", ignore_eos: bool | None = True
    ) -> None:
        """Raises InvalidRequest."""
        super().__init__(timeout_s)
        scheme, self._host, port, self._path = _read_url(url)
        self._tls = ssl.create_default_context() if scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        if not (api_key.isascii() and api_key.isprintable()):
            raise InvalidRequest("api-key", "must be characters of ASCII that can be printed")
        self._model = model
        self._key_header = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._ignore_eos = {} if ignore_eos is None else {"ignore_eos": ignore_eos}

    async def __aenter__(self) -> Self:
        """Raises Unavailable if the server does not list its models."""
        self._model = self._model or str((await self._describe_model())["id"])
        return self

    async def __aexit__(self, *_: object) -> None:
        """Does nothing: no connection outlives its request."""

    async def max_context_len(self) -> int:
        return int((await self._describe_model()).get("max_model_len") or NO_CONTEXT_LEN)

    async def ask(self, arrival: Arrival, answer: RequestTiming) -> None:
        body = {
            "model": self._model,
            **self._prompt(arrival),
            "max_tokens": arrival.output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._ignore_eos,
        }
        told = _Events(answer)
        status = await self._exchange(f"POST {self._endpoint}", json.dumps(body).encode(), told.take)
        if isinstance(status, str) or status != 200:
            answer.fail(status if isinstance(status, str) else f"HTTP {status}", told.reason)
        elif answer.error is None and not told.are_whole:
            answer.fail("broken off")

    def _prompt(self, arrival: Arrival) -> dict[str, Any]:
        return {"prompt": arrival.prompt}

    async def _describe_model(self) -> dict[str, Any]:
        lines: list[bytes] = []
        status = await self._exchange("GET /models", b"", lines.append)
        try:
            model: dict[str, Any] = json.loads(b"\n".join(lines))["data"][0]
        except (ValueError, LookupError, TypeError) as error:
            said = status if isinstance(status, str) else f"HTTP {status}"
            raise Unavailable(f"{self._host}:{self._port}{self._path}/models does not list a model: {said}") from error
        return model

    async def _exchange(self, what: str, body: bytes, take: Callable[[bytes], None]) -> int | str:
        """Sends a request, passes on the lines of its answer, and returns the status, or the failure."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._read_answer(what, body, take)
        except TimeoutError:
            return "DEADLINE_EXCEEDED"
        except OSError:
            return "UNAVAILABLE"
        except httptools.HttpParserError:
            return "not an answer"

    async def _read_answer(self, what: str, body: bytes, take: Callable[[bytes], None]) -> int:
        """Sends a request, and passes the lines of its answer to `take`; returns the status.

        what: method and path. Raises HttpParserError, or OSError, also if the connection ends before a status.
        """
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        try:
            writer.write(self._head(what, len(body)) + body)
            lines = _Lines(take)
            parser = httptools.HttpResponseParser(lines)
            while not lines.are_whole and (data := await reader.read(_READ_BYTES)):
                parser.feed_data(data)
            lines.on_message_complete()
            if not (status := parser.get_status_code()):
                raise ConnectionError("no answer")
            return int(status)
        finally:
            writer.close()

    def _head(self, what: str, body_len: int) -> bytes:
        method, _, path = what.partition(" ")
        lines = f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
        return f"{lines}{self._key_header}Content-Type: application/json\r\nContent-Length: {body_len}\r\n\r\n".encode()


class ChatsClient(CompletionsClient):
    """A client of OpenAI's chats over HTTP, streamed; `chat` makes the only turn."""

    _endpoint = "/chat/completions"

    def _prompt(self, arrival: Arrival) -> dict[str, Any]:
        return {"messages": chat(arrival)}


def _read_url(url: str) -> tuple[str, str, int | None, str]:
    """Returns scheme, host, port and path. Raises InvalidRequest."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidRequest("url", "must be like http://127.0.0.1:8000/v1") from error
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidRequest("url", "must begin with http:// or https://, and name a host")
    return parts.scheme, host, port, parts.path.rstrip("/")


class _Lines:
    """The callbacks of httptools for an answer: they pass its body on by lines."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self.are_whole = False
        self._take = take
        self._rest = b""

    def on_body(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)

    def on_message_complete(self) -> None:
        self.are_whole = True
        if self._rest:
            self.on_body(b"\n")


class _Events:
    """The reader of a streamed completion's events, which it notes in an answer. `reason`: the message of an error."""

    def __init__(self, answer: RequestTiming) -> None:
        self.are_whole = False
        self.reason = ""
        self._answer = answer

    def take(self, line: bytes) -> None:
        if line.startswith(_DATA + b"{"):
            self._note(json.loads(line.removeprefix(_DATA)))
        elif line.startswith(_DATA + b"[DONE]"):
            self.are_whole = True
        elif line.startswith(b"{"):
            self.reason = _reason_in(line)

    def _note(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self._answer.fail("error in the stream", _reason_in(json.dumps(event)))
        for choice in event.get("choices") or ():
            if num_tokens := _num_tokens(choice):
                self._answer.note(num_tokens)
        if usage := event.get("usage"):
            self._answer.settle(usage.get("completion_tokens") or 0)
            self._answer.prompt_len = usage.get("prompt_tokens")
            self._answer.cached_len = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _num_tokens(choice: dict[str, Any]) -> int:
    """Counts an event of a choice as one token, unless it has token ids, or has only a role or the choice's end."""
    delta = choice.get("delta") or {}
    gained = choice.get("text") or delta.get("content")
    is_told_else = choice.get("finish_reason") is not None or "role" in delta
    return len(choice.get("token_ids") or ()) or int(bool(gained) or not is_told_else)


def _reason_in(error: str | bytes) -> str:
    """Returns the message of an OpenAI error, else the whole text."""
    try:
        return str(json.loads(error)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return error if isinstance(error, str) else error.decode(errors="replace")
