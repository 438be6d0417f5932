"""Services over a socket: the declaration of their calls, and the codec of the calls and answers.

A `declared` method is the call itself: its name and its arguments, of the declared types, cross the socket, as msgpack
after a length. A call is `[name of the method, argument, ...]`; its answer is `[True, value]`, or `[False, message]`
for a refusal. A dataclass is the list of its fields. Each value that arrives is checked against its declared type
before it is used. A call with an argument declared as `WaitS` may wait.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from functools import wraps
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import msgpack

from wire.errors import WireError
from wire.typed_reader import Between, Read, by_place, fields_of, reader_of

MAX_MESSAGE_BYTES = 16 << 20
MAX_WAIT_S = 10.0
LENGTH = struct.Struct(">I")
WaitS = Annotated[float, Between(0.0, MAX_WAIT_S)]
"""The seconds that a call may wait before it answers."""
ClientName = Annotated[str, "a name that a process gives to one of its writers or readers"]
Ask = Callable[[str, tuple[Any, ...]], Any]
"""A function that carries a call, by name and arguments, to the service, and returns its answer."""


class Calls:
    """Declared calls, which `_ask` carries to the service. The service's side overrides each with its work."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask


P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=Calls)


def declared(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Turns a declaration into the call itself."""

    @wraps(method)
    def call(self: C, /, *arguments: P.args, **_: P.kwargs) -> T:
        answer: T = self._ask(method.__name__, arguments)
        return answer

    return call


@dataclass(frozen=True)
class ServiceCall:
    """A method of the service, its arguments, and the declared type of each."""

    method: str
    arguments: list[Any]
    hints: tuple[Any, ...]


@dataclass(frozen=True)
class RefusedCall:
    """The service refused a call and changed nothing."""

    message: str


class ServiceCodec:
    """The codec of calls: the public methods of classes, with distinct names. Arguments are positional.

    `wire.typed_reader` lists the types that may be declared, and checks each value that arrives.
    """

    def __init__(self, *ports: type) -> None:
        hints_of = {
            name: get_type_hints(value, include_extras=True)
            for port in ports
            for name, value in vars(port).items()
            if callable(value) and not name.startswith("_")
        }
        self._answers = {name: reader_of(hints.pop("return"), by_place) for name, hints in hints_of.items()}
        self._arguments = {
            name: fields_of(hints.values(), lambda *values: [*values]) for name, hints in hints_of.items()
        }
        self._types = {name: (*hints.values(),) for name, hints in hints_of.items()}
        self._waits = {name: hints.index(WaitS) for name, hints in self._types.items() if WaitS in hints}

    def wait_s(self, method: str, arguments: Sequence[Any]) -> float | None:
        """Returns the seconds that a call may wait; None for a call that answers at once."""
        wait_s: float | None = arguments[self._waits[method]] if method in self._waits else None
        return wait_s

    def encode_call(self, method: str, arguments: Sequence[Any]) -> bytes:
        """Encodes a call after its length. Raises WireError if longer than MAX_MESSAGE_BYTES."""
        return _framed([method, *arguments])

    def decode_call(self, body: bytes) -> ServiceCall:
        """Decodes a call without its length. Raises WireError for bytes that are no call of this service."""
        call: ServiceCall = _checked(body, self._read_call)
        return call

    def encode_answer(self, answer: object) -> bytes:
        """Encodes an answer, or a `RefusedCall`, after its length. Raises WireError if too long, as above."""
        return _framed([False, answer.message] if isinstance(answer, RefusedCall) else [True, answer])

    def decode_answer(self, method: str, body: bytes) -> Any:
        """Decodes the answer to a method, or a `RefusedCall`. Raises WireError for bytes that are neither."""
        return _checked(body, lambda plain: self._read_answer(method, plain))

    def _read_call(self, plain: Any) -> ServiceCall:
        method, *values = plain
        return ServiceCall(method, self._arguments[method](values), self._types[method])

    def _read_answer(self, method: str, plain: Any) -> Any:
        is_answered, value = plain
        return self._answers[method](value) if _read_bool(is_answered) else RefusedCall(_read_str(value))


def body_len(length: bytes) -> int:
    """Decodes a message's length in bytes. Raises WireError if no message is as long."""
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
    return list(vars(value).values()) if is_dataclass(value) else list(value)  # a dataclass's fields, in order


_read_bool, _read_str = reader_of(bool, by_place), reader_of(str, by_place)
