"""Calls of a service as bytes, and back: msgpack behind a length, of the types that the service's methods declare.

A call is `[name of the method, argument, ...]`; its answer is `[True, value]`, or `[False, message]` for a refusal. A
dataclass is the list of its fields. Each value that arrives is checked against its declared type before it is used.
"""

import struct
from collections import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, NewType, Union, get_args, get_origin, get_type_hints

import msgpack

from wire.errors import WireError

MAX_MESSAGE_BYTES = 16 << 20
LENGTH = struct.Struct(">I")

_Reader = Callable[[Any], Any]


@dataclass(frozen=True)
class Call:
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

    Declared types are int, float, str, bytes, bool, NewTypes and StrEnums of these, frozen dataclasses, and lists,
    sequences or `None`-unions of all these. `Annotated[type, check]` calls `check` with each value that arrives.
    """

    def __init__(self, service: type) -> None:
        public = [name for name, value in vars(service).items() if callable(value) and not name.startswith("_")]
        self._hints = {name: get_type_hints(getattr(service, name), include_extras=True) for name in public}
        self._answers = {name: _reader_of(hints.pop("return")) for name, hints in self._hints.items()}
        self._arguments = {name: _fields_reader(list(hints.values()), _listed) for name, hints in self._hints.items()}

    def encode_call(self, method: str, arguments: Sequence[Any]) -> bytes:
        """Encodes a call behind its length. WireError if it is longer than MAX_MESSAGE_BYTES."""
        return _framed([method, *arguments])

    def decode_call(self, body: bytes) -> Call:
        """Decodes a call without its length. WireError for bytes that are no call of this service."""
        call: Call = _checked(body, self._read_call)
        return call

    def encode_answer(self, answer: object) -> bytes:
        """Encodes an answer, or a `Refused`, behind its length. WireError if it is longer than MAX_MESSAGE_BYTES."""
        return _framed([False, answer.message] if isinstance(answer, Refused) else [True, answer])

    def decode_answer(self, method: str, body: bytes) -> Any:
        """Decodes the answer to a method, or a `Refused`. WireError for bytes that are neither."""
        return _checked(body, lambda plain: self._read_answer(method, plain))

    def _read_call(self, plain: Any) -> Call:
        method, *values = plain
        return Call(method, self._arguments[method](values), tuple(self._hints[method].values()))

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


def _checked(body: bytes, read: _Reader) -> Any:
    try:
        return read(msgpack.unpackb(body))
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise WireError("not a message of this protocol") from error


def _plain(value: Any) -> list[Any]:
    names = getattr(value, "__match_args__", None)  # a dataclass's fields, in order
    return list(value) if names is None else [getattr(value, name) for name in names]


def _reader_of(hint: Any) -> _Reader:
    """Makes the function that turns a msgpack value into a value of a type, or raises TypeError or ValueError."""
    if isinstance(hint, NewType):
        return _reader_of(hint.__supertype__)
    if is_dataclass(hint):
        return _dataclass_reader(hint)
    origin, options = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _annotated_reader(*options)
    if origin in (list, abc.Sequence):
        return _list_reader(*options)
    if origin in (Union, UnionType):
        return _optional_reader(*(option for option in options if option is not NoneType))
    return _scalar_reader(hint)


def _scalar_reader(kind: type) -> _Reader:
    accepted = (int, float) if kind is float else (str,) if issubclass(kind, StrEnum) else (kind,)

    def read(value: Any) -> Any:
        if type(value) not in accepted:
            raise TypeError(f"{type(value).__name__} for {kind.__name__}")
        return kind(value)

    return read


def _annotated_reader(hint: Any, *metadata: Any) -> _Reader:
    read_plain, checks = _reader_of(hint), [check for check in metadata if callable(check)]

    def read(value: Any) -> Any:
        known = read_plain(value)
        for check in checks:
            check(known)
        return known

    return read


def _list_reader(item: Any) -> _Reader:
    read_item = _reader_of(item)

    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise TypeError("not a list")
        return [read_item(one) for one in value]

    return read


def _optional_reader(hint: Any) -> _Reader:
    read_present = _reader_of(hint)
    return lambda value: None if value is None else read_present(value)


def _fields_reader(hints: Sequence[Any], make: Callable[..., Any]) -> _Reader:
    readers = [_reader_of(hint) for hint in hints]

    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise TypeError("not a list of fields")
        return make(*(read(one) for read, one in zip(readers, value, strict=True)))

    return read


def _dataclass_reader(kind: Any) -> _Reader:
    hints = get_type_hints(kind, include_extras=True)
    return _fields_reader([hints[field.name] for field in fields(kind)], kind)


def _listed(*values: Any) -> list[Any]:
    return list(values)


_read_bool, _read_str = _scalar_reader(bool), _scalar_reader(str)
