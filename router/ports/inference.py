"""The public service `Inference`."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from router.config import ServedModel, StreamBounds
from router.ports.reader_watch import ReaderWatch
from router.requests.dispatch import Dispatcher
from router.requests.events import Stopped
from wire.errors import Cancelled
from wire.ids import RequestId
from wire.pb import inference_pb2 as pb
from wire.pb.inference_pb2_grpc import InferenceServicer

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceApi(InferenceServicer):
    """What it raises becomes a status in the server's interceptor."""

    def __init__(self, model: ServedModel, dispatcher: Dispatcher, bounds: StreamBounds) -> None:
        self._model = model
        self._dispatcher = dispatcher
        self._max_stall_s = bounds.max_stall_s

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        session = self._dispatcher.open(request, context.time_remaining())
        watch = ReaderWatch(session, context, self._max_stall_s)

        def over(_: object) -> None:
            """However the call ended; generators that are dropped half-way are no place to clean up."""
            watch.close()
            session.on(Stopped(Cancelled("the client went away")))

        context.add_done_callback(over)  # type: ignore[arg-type]
        async for response in session.outbox:
            yield response

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        self._dispatcher.abort(RequestId(request.request_id))
        return pb.AbortResponse()

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # noqa: N802
        model = pb.Model(
            name=self._model.name,
            max_context_len=self._model.max_context_len,
            dtype=self._model.dtype,
            fingerprint=self._model.fingerprint_hex,
        )
        return pb.ListModelsResponse(models=[model])
