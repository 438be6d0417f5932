"""The typed reader: makes of a declared type a function from parsed JSON, TOML or msgpack to a value of the type.

Settings are frozen dataclasses, written as JSON and read back strictly.

Types are bool, int, float, str, bytes and enums, NewTypes and Literals of these, frozen dataclasses, lists, sequences,
tuples and dicts of one type each, and unions. `Annotated[type, check]` calls `check` with each value. The caller gives
the function that reads dataclasses: `by_name` from objects, `by_place` from lists of fields.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from enum import EnumMeta
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from wire.errors import ConfigError

T = TypeVar("T")
Read = Callable[[Any], Any]
"""A function that reads a value. Raises Misfit."""
MAX_WHOLE_NUMBER = 1 << 64
"""Bound on whole numbers where a float is expected."""
MAX_SHOWN_CHARS, MAX_SHOWN_BITS = 64, 1024
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", bytes: "bytes"}
_reader_to_type: dict[Read, type] = {}
"""The exact type that a reader of plain values returns as it is: lists of such values skip their readers."""
_KINDS = {dict: "an object", list: "a list", NoneType: "null"}


class Misfit(ValueError):
    """A value does not fit its type. path: its place, from the outermost name or index inwards.

    expected: the type in words; "" for an unknown or missing field.
    """

    def __init__(self, problem: str, expected: str = "") -> None:
        super().__init__(problem)
        self.expected = expected
        self.path: tuple[str | int, ...] = ()

    def within(self, place: str | int) -> "Misfit":
        """Prepends a name or an index to the path."""
        self.path = (place, *self.path)
        return self

    def under(self, name: str) -> str:
        """Writes the path after a name, as in `name.sizes[2]`, on one line."""
        for place in self.path:
            name += f"[{place}]" if isinstance(place, int) else f".{repr(place[:MAX_SHOWN_CHARS])[1:-1]}"
        return name.removeprefix(".")


@dataclass(frozen=True)
class Between:
    """A check of numbers: from `least` to `most`."""

    least: float
    most: float

    def __call__(self, value: float) -> None:
        if not self.least <= value <= self.most:
            raise wrong(f"between {self.least} and {self.most}", value)


@dataclass(frozen=True)
class HexOf:
    """A check of texts: hex digits of `num_bytes` bytes, or of any number. Errors hide the text, maybe a secret."""

    num_bytes: int | None = None

    def __call__(self, value: str) -> None:
        times, what = ("*", "bytes") if self.num_bytes is None else (f"{{{self.num_bytes}}}", f"{self.num_bytes} bytes")
        if not re.fullmatch(f"([0-9a-fA-F]{{2}}){times}", value):
            raise Misfit(f"must be {what} in hex digits")


def not_empty(value: str) -> None:
    """Raises Misfit for an empty text."""
    if not value:
        raise Misfit("must not be empty")


def to_json(settings: Any) -> str:
    return json.dumps(asdict(settings), default=attrgetter("value"))


def to_message(message: Any) -> str:
    """Writes a message as `to_json`, without the fields that have their default.

    A peer of an earlier release, which refuses fields that it does not know, can read a message that uses no new one.
    Records are written whole: another release may have other defaults.
    """
    return json.dumps(message, default=_set_fields)


def from_json(cls: type[T], text: str, where: str) -> T:
    """Reads settings of a class. Raises ConfigError, with the path, for a missing, unknown, repeated or wrong key."""
    try:
        raw = json.loads(text, object_pairs_hook=once)
    except Misfit as misfit:
        raise ConfigError(f"{misfit.under(where)}: {misfit}") from misfit
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON") from error
    return from_object(cls, raw, where)


def from_object(cls: type[T], raw: object, path: str) -> T:
    """Reads settings from nested mappings; `path` is their place, "" at the root."""
    try:
        settings: T = reader_of(cls)(raw)  # type: ignore[arg-type]  # of classes
    except Misfit as misfit:
        raise ConfigError(f"{misfit.under(path)}: {misfit}") from misfit
    return settings


def wrong(expected: str, value: object) -> Misfit:
    """Makes the Misfit of a value that was expected to be something else."""
    return Misfit(f"must be {expected}, not {shown(value)}", expected)


def shown(value: object) -> str:
    """Writes the beginning of a value on one line: an object or a list by its kind, an infinite number in words."""
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS:  # Python would not write it out
        return "a number of more than 300 digits"
    return "an empty list" if value == [] else _KINDS.get(type(value)) or repr(value)[:MAX_SHOWN_CHARS]


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of a parser's pairs. Raises Misfit for a repeated name."""
    if len(named := dict(pairs)) != len(pairs):
        raise Misfit("twice").within(Counter(name for name, _ in pairs).most_common(1)[0][0])
    return named


