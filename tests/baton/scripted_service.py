"""A server of the public service that answers by a script."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_status import rpc_status

from wire.errors import BatonError
from wire.pb import inference_pb2 as pb
from wire.pb.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from wire.rpc import to_status

WAIT_S = 10.0
Step = pb.GenerateResponse | BatonError | threading.Event


class ScriptedService(InferenceServicer):
    """Sends the responses of `script`, waits at its events, raises its errors. Keeps the requests that came.

    `is_over` is set when a call has ended, also by its client's cancellation.
    """

    def __init__(self, script: Sequence[Step] = ()) -> None:
        self.script = script
        self.requests: list[pb.GenerateRequest] = []
        self.aborted: list[str] = []
        self.is_over = threading.Event()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:  # noqa: N802
        self.requests.append(request)
        context.add_callback(self.is_over.set)
        for step in self.script:
            if isinstance(step, threading.Event):
                step.wait(
                    6 * WAIT_S
                )  # longer than tests wait, or the end of the script would look like that of a client
            elif isinstance(step, BatonError):
                _refuse(context, step)
            else:
                yield step

    def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:  # noqa: N802
        self.aborted.append(request.request_id)
        for step in self.script:
            if isinstance(step, threading.Event):
                step.wait(6 * WAIT_S)
            elif isinstance(step, BatonError):
                _refuse(context, step)
        return pb.AbortResponse()

    def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:  # noqa: N802
        model = pb.Model(name="small", max_context_len=2048, dtype="float32", fingerprint="ab12")
        return pb.ListModelsResponse(models=[model])


@contextmanager
def served(service: ScriptedService) -> Iterator[str]:
    """The address of a real server of that service."""
    server = grpc.server(ThreadPoolExecutor(4))
    add_InferenceServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield address
    finally:
        server.stop(None).wait(WAIT_S)


def _refuse(context: Any, error: BatonError) -> None:
    context.abort_with_status(rpc_status.to_status(to_status(error)))
