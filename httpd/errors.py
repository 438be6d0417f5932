"""Errors as clients of HTTP see them: a status, and OpenAI's envelope."""

import json
from collections.abc import Callable
from dataclasses import asdict
from http import HTTPStatus
from math import ceil

from wire.errors import (
    BatonError,
    ContextLengthExceeded,
    InvalidRequest,
    Lengths,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    Status,
    Unauthenticated,
    Unavailable,
)

RETRY_AFTER_S = 1
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES: dict[type[BatonError], str] = {
    ContextLengthExceeded: "context_length_exceeded",
    InvalidRequest: "invalid_value",
    ModelNotFound: "model_not_found",
    Unauthenticated: "invalid_api_key",
}


class HttpError(BatonError):
    """A fault of HTTP: path, method, type, size or time. The connection closes if the request's body was not read."""

    def __init__(self, status: HTTPStatus, message: str, **ids: str) -> None:
        super().__init__(message, **ids)
        self.status = Status("INVALID_ARGUMENT", status.value, status.value >= HTTPStatus.INTERNAL_SERVER_ERROR)
        self.code = status.phrase.lower().replace(" ", "_").replace("-", "_")


def envelope(error: BatonError) -> bytes:
    """Writes an error as the object that OpenAI's clients read."""
    return json.dumps({"error": describe(error)}).encode()


def describe(error: BatonError) -> dict[str, object]:
    """Describes an error in OpenAI's words, with the timeline of its request if it has one."""
    code = error.code if isinstance(error, HttpError) else _CODES.get(type(error), error.reason.lower())
    status = error.status.http
    kind = _TYPES.get(status, "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error")
    return {
        "message": message_of(error, _openai_words),
        "type": kind,
        "param": error.ids.get("param") or None,
        "code": code,
        **({} if error.timeline is None else {"timeline": asdict(error.timeline)}),
    }


def message_of(error: BatonError, words: Callable[[Lengths], str]) -> str:
    """Writes the message of an error. words: the dialect's text about a context that is too short, put before ours."""
    lengths = error.lengths if isinstance(error, ContextLengthExceeded) else None
    return error.message if lengths is None else words(lengths) + error.message


def _openai_words(lengths: Lengths) -> str:
    return f"This model's maximum context length is {lengths.limit} tokens. However, " + (
        f"you requested {lengths.prompt + lengths.output} tokens"
        f" ({lengths.prompt} in the messages, {lengths.output} in the completion). "
        if lengths.output
        else f"your messages resulted in {lengths.prompt} tokens. "
    )


def headers(error: BatonError) -> list[tuple[bytes, bytes]]:
    """Lists the headers retry-after, allow and www-authenticate of an error."""
    lines = [(b"allow", error.ids["allow"].encode())] if "allow" in error.ids else []
    if isinstance(error, Unauthenticated | PermissionDenied):
        lines.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, Overloaded | Unavailable):
        after_s = error.retry_after_s if isinstance(error, Overloaded) else None
        lines.append((b"retry-after", str(max(RETRY_AFTER_S, ceil(after_s or 0))).encode()))
    return lines
