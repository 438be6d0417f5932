"""docs/api.md names every field that HTTP or gRPC knows."""

import re
from pathlib import Path

from gateway import unread
from gateway.chat import ChatDialect
from gateway.completions import CompletionsDialect
from gateway.messages import MessagesDialect
from gateway.responses import ResponsesDialect
from router.ports.interceptors import reserved_names
from wire.pb import inference_pb2 as pb

PAGE = (Path(__file__).resolve().parents[2] / "docs/api.md").read_text()
NAMED = set(re.findall(r"`([A-Za-z0-9_.-]+)`", PAGE)) | {"logprobs"}


def test_fields_of_http_are_named() -> None:
    dialects = (ChatDialect, CompletionsDialect, ResponsesDialect, MessagesDialect)
    known = {*unread.ONLY, *unread.REFUSED, *unread.TOLD}.union(*(one.fields for one in dialects))
    assert known - NAMED == set()


def test_fields_of_grpc_are_named() -> None:
    messages = (pb.GenerateRequest, pb.SamplingParams)
    known = {field.name for message in messages for field in message.DESCRIPTOR.fields} - {"sampling_params"}
    reserved = {name for message in messages for name in reserved_names(message).values()}
    assert (known | reserved) - NAMED == set()
