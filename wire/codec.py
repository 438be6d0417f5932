"""Messages as bytes, and back: tagged frozen dataclasses in msgpack, behind a length.

A message is `[name of its class, field, field, ...]`; a dataclass within it is the list of its fields. Nothing of what
arrives is believed before its type has been checked against the field's.
"""

import struct
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

import msgpack

from wire.errors import WireError

MAX_MESSAGE_BYTES = 16 << 20
LENGTH = struct.Struct(">I")

_Reader = Callable[[Any], Any]


class MessageCodec:
    """Encodes and decodes the given frozen dataclasses.

    Their fields are int, float, str, bytes, bool, NewTypes of these, other such dataclasses, and lists or `None`-unions
    of all these.
    """

    def __init__(self, messages: Iterable[type]) -> None:
        self._readers = {message.__name__: _reader_of(message) for message in messages}

    def encode(self, message: object) -> bytes:
        """The message behind its length. WireError if it is longer than MAX_MESSAGE_BYTES."""
        body = bytes(msgpack.packb([type(message).__name__, *_plain_fields(message)]))
        if len(body) > MAX_MESSAGE_BYTES:
            raise WireError(f"a {type(message).__name__} of {len(body)} bytes")
        return LENGTH.pack(len(body)) + body

    def decode(self, body: bytes) -> Any:
        """The message without its length. WireError if it is none of ours."""
        try:
            tag, *values = msgpack.unpackb(body)
            return self._readers[tag](values)
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise WireError("not a message of this protocol") from error


def body_len(length: bytes) -> int:
    """How many bytes follow a message's length. WireError if no message is as long."""
    (num_bytes,) = LENGTH.unpack(length)
    if num_bytes > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {num_bytes} bytes")
    return int(num_bytes)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return _plain_fields(value) if is_dataclass(value) else value


def _plain_fields(message: Any) -> list[Any]:
    return [_plain(getattr(message, name)) for name in message.__match_args__]  # a dataclass's fields, in order


def _reader_of(hint: Any) -> _Reader:
    """What turns a decoded msgpack value into a value of that type, or raises TypeError or ValueError."""
    if isinstance(hint, NewType):
        return _reader_of(hint.__supertype__)
    if is_dataclass(hint):
        return _dataclass_reader(hint)
    if get_origin(hint) is list:
        return _list_reader(*get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return _optional_reader(*(option for option in get_args(hint) if option is not NoneType))
    return _scalar_reader(hint)


def _scalar_reader(kind: type) -> _Reader:
    accepted = (int, float) if kind is float else (kind,)

    def read(value: Any) -> Any:
        if type(value) not in accepted:
            raise TypeError(f"{type(value).__name__} for {kind.__name__}")
        return kind(value)

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


def _dataclass_reader(kind: Any) -> _Reader:
    hints = get_type_hints(kind)
    readers = [_reader_of(hints[field.name]) for field in fields(kind)]

    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise TypeError("not a list of fields")
        return kind(*(read(one) for read, one in zip(readers, value, strict=True)))

    return read
