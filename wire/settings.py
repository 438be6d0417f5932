"""Frozen dataclasses to JSON and strictly back: nested, enums by values, `tuple[X, ...]` as lists, dicts by text."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from wire.errors import ConfigError

T = TypeVar("T")
MAX_WHOLE_NUMBER = 1 << 64
"""Larger ones are no seconds or shares of anything."""


def to_json(settings: Any) -> str:
    return json.dumps(asdict(settings), default=attrgetter("value"))


def from_json(cls: type[T], text: str, where: str) -> T:
    """Reads settings of that class. Raises ConfigError for a missing, unknown, repeated or wrong key, by its path."""
    try:
        raw = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}") from error
    return from_object(cls, raw, where)


def from_object(cls: type[T], raw: object, path: str) -> T:
    """Reads the same from nested mappings; `path` is their place, "" at the root."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path}: must be an object")
    prefix = f"{path}." if path else ""
    hints = get_type_hints(cls)
    required = {one.name for one in fields(cls) if one.default is MISSING and one.default_factory is MISSING}  # type: ignore[arg-type]
    for problem, names in (("unknown", set(raw) - set(hints)), ("missing", required - set(raw))):
        if names:
            raise ConfigError(f"{prefix}{_shown(min(names))}: {problem}")
    return cls(**{name: _read_value(hints[name], value, f"{prefix}{name}") for name, value in raw.items()})


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Makes an object of its pairs. Raises ConfigError for a name that stands twice."""
    if pairs and (found := Counter(name for name, _ in pairs).most_common(1)[0])[1] > 1:
        raise ConfigError(f"{_shown(found[0])}: twice")
    return dict(pairs)


def _shown(key: str) -> str:
    """Returns the beginning of a key, on one line."""
    return repr(key[:64])[1:-1]


def _read_value(hint: Any, value: object, path: str) -> object:
    allowed = [
        getattr(one, "__supertype__", one) for one in (get_args(hint) if isinstance(hint, UnionType) else (hint,))
    ]
    if type(value) in allowed:
        return value
    if float in allowed and type(value) is int and abs(value) < MAX_WHOLE_NUMBER:
        return float(value)
    for one in allowed:
        if is_dataclass(one) and isinstance(one, type) and (isinstance(value, Mapping) or len(allowed) == 1):
            return from_object(one, value, path)
        if get_origin(one) is tuple and isinstance(value, list):
            return tuple(_read_value(get_args(one)[0], item, f"{path}.{index}") for index, item in enumerate(value))
        if get_origin(one) is dict and isinstance(value, Mapping):
            of_values = get_args(one)[1]
            return {key: _read_value(of_values, item, f"{path}.{_shown(key)}") for key, item in value.items()}
        if isinstance(one, type) and issubclass(one, Enum) and value in [member.value for member in one]:
            return one(value)
    raise ConfigError(f"{path}: must be {' or '.join(one.__name__ for one in allowed if one is not NoneType)}")
