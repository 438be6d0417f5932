"""The clients of the public service: `Client` for threads, `AsyncClient` for asyncio."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from copy import copy
from dataclasses import asdict
from typing import Any, Self, Unpack, overload

import grpc.aio
from google.protobuf import message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.request import (
    TIMEOUT_S,
    ChatOptions,
    Message,
    Options,
    Prompt,
    credentials,
    for_schema,
    make_detokenize_request,
    make_request,
    make_tokenize_request,
    typed_errors,
)
from baton.results import (
    BlockCursor,
    BlockPage,
    Chunk,
    Completion,
    Draft,
    Model,
    PromptPart,
    T,
    Tokens,
    read_models,
    read_page,
    read_tokens,
)
from baton.routers import RECONNECT_OPTIONS, Resumption, Routers, Try
from wire.errors import BatonError, RouterLeaving
from wire.ids import TRACEPARENT, TraceContext
from wire.pb import cluster_pb2, worker_pb2
from wire.pb import inference_pb2 as pb
from wire.pb.cluster_pb2_grpc import ClusterStub
from wire.pb.inference_pb2_grpc import InferenceStub
from wire.rpc import (
    ADAPTED_METADATA,
    BATCH_INVARIANT_METADATA,
    CHANNEL_OPTIONS,
    NO_PROXY,
    PROMPT_TOKENS_METADATA,
    proxy_to,
)
from wire.trust.key_ring import place_of


class _Connection:
    """A connection to a cluster's public port, HOST:PORT, or to several routers', with commas between.

    `timeout_s` bounds each call. Of several routers the key's own is asked, and another if that does not answer: a
    stream then goes on there, and each has an equal part of the time of any other call. Connections that are given one
    `Routers` leave out a router together.

    api_key: None takes it from BATON_API_KEY, if that is set. tls: result of `grpc.ssl_channel_credentials`, if the
    port speaks TLS; with key and certificate if the port requires them.
    """

    _grpc: Any
    _service: Any = InferenceStub

    def __init__(
        self,
        address: str | Routers,
        *,
        timeout_s: float = TIMEOUT_S,
        api_key: str | None = None,
        tls: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._metadata = credentials(api_key)
        self._routers = address if isinstance(address, Routers) else Routers(address)
        self._proxy = proxy_to(self._routers.addresses[0])
        self._channels = {one: self._open_channel(one, tls) for one in self._routers.addresses}
        self._stubs = {one: self._service(channel) for one, channel in self._channels.items()}
        self._timeout_s = timeout_s

    @property
    def _place(self) -> str:
        return place_of(dict(self._metadata).get("authorization", "").removeprefix("Bearer "))

    def _open_channel(self, address: str, tls: grpc.ChannelCredentials | None) -> Any:
        options = CHANNEL_OPTIONS if proxy_to(address) else (*CHANNEL_OPTIONS, *NO_PROXY)
        if len(self._routers.addresses) > 1:
            options = (*options, *RECONNECT_OPTIONS)
        if tls is None:
            return self._grpc.insecure_channel(address, options=options)
        return self._grpc.secure_channel(address, tls, options=options)

    def _watch(self, after: Mapping[str, BlockCursor] | None) -> Any:
        cursors = {node_id: worker_pb2.EventCursor(**asdict(cursor)) for node_id, cursor in (after or {}).items()}
        request = cluster_pb2.WatchBlocksRequest(after=cursors)
        channel = self._channels[self._routers.order(self._place)[0]]
        return ClusterStub(channel).WatchBlocks(request, timeout=self._timeout_s, metadata=self._metadata)

    def _open(self, prompt: Prompt, options: Options) -> "tuple[Any, float, str, _Again | None]":
        """Begins to send a prompt; returns the call, its timeout, its proxy, and the way to go on elsewhere, if any."""
        timeout_s, request = options.get("timeout_s", self._timeout_s), make_request(prompt, options)
        if len(self._routers.addresses) > 1:
            again = _Again(self, Resumption(request, self._routers, self._place, timeout_s))
            return again.call(), timeout_s, self._proxy, again
        stub = self._stubs[self._routers.addresses[0]]
        return stub.Generate(request, timeout=timeout_s, metadata=self._metadata), timeout_s, self._proxy, None

    def _call_one(self, method: str, request: message.Message, one: Try) -> Any:
        return getattr(self._stubs[one.address], method)(request, timeout=one.timeout_s, metadata=self._metadata)


class _Again:
    """The way of an answer to another router."""

    def __init__(self, connection: _Connection, resumption: Resumption) -> None:
        self.accept = resumption.accept
        self.lost = resumption.lost
        self._connection = connection
        self._resumption = resumption

    def call(self) -> Any:
        """Sends the request, with what has come of its answer, to the router whose turn it is."""
        resumption, connection = self._resumption, self._connection
        return connection._stubs[resumption.address].Generate(
            resumption.request, timeout=resumption.left_s, metadata=connection._metadata
        )


class _Answer:
    """An answer under way, over a blocking or an asyncio call."""

    def __init__(self, call: Any, timeout_s: float, proxy: str = "", again: _Again | None = None) -> None:
        """again: the way to another router; None if there is none."""
        self._call = call
        self._again = again
        self._timeout_s = timeout_s
        self._proxy = proxy
        self._draft = Draft()

    def _accept(self, response: pb.GenerateResponse) -> Chunk | None:
        if self._again is not None:
            self._again.accept(response)
        return self._draft.accept(response)

    def _lost(self, error: BatonError) -> float | None:
        """Returns the seconds to wait before the call to another router, None if the answer ends with this error."""
        return None if self._again is None else self._again.lost(error)

    def _reopen(self) -> None:
        assert self._again is not None
        self._call = self._again.call()

    @property
    def completion(self) -> Completion:
        """The whole answer, once all chunks are read. Raises WireError before that."""
        return self._draft.require_completion()

    @property
    def prompt(self) -> tuple[Chunk, ...]:
        """The parts of the prompt so far, if its echo or log-probabilities were asked for; they precede all chunks."""
        return tuple(self._draft.prompt)

    def forget(self) -> None:
        """Drops prompt and chunks so far: `completion` will lack them."""
        self._draft.forget()


class Stream(_Answer, AbstractContextManager["Stream"]):
    """An answer under way. Iterating blocks for each chunk; leaving the `with` block early ends the request."""

    def __iter__(self) -> Iterator[Chunk]:
        while True:
            try:
                with typed_errors(self._timeout_s, self._proxy):
                    for response in self._call:
                        piece = self._accept(response)
                        if piece is not None and not isinstance(piece, PromptPart):
                            yield piece
                break
            except BatonError as error:
                if (pause_s := self._lost(error)) is None:
                    raise
                time.sleep(pause_s)
            self._reopen()
        self._draft.require_completion()

    def __exit__(self, *_: object) -> None:
        self._call.cancel()


class Client(_Connection, AbstractContextManager["Client"]):
    """A client of a cluster. Thread-safe; each call blocks."""

    _grpc = grpc

    @overload
    def generate(self, prompt: Prompt, *, schema: None = None, **options: Unpack[Options]) -> Completion: ...

    @overload
    def generate(self, prompt: Prompt, *, schema: type[T], **options: Unpack[Options]) -> T: ...

    def generate(self, prompt: Prompt, *, schema: type[T] | None = None, **options: Unpack[Options]) -> Completion | T:
        """Returns the whole answer to a prompt, with a schema as an object of that class. Raises BatonError."""
        with self.stream(prompt, **for_schema(options, schema)) as stream:
            for _ in stream:
                pass
            return stream.completion if schema is None else stream.completion.read(schema)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Sends a prompt; its answer comes chunk by chunk. Raises InvalidRequest; reading raises any BatonError."""
        return Stream(*self._open(prompt, options))

    def abort(self, request_id: str) -> None:
        """Ends a running request, whose stream then raises Cancelled. Raises RequestNotFound if it does not run."""
        self._call("Abort", pb.AbortRequest(request_id=request_id))

    def tokenize(self, prompt: str | Sequence[Message], **options: Unpack[ChatOptions]) -> Tokens:
        """Returns the tokens of a text, or of a chat as the model's template renders it. Raises BatonError."""
        return read_tokens(self._call("Tokenize", make_tokenize_request(prompt, options)))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids, without special tokens. Raises BatonError."""
        return str(self._call("Detokenize", make_detokenize_request(token_ids)).text)

    def list_models(self) -> tuple[Model, ...]:
        """Lists the models that the cluster serves."""
        return read_models(self._call("ListModels", pb.ListModelsRequest()))

    def watch_blocks(self, after: Mapping[str, BlockCursor] | None = None) -> Iterator[BlockPage]:
        """Yields the events of all nodes' blocks as they come; waits between them. For the operator's port alone.

        after: for each known node the place after which its events begin; other nodes' blocks come first. If events
        were missed, "cleared" comes, then all blocks again. Raises any BatonError, DeadlineExceeded at the timeout.
        """
        call = self._watch(after)
        try:
            with typed_errors(self._timeout_s, self._proxy):
                yield from map(read_page, call)
        finally:
            call.cancel()

    def close(self) -> None:
        """Closes the connection, which ends the calls on it."""
        for channel in self._channels.values():
            channel.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, request: message.Message) -> Any:
        for one in self._routers.tries(self._place, self._timeout_s):
            with one, typed_errors(self._timeout_s, self._proxy):
                return self._call_one(method, request, one)
        raise AssertionError("the last router's error is raised")


class AsyncStream(_Answer, AbstractAsyncContextManager["AsyncStream"]):
    """An answer under way. Leaving the `async with` block early, or cancelling the reading task, ends the request."""

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return (piece async for piece in self.pieces() if not isinstance(piece, PromptPart))

    async def admitted(self) -> int:
        """Waits until a worker has the prompt; returns the number of its tokens, 0 if reading the answer will raise."""
        return int((await self._begun()).get(PROMPT_TOKENS_METADATA, 0))

    async def adapted(self) -> str:
        """Waits as `admitted` does; returns the changes made to messages for the model's chat template, "" for none."""
        return (await self._begun()).get(ADAPTED_METADATA, "")

    async def is_batch_invariant(self) -> bool:
        """Waits as `admitted` does; returns whether the answer has the very same tokens after a failover."""
        return (await self._begun()).get(BATCH_INVARIANT_METADATA) != "false"

    async def pieces(self) -> AsyncGenerator[Chunk, None]:
        """Yields the parts of the prompt, then the chunks, as they come. Raises BatonError."""
        while True:
            try:
                with typed_errors(self._timeout_s, self._proxy):
                    async for response in self._call:
                        piece = self._accept(response)
                        if piece is not None:
                            yield piece
                break
            except BatonError as error:
                if (pause_s := self._lost(error)) is None:
                    raise
                await asyncio.sleep(pause_s)
            self._reopen()
        self._draft.require_completion()

    async def _begun(self) -> dict[str, str]:
        """Waits for the metadata that come once a worker has the prompt; empty if reading the answer will raise."""
        while True:
            told = dict(await self._call.initial_metadata())
            if self._again is None or PROMPT_TOKENS_METADATA in told:
                return told
            call = self._call
            failure = grpc.aio.AioRpcError(
                await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
            )
            try:
                with typed_errors(self._timeout_s, self._proxy):
                    raise failure
            except BatonError as error:
                if (pause_s := self._lost(error)) is None:
                    return told
                await asyncio.sleep(pause_s)
            self._reopen()

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()


