"""The client for threads: calls block, up to their timeout."""

from collections.abc import Iterator, Sequence
from typing import Any, Self, Unpack

import grpc

from baton.request import TIMEOUT_S, SamplingOptions, make_request, typed_errors
from baton.results import Chunk, Completion, Draft, Model, read_models
from wire.pb import inference_pb2 as pb
from wire.pb.inference_pb2_grpc import InferenceStub
from wire.rpc import CHANNEL_OPTIONS


class Stream:
    """An answer under way. Iterating blocks for each chunk; leaving the `with` block early ends the request."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._draft = Draft()

    @property
    def completion(self) -> Completion:
        """The whole answer, once all chunks are read; WireError before."""
        return self._draft.require_completion()

    def __iter__(self) -> Iterator[Chunk]:
        with typed_errors():
            for response in self._call:
                chunk = self._draft.accept(response)
                if chunk is not None:
                    yield chunk
        self._draft.require_completion()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._call.cancel()


class Client:
    """A connection to a cluster's public port, HOST:PORT. Threads may share it. `timeout_s` bounds each call."""

    def __init__(self, address: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = InferenceStub(self._channel)
        self._timeout_s = timeout_s

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        request_id: str | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Returns the whole answer to a prompt, text or token ids. Raises BatonError."""
        with self.stream(prompt, request_id=request_id, model=model, timeout_s=timeout_s, **sampling) as stream:
            for _ in stream:
                pass
            return stream.completion

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        request_id: str | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Stream:
        """Sends a prompt; its answer comes chunk by chunk. Raises InvalidRequest, reading the stream any BatonError."""
        request = make_request(prompt, request_id, model, sampling)
        return Stream(self._stub.Generate(request, timeout=self._bound(timeout_s)))

    def abort(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """Ends a running request, whose stream then raises Cancelled. RequestNotFound if it does not run."""
        with typed_errors():
            self._stub.Abort(pb.AbortRequest(request_id=request_id), timeout=self._bound(timeout_s))

    def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        with typed_errors():
            return read_models(self._stub.ListModels(pb.ListModelsRequest(), timeout=self._bound(timeout_s)))

    def close(self) -> None:
        """Closes the connection, which cancels the calls on it."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bound(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s
