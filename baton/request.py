"""Requests of a client as messages, and failures of its calls as errors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypedDict, cast

import grpc
import grpc.aio

from wire.errors import DeadlineExceeded, InvalidRequest
from wire.pb import inference_pb2 as pb
from wire.rpc_status import details_of, from_rpc_error

TIMEOUT_S = 600.0
Prompt = str | Sequence[int]
"""Text, or token ids."""


class Options(TypedDict, total=False):
    """Settings of one request. The server completes the ones left out, and draws the seed.

    proto/inference.proto gives ranges and defaults. `timeout_s` bounds the call in place of the client's own.
    """

    request_id: str
    model: str
    timeout_s: float
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    min_tokens: int
    seed: int
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logprobs: int
    n: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]


def make_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """Builds the message. Raises InvalidRequest for values that no message can hold; the server checks the rest."""
    sampling = {name: value for name, value in options.items() if name not in ("request_id", "model", "timeout_s")}
    request = pb.GenerateRequest(request_id=options.get("request_id"), model=options.get("model"))
    with _refusing("prompt"):
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
    with _refusing("sampling"):
        request.sampling_params.CopyFrom(pb.SamplingParams(**sampling))  # type: ignore[arg-type]
    return request


@contextmanager
def _refusing(param: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidRequest(param, str(error)) from error


@contextmanager
def typed_errors(timeout_s: float) -> Iterator[None]:
    """Raises the BatonError that a failed call stands for; its `__cause__` is gRPC's own error."""
    try:
        yield
    except grpc.RpcError as failure:  # of either channel: both tell code, details and trailing metadata
        status = cast(grpc.aio.AioRpcError, failure)
        if status.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not details_of(status):  # not a word of the server's
            late = f"no whole answer within the timeout of {timeout_s:g} s"
            raise DeadlineExceeded(f"{late}: give a longer one, or see `baton status`") from failure
        raise from_rpc_error(status) from failure
