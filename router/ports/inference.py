"""The public service `Inference`."""

import asyncio
import logging
from typing import Any

import grpc.aio
from grpc_status import rpc_status

from router.config import StreamBounds
from router.ports.interceptors import CALLER
from router.requests.dispatch import Dispatcher, OpenRequest
from wire.errors import Cancelled, Overloaded
from wire.ids import TRACEPARENT, RequestId
from wire.pb import inference_pb2 as pb
from wire.pb.inference_pb2_grpc import InferenceServicer
from wire.rpc import ADAPTED_METADATA, BATCH_INVARIANT_METADATA, PROMPT_TOKENS_METADATA, to_status

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
_ABORT_TIMEOUT_S = 5.0


class InferenceApi(InferenceServicer):
    """The public service, for callers that KeyInterceptor admits; ErrorInterceptor turns errors into statuses."""

    def __init__(self, dispatcher: Dispatcher, bounds: StreamBounds) -> None:
        self._dispatcher = dispatcher
        self._max_stall_s = bounds.max_stall_s

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Answers a request. Writes through its context: gRPC may drop a generator without running its `finally`."""
        traceparent = str(dict(context.invocation_metadata() or ()).get(TRACEPARENT, ""))
        opened = self._dispatcher.open(request, context.time_remaining(), CALLER.get(), traceparent)
        watching: asyncio.Task[None] | None = None
        try:
            if num_prompt_tokens := await opened.outbox.begun:
                adapted = ", ".join(opened.outbox.adapted)
                promises = () if self._dispatcher.model.batch_invariant else ((BATCH_INVARIANT_METADATA, "false"),)
                await context.send_initial_metadata(
                    ((PROMPT_TOKENS_METADATA, str(num_prompt_tokens)), (ADAPTED_METADATA, adapted), *promises)
                )
            # Not before: gRPC forgets an abort beside metadata that is being sent, and the client would wait for ever.
            watch = watch_reader(opened, context, self._max_stall_s, asyncio.current_task())
            watching = asyncio.create_task(watch)
            async for response in opened.outbox:
                await context.write(response)
        finally:
            if watching is not None:
                watching.cancel()
            opened.stop(Cancelled("the client went away"))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        await self._dispatcher.abort(RequestId(request.request_id), CALLER.get())
        return pb.AbortResponse()

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # noqa: N802
        served = self._dispatcher.model
        model = pb.Model(
            max_context_len=served.max_context_len,
            dtype=served.dtype,
            fingerprint=served.fingerprint_hex,
            tool_format=self._dispatcher.formats.tool,
            reasoning_format=self._dispatcher.formats.reasoning,
        )
        response = pb.ListModelsResponse()
        for name in served.names:
            response.models.add(name=name).MergeFrom(model)
        return response

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        return await self._dispatcher.tokenize(request, CALLER.get())

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        return self._dispatcher.detokenize(request)


async def watch_reader(
    request: OpenRequest, context: Context, max_stall_s: float, writer: asyncio.Task[Any] | None
) -> None:
    """Ends a stream whose `writer` has been in one write for `max_stall_s`.

    gRPC buffers some megabytes before a writer waits, so a stream holds at most these and its outbox in memory.
    """
    clock = asyncio.get_running_loop().time
    while True:
        writing_since = request.outbox.writing_since
        left_s = max_stall_s if writing_since is None else writing_since + max_stall_s - clock()
        if left_s <= 0:
            break
        await asyncio.sleep(left_s)
    values = {"request_id": request.request_id}
    log.warning("a client has not read for %s s, and its stream is ended", max_stall_s, extra=values)
    error = Overloaded(f"the client has not read for {max_stall_s:g} s, the limit (router.max_stall_s)")
    request.stop(error)
    try:
        # The status waits behind the unread messages; the writer, stuck in the midst of one, must not.
        async with asyncio.timeout(_ABORT_TIMEOUT_S):
            await context.abort_with_status(rpc_status.to_status(to_status(error)))
    except (TimeoutError, grpc.aio.BaseError):
        if writer is not None:
            writer.cancel()
