"""Calls of a service as bytes, and back: msgpack behind a length, of the types that the service's methods declare.

A call is `[name of the method, argument, ...]`; its answer is `[True, value]`, or `[False, message]` for a refusal. A
dataclass is the list of its fields. Each value that arrives is checked against its declared type before it is used.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgpack

from wire.errors import WireError
from wire.settings import Read, by_place, fields_of, reader_of

MAX_MESSAGE_BYTES = 16 << 20
LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class ServiceCall:
    """A method of the service, its arguments, and the declared type of each."""

    method: str
    arguments: list[Any]
    hints: tuple[Any, ...]


@dataclass(frozen=True)
class Refused:
    """The service refused a call and changed nothing."""

    message: str


class ServiceCodec:
    """The public methods of a class as calls. Arguments are positional.

    `wire.settings` lists the types that may be declared, and checks each value that arrives.
    """

    def __init__(self, service: type) -> None:
        public = [name for name, value in vars(service).items() if callable(value) and not name.startswith("_")]
        self._hints = {name: get_type_hints(getattr(service, name), include_extras=True) for name in public}
        self._answers = {name: reader_of(hints.pop("return"), by_place) for name, hints in self._hints.items()}
        self._arguments = {
            name: fields_of(hints.values(), lambda *values: [*values]) for name, hints in self._hints.items()
        }

    def encode_call(self, method: str, arguments: Sequence[Any]) -> bytes:
        """Encodes a call behind its length. WireError if it is longer than MAX_MESSAGE_BYTES."""
        return _framed([method, *arguments])

    def decode_call(self, body: bytes) -> ServiceCall:
        """Decodes a call without its length. WireError for bytes that are no call of this service."""
        call: ServiceCall = _checked(body, self._read_call)
        return call

    def encode_answer(self, answer: object) -> bytes:
        """Encodes an answer, or a `Refused`, behind its length. WireError if it is longer than MAX_MESSAGE_BYTES."""
        return _framed([False, answer.message] if isinstance(answer, Refused) else [True, answer])

    def decode_answer(self, method: str, body: bytes) -> Any:
        """Decodes the answer to a method, or a `Refused`. WireError for bytes that are neither."""
        return _checked(body, lambda plain: self._read_answer(method, plain))

    def _read_call(self, plain: Any) -> ServiceCall:
        method, *values = plain
        return ServiceCall(method, self._arguments[method](values), tuple(self._hints[method].values()))

    def _read_answer(self, method: str, plain: Any) -> Any:
        is_answered, value = plain
        return self._answers[method](value) if _read_bool(is_answered) else Refused(_read_str(value))


def body_len(length: bytes) -> int:
    """Counts the bytes that follow a message's length. WireError if no message is as long."""
    (num_bytes,) = LENGTH.unpack(length)
    if num_bytes > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {num_bytes} bytes")
    return int(num_bytes)


def _framed(message: list[Any]) -> bytes:
    body = bytes(msgpack.packb(message, default=_plain))
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(body)} bytes")
    return LENGTH.pack(len(body)) + body


def _checked(body: bytes, read: Read) -> Any:
    try:
        return read(msgpack.unpackb(body))
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise WireError("not a message of this protocol") from error


def _plain(value: Any) -> list[Any]:
    names = getattr(value, "__match_args__", None)  # a dataclass's fields, in order
    return list(value) if names is None else [getattr(value, name) for name in names]


_read_bool, _read_str = reader_of(bool, by_place), reader_of(str, by_place)
