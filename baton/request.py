"""A client's requests as messages, and failures of calls as errors."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NotRequired, TypedDict, cast

import grpc.aio

from baton.results import Typed, read_timeline
from wire.errors import DeadlineExceeded, InvalidRequest, Unreachable
from wire.pb import inference_pb2 as pb
from wire.rpc import MAX_MESSAGE_BYTES, details_of, from_rpc_error

TIMEOUT_S = 600.0
API_KEY = "BATON_API_KEY"
"""The environment variable with the key of a client that is given no key."""
Metadata = tuple[tuple[str, str], ...]


class Message(TypedDict):
    """A turn of a chat. `role` is system, developer, user, assistant or tool, as the model's template takes them.

    tool_calls: an assistant's calls, each in JSON; tool_call_id: the call that a tool answers. Form:
    proto/inference.proto.
    """

    role: str
    content: str
    tool_calls: NotRequired[Sequence[str]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]


Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or the messages of a chat."""


class ChatOptions(TypedDict, total=False):
    """Settings of a chat, beside its messages."""

    tools: Sequence[str]
    tool_choice: Mapping[str, object]
    chat_template_kwargs: str
    thinking_token_budget: int
    continue_final_message: bool


OF_CHATS = tuple(ChatOptions.__annotations__)
OF_MESSAGES = ("request_id", "model", "kv_policy", "session", "keep_s", "priority")
OF_REQUESTS = (*OF_MESSAGES, "timeout_s", *OF_CHATS)
"""Options that are no settings of sampling."""


class Options(ChatOptions, total=False):
    """Settings of one request. The server gives omitted settings their defaults, and draws the seed.

    proto/inference.proto gives ranges and defaults. `timeout_s` bounds the call in place of the client's own.
    """

    request_id: str
    model: str
    kv_policy: str
    session: str
    keep_s: float
    priority: int
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
    logit_bias: Mapping[int, float]
    prompt_logprobs: int
    echo: bool
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    response_format: Mapping[str, str]


def credentials(api_key: str | None) -> Metadata:
    """Returns the metadata by which a call shows its key; "" shows no key, None the environment's, if any.

    Raises InvalidRequest for a key that gRPC cannot carry.
    """
    given = os.environ.get(API_KEY, "") if api_key is None else api_key
    if not re.fullmatch(r"[!-~]*", given):
        raise InvalidRequest("api_key", "must be of printable ASCII characters")
    return (("authorization", f"Bearer {given}"),) if given else ()


def for_schema(options: Options, schema: type[Typed] | None) -> Options:
    """Sets the response format to a class's JSON schema. Raises InvalidRequest for a second format, or n above 1."""
    if schema is None:
        return options
    if "response_format" in options or options.get("n", 1) > 1:
        raise InvalidRequest("schema", "excludes response_format, and n above 1")
    return {**options, "response_format": {"json_schema": json.dumps(schema.model_json_schema())}}


def make_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """Builds the message. Raises InvalidRequest for values that protobuf cannot hold; the server checks the rest."""
    request = pb.GenerateRequest()
    for name in OF_MESSAGES:
        with _refusing(name):
            request.MergeFrom(pb.GenerateRequest(**{name: options.get(name)}))  # type: ignore[arg-type]
    with _refusing("prompt"):
        _set_prompt(request, prompt)
    _set_chat(request, options)
    request.sampling_params.SetInParent()
    for name, value in options.items():
        if name not in OF_REQUESTS:
            with _refusing(name):
                request.sampling_params.MergeFrom(pb.SamplingParams(**{name: value}))  # type: ignore[arg-type]
    _require_sendable(request)
    return request


def make_tokenize_request(prompt: str | Sequence[Message], options: ChatOptions) -> pb.TokenizeRequest:
    """Builds the message. Raises InvalidRequest as above."""
    request = pb.TokenizeRequest()
    with _refusing("prompt"):
        _set_prompt(request, prompt)
    _set_chat(request, options)
    _require_sendable(request)
    return request


def make_detokenize_request(token_ids: Sequence[int]) -> pb.DetokenizeRequest:
    """Builds the message. Raises InvalidRequest as above."""
    with _refusing("token_ids"):
        return pb.DetokenizeRequest(token_ids=token_ids)


def _set_prompt(request: Any, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        request.messages.CopyFrom(pb.Conversation(messages=[pb.Message(**one) for one in prompt]))  # type: ignore[arg-type]
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))  # type: ignore[arg-type]


def _set_chat(request: pb.GenerateRequest | pb.TokenizeRequest, options: ChatOptions) -> None:
    for name in OF_CHATS:
        with _refusing(name):
            if options.get(name) is not None:
                if not request.HasField("messages"):
                    raise InvalidRequest(name, "wants a prompt of messages")
                request.messages.MergeFrom(pb.Conversation(**{name: options[name]}))  # type: ignore[literal-required]


def _require_sendable(request: pb.GenerateRequest | pb.TokenizeRequest) -> None:
    num_bytes = request.ByteSize()
    if num_bytes > MAX_MESSAGE_BYTES:
        raise InvalidRequest("prompt", f"the request has {num_bytes} bytes; at most {MAX_MESSAGE_BYTES}")


@contextmanager
def _refusing(param: str) -> Iterator[None]:
    """Raises InvalidRequest for a value that protobuf refuses: wrong type, too large, or no Unicode."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidRequest(param, "has a value that no request can hold, or text that is no Unicode") from error


@contextmanager
def typed_errors(timeout_s: float, proxy: str = "") -> Iterator[None]:
    """Raises a failed call's error as a BatonError; its `__cause__` is gRPC's own error.

    proxy: the environment variable whose proxy gRPC uses; the message names it if no server has answered.
    """
    try:
        yield
    except grpc.RpcError as failure:  # of either channel: both tell code, details and trailing metadata
        status = cast(grpc.aio.AioRpcError, failure)
        if status.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not details_of(status):  # not a word of the server's
            late = f"no whole answer within the timeout of {timeout_s:g} s"
            raise DeadlineExceeded(f"{late}: give a longer one, or see `baton status`") from failure
        error = from_rpc_error(status)
        if error.timeline is not None:
            error.timeline = read_timeline(error.timeline)
        if proxy and isinstance(error, Unreachable) and not details_of(status):
            error = Unreachable(f"{error.message}: gRPC asks the proxy of {proxy}, unless no_proxy names the host")
        raise error from failure