def by_name(kind: Any) -> Read:
    """Reads a dataclass from an object, which has every field without a default, and no unknown field."""
    readers = {name: reader_of(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
    required = {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}

    def read(value: Any) -> Any:
        given = _object(value).keys()
        for problem, names in (("unknown", given - readers), ("missing", required - given)):
            if names:
                raise Misfit(problem).within(min(names))
        return kind(**located({name: (readers[name], one) for name, one in value.items()}))

    return read


def by_place(kind: Any) -> Read:
    """Reads a dataclass from the list of its fields."""
    hints, names = get_type_hints(kind, include_extras=True), [one.name for one in fields(kind)]
    make = (
        kind
        if len(kind.__match_args__) == len(names)
        else lambda *values: kind(**dict(zip(names, values, strict=True)))
    )
    return fields_of([hints[name] for name in names], make)


@cache
def reader_of(hint: Any, read_fields: Callable[[Any], Read] = by_name) -> Read:
    """Makes the function that reads a type. read_fields: makes the function for a dataclass."""
    if isinstance(hint, NewType):
        return reader_of(hint.__supertype__, read_fields)
    if is_dataclass(hint):
        return read_fields(hint)
    if isinstance(hint, type) and issubclass(hint, tuple):
        return fields_of(get_type_hints(hint, include_extras=True).values(), hint)
    origin, options = get_origin(hint), get_args(hint)
    if origin is Annotated:
        read_plain = reader_of(options[0], read_fields)
        return _checked(read_plain, options[1]) if callable(options[1]) else read_plain
    if origin in (Union, UnionType):
        readers = [reader_of(option, read_fields) for option in options if option is not NoneType]
        read_present = _any_of(readers) if len(readers) > 1 else readers[0]
        return read_present if len(readers) == len(options) else _none_or(read_present)
    if origin is Literal or isinstance(hint, EnumMeta):
        return _one_of({option: option for option in options} or {one.value: one for one in hint})
    if origin in (dict, Mapping):
        return _dict_of(reader_of(options[1], read_fields))
    if origin is not None:
        return list_of(reader_of(options[0], read_fields), tuple if origin is tuple else list)
    return _plain(hint)


def fields_of(hints: Iterable[Any], make: Callable[..., Any]) -> Read:
    """Reads a list of values, one for each type, and passes them to `make`."""
    readers = [reader_of(hint, by_place) for hint in hints]
    kinds = [*map(_reader_to_type.get, readers)]

    def read(value: Any) -> Any:
        if type(value) is list and [*map(type, value)] == kinds:
            return make(*value)
        if not isinstance(value, list) or len(value) != len(readers):
            raise wrong(f"a list of {len(readers)}", value)
        return make(*(read(one) for read, one in zip(readers, value, strict=True)))

    return read


def list_of(read_item: Read, make: Callable[[list[Any]], Any] = list) -> Read:
    """Reads a list of values of one type."""
    kinds = {_reader_to_type.get(read_item)}

    def read(value: Any) -> Any:
        if type(value) is list and {*map(type, value)} <= kinds:
            return make(value)
        try:
            return make([read_item(one) for one in _list(value)])
        except Misfit:
            return located({index: (read_item, one) for index, one in enumerate(_list(value))})

    return read


def located(parts: Mapping[Any, tuple[Read, Any]]) -> dict[Any, Any]:
    """Reads values under their names or indices. Raises Misfit with the place in its path."""
    values = {}
    for place, (read, value) in parts.items():
        try:
            values[place] = read(value)
        except Misfit as misfit:
            raise misfit.within(place) from None
    return values


def _set_fields(part: Any) -> Any:
    """Returns the fields of a dataclass that differ from their defaults, or the value of an enum."""
    return (
        {
            one.name: value
            for one in fields(part)
            if (value := getattr(part, one.name))
            != (one.default if one.default_factory is MISSING else one.default_factory())
        }
        if is_dataclass(part)
        else part.value
    )


def _dict_of(read_item: Read) -> Read:
    return lambda value: located({name: (read_item, one) for name, one in _object(value).items()})


def _checked(read_plain: Read, check: Callable[[Any], None]) -> Read:
    def read(value: Any) -> Any:
        check(known := read_plain(value))
        return known

    return read


def _none_or(read_present: Read) -> Read:
    return lambda value: None if value is None else read_present(value)


def _any_of(readers: Sequence[Read]) -> Read:
    """Reads a value as the first type that it fits.

    Raises the Misfit deepest inside the value; if no type got inside, a Misfit that names all types.
    """

    def read(value: Any) -> Any:
        misfits = []
        for read_one in readers:
            try:
                return read_one(value)
            except Misfit as misfit:
                misfits.append(misfit)
        if any(one.path for one in misfits):
            raise max(misfits, key=lambda one: len(one.path))
        raise wrong(" or ".join(one.expected for one in misfits), value)

    return read


def _one_of(choices: Mapping[Any, Any]) -> Read:
    def read(value: Any) -> Any:
        found = [choice for name, choice in choices.items() if type(value) is type(name) and value == name]
        if not found:
            raise wrong(f"one of {', '.join(map(str, choices))}", value)
        return found[0]

    return read


def _plain(kind: Any) -> Read:
    def read(value: Any) -> Any:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int and abs(value) < MAX_WHOLE_NUMBER:
            return float(value)
        raise wrong((_WORDS | _KINDS)[kind], value)

    _reader_to_type[read] = kind
    return read


_object, _list = _plain(dict), _plain(list)
