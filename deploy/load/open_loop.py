"""Clients that send a schedule at its times, over gRPC or HTTP, whatever the answers do, and note when they come."""

import asyncio
import json
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Self
from urllib.parse import urlsplit

import httptools

from baton import AsyncClient
from deploy.load.latency import Record
from deploy.load.schedule import Arrival
from wire.errors import BatonError, InvalidRequest, Unavailable

NO_CONTEXT_LEN = 1 << 31
"""Stands for the context of a model whose server does not tell it."""
_READ_BYTES = 64 << 10
_DATA = b"data: "


class Answer:
    """The answer to a request as it comes in. Times in seconds from the start of the round."""

    def __init__(self, start: float) -> None:
        self.chunks: list[tuple[float, int]] = []
        self.cached_len = 0
        self.error: str | None = None
        self._start = start

    def note(self, num_tokens: int) -> None:
        """Notes a message with tokens that has just come."""
        self.chunks.append((time.perf_counter() - self._start, num_tokens))

    def settle(self, num_tokens: int) -> None:
        """Adds tokens to the last message until the answer has `num_tokens`."""
        missing = num_tokens - sum(count for _, count in self.chunks)
        if missing > 0 and self.chunks:
            at_s, count = self.chunks[-1]
            self.chunks[-1] = (at_s, count + missing)


class OpenLoopClient(AbstractAsyncContextManager["OpenLoopClient"], ABC):
    """A client of a service; subclasses speak its protocol. timeout_s: of each request."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    async def run(
        self,
        schedule: Sequence[Arrival],
        concurrency: int | None = None,
        tell: Callable[[Record], object] = lambda record: None,
    ) -> list[Record]:
        """Sends every request at its time and waits for all to end; `tell` hears of each that has.

        concurrency: of requests under way; one beyond it waits, and is sent late.
        """
        start = time.perf_counter()
        places = asyncio.Semaphore(concurrency or max(1, len(schedule)))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._send(arrival, start, places, tell)) for arrival in schedule]
        return [task.result() for task in tasks]

    @abstractmethod
    async def ask(self, arrival: Arrival, answer: Answer) -> None:
        """Sends a request and notes its answer, until its end or the client's timeout."""

    @abstractmethod
    async def max_context_len(self) -> int:
        """Tells that of the model that is served. Raises BatonError."""

    async def _send(
        self, arrival: Arrival, start: float, places: asyncio.Semaphore, tell: Callable[[Record], object]
    ) -> Record:
        await asyncio.sleep(arrival.at_s - (time.perf_counter() - start))
        async with places:
            sent_s = time.perf_counter() - start
            answer = Answer(start)
            await self.ask(arrival, answer)
        record = Record(
            scheduled_s=arrival.at_s,
            sent_s=sent_s,
            chunks=tuple(answer.chunks),
            ended_s=time.perf_counter() - start,
            prompt_len=len(arrival.prompt),
            cached_len=answer.cached_len,
            error=answer.error,
        )
        tell(record)
        return record


class LoadClient(OpenLoopClient):
    """A connection to a service of ours over gRPC."""

    def __init__(self, address: str, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._client = AsyncClient(address, timeout_s=timeout_s)

    async def __aenter__(self) -> Self:
        await self._client.list_models()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def max_context_len(self) -> int:
        return (await self._client.list_models())[0].max_context_len

    async def ask(self, arrival: Arrival, answer: Answer) -> None:
        sampling = {"temperature": 0.0, "max_tokens": arrival.output_len, "ignore_eos": True}
        try:
            async with self._client.stream(arrival.prompt, **sampling) as stream:  # type: ignore[arg-type]
                async for chunk in stream:
                    if chunk.token_ids:
                        answer.note(len(chunk.token_ids))
            answer.cached_len = sum(stream.completion.usage.cached_tokens.values())
        except BatonError as error:
            answer.error = error.status.grpc


class CompletionsClient(OpenLoopClient):
    """A client of OpenAI's completions over HTTP, streamed; each request has a connection of its own.

    url: as programs get it, like http://127.0.0.1:8000/v1. model: "" asks the server. ignore_eos: a field that vLLM,
    SGLang and this gateway know; None leaves it out.
    """

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
        """Raises Unavailable if the server does not tell its models."""
        self._model = self._model or str((await self._describe_model())["id"])
        return self

    async def __aexit__(self, *_: object) -> None:
        """Has nothing to close: no connection outlives its request."""

    async def max_context_len(self) -> int:
        return int((await self._describe_model()).get("max_model_len") or NO_CONTEXT_LEN)

    async def ask(self, arrival: Arrival, answer: Answer) -> None:
        body = {
            "model": self._model,
            "prompt": arrival.prompt,
            "max_tokens": arrival.output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._ignore_eos,
        }
        told = _Events(answer)
        status = await self._exchange("POST /completions", json.dumps(body).encode(), told.take)
        if isinstance(status, str) or status != 200:
            answer.error = status if isinstance(status, str) else f"HTTP {status}"
        elif answer.error is None and not told.are_whole:
            answer.error = "broken off"

    async def _describe_model(self) -> dict[str, Any]:
        lines: list[bytes] = []
        status = await self._exchange("GET /models", b"", lines.append)
        try:
            model: dict[str, Any] = json.loads(b"\n".join(lines))["data"][0]
        except (ValueError, LookupError, TypeError) as error:
            said = status if isinstance(status, str) else f"HTTP {status}"
            raise Unavailable(f"{self._host}:{self._port}{self._path}/models does not tell a model: {said}") from error
        return model

    async def _exchange(self, what: str, body: bytes, take: Callable[[bytes], None]) -> int | str:
        """Sends a request, hands on the lines of its answer, and returns the status, or what failed."""
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
        """Raises OSError, also for an answer without a status, or HttpParserError."""
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
    """The body of an answer, handed on by lines; httptools calls it."""

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
    """The events of a streamed completion, noted in an answer."""

    def __init__(self, answer: Answer) -> None:
        self.are_whole = False
        self._answer = answer

    def take(self, line: bytes) -> None:
        if line.startswith(_DATA + b"{"):
            self._note(json.loads(line.removeprefix(_DATA)))
        elif line.startswith(_DATA + b"[DONE]"):
            self.are_whole = True

    def _note(self, event: dict[str, Any]) -> None:
        """Counts an event of a choice as one token, unless it has token ids, or tells no more than the choice's end."""
        if "error" in event:
            self._answer.error = "error in the stream"
        for choice in event.get("choices") or ():
            is_end = choice.get("finish_reason") is not None and not choice.get("text")
            if num_tokens := len(choice.get("token_ids") or ()) or int(not is_end):
                self._answer.note(num_tokens)
        if usage := event.get("usage"):
            self._answer.settle(usage.get("completion_tokens") or 0)
            self._answer.cached_len = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
