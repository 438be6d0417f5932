"""An AsyncClient with the calls of a Client, so that one test holds both."""

import asyncio
from collections.abc import Sequence
from typing import Any

from baton import AsyncClient, Chunk, Completion
from baton.results import Model


class ThreadedAsyncClient:
    """Runs each call to its end on an event loop of its own."""

    def __init__(self, address: str, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = self._runner.run(self._open(address, options))

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Any:
        return self._runner.run(self._client.generate(prompt, **options))

    def stream(self, prompt: str | Sequence[int], **options: Any) -> "ThreadedAsyncStream":
        return ThreadedAsyncStream(self._runner, self._runner.run(self._stream(prompt, options)))

    def abort(self, request_id: str, **options: Any) -> None:
        self._runner.run(self._client.abort(request_id, **options))

    def list_models(self, **options: Any) -> tuple[Model, ...]:
        return self._runner.run(self._client.list_models(**options))

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    async def _open(self, address: str, options: Any) -> AsyncClient:
        return AsyncClient(address, **options)

    async def _stream(self, prompt: str | Sequence[int], options: Any) -> Any:
        return self._client.stream(prompt, **options)


class ThreadedAsyncStream:
    """Reads an AsyncStream as a Stream is read."""

    def __init__(self, runner: asyncio.Runner, stream: Any) -> None:
        self._runner = runner
        self._stream = stream
        self._chunks = aiter(stream)

    @property
    def completion(self) -> Completion:
        completion: Completion = self._stream.completion
        return completion

    def __iter__(self) -> "ThreadedAsyncStream":
        return self

    def __next__(self) -> Chunk:
        async def read() -> Chunk | None:
            return await anext(self._chunks, None)

        chunk = self._runner.run(read())
        if chunk is None:
            raise StopIteration
        return chunk

    def __enter__(self) -> "ThreadedAsyncStream":
        self._runner.run(self._stream.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._stream.__aexit__(None, None, None))