class AsyncClient(_Connection, AbstractAsyncContextManager["AsyncClient"]):
    """A client of a cluster, for one event loop."""

    _grpc = grpc.aio

    @overload
    async def generate(self, prompt: Prompt, *, schema: None = None, **options: Unpack[Options]) -> Completion: ...

    @overload
    async def generate(self, prompt: Prompt, *, schema: type[T], **options: Unpack[Options]) -> T: ...

    async def generate(
        self, prompt: Prompt, *, schema: type[T] | None = None, **options: Unpack[Options]
    ) -> Completion | T:
        """Returns the whole answer to a prompt, with a schema as an object of that class. Raises BatonError."""
        async with self.stream(prompt, **for_schema(options, schema)) as stream:
            async for _ in stream:
                pass
            return stream.completion if schema is None else stream.completion.read(schema)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """Sends a prompt; its answer comes chunk by chunk. Raises InvalidRequest; reading raises any BatonError."""
        return AsyncStream(*self._open(prompt, options))

    async def abort(self, request_id: str) -> None:
        """Ends a running request, whose stream then raises Cancelled. Raises RequestNotFound if it does not run."""
        await self._call("Abort", pb.AbortRequest(request_id=request_id))

    async def tokenize(self, prompt: str | Sequence[Message], **options: Unpack[ChatOptions]) -> Tokens:
        """Returns the tokens of a text, or of a chat as the model's template renders it. Raises BatonError."""
        return read_tokens(await self._call("Tokenize", make_tokenize_request(prompt, options)))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids, without special tokens. Raises BatonError."""
        return str((await self._call("Detokenize", make_detokenize_request(token_ids))).text)

    async def list_models(self) -> tuple[Model, ...]:
        """Lists the models that the cluster serves."""
        return read_models(await self._call("ListModels", pb.ListModelsRequest()))

    async def watch_blocks(self, after: Mapping[str, BlockCursor] | None = None) -> AsyncGenerator[BlockPage, None]:
        """Yields the events of all nodes' blocks as they come, as `Client.watch_blocks` does."""
        call = self._watch(after)
        try:
            with typed_errors(self._timeout_s, self._proxy):
                async for page in call:
                    yield read_page(page)
        finally:
            call.cancel()

    def with_key(self, api_key: str, trace: TraceContext | None = None) -> Self:
        """Returns a client that shares the connection and shows this key; "" shows no key. Raises InvalidRequest.

        trace: the trace that the client's requests belong to.
        """
        shared = copy(self)
        shared._metadata = credentials(api_key) + (() if trace is None else ((TRACEPARENT, str(trace)),))
        return shared

    async def require_ready(self, timeout_s: float | None = None) -> None:
        """Raises BatonError unless the router serves. Wants no key. timeout_s: in place of the client's own."""
        request = health_pb2.HealthCheckRequest(service=pb.DESCRIPTOR.services_by_name["Inference"].full_name)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        for one in self._routers.tries(self._place, timeout_s):
            with one, typed_errors(timeout_s, self._proxy):
                stub = health_pb2_grpc.HealthStub(self._channels[one.address])
                answer = await stub.Check(request, timeout=one.timeout_s)
                if answer.status != health_pb2.HealthCheckResponse.SERVING:
                    raise RouterLeaving("the router is stopping")
                return

    async def close(self) -> None:
        """Closes the connection, which ends the calls on it."""
        for channel in self._channels.values():
            await channel.close()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, method: str, request: message.Message) -> Any:
        for one in self._routers.tries(self._place, self._timeout_s):
            with one, typed_errors(self._timeout_s, self._proxy):
                return await self._call_one(method, request, one)
        raise AssertionError("the last router's error is raised")
