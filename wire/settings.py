"""Frozen dataclasses of settings, nested as deep as may be, to JSON and strictly back."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from wire.errors import ConfigError

T = TypeVar("T")
MAX_WHOLE_NUMBER = 1 << 64
"""Larger ones are no seconds or shares of anything."""


def to_json(settings: Any) -> str:
    return json.dumps(asdict(settings))


def from_json(cls: type[T], text: str, where: str) -> T:
    """Settings of that class. ConfigError for what is missing, unknown or of another type, by its path from `where`."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON") from error
    return from_object(cls, raw, where)


def from_object(cls: type[T], raw: object, path: str) -> T:
    """The same from nested mappings; `path` is where they stand."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path}: must be an object")
    hints = get_type_hints(cls)
    required = {one.name for one in fields(cls) if one.default is MISSING and one.default_factory is MISSING}  # type: ignore[arg-type]
    for problem, names in (("unknown", set(raw) - set(hints)), ("missing", required - set(raw))):
        if names:
            raise ConfigError(f"{path}.{min(names)[:64]}: {problem}")
    return cls(**{name: _read_value(hints[name], value, f"{path}.{name}") for name, value in raw.items()})


def _read_value(hint: Any, value: object, path: str) -> object:
    if is_dataclass(hint) and isinstance(hint, type):
        return from_object(hint, value, path)
    allowed = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if type(value) in allowed:
        return value
    if float in allowed and type(value) is int and abs(value) < MAX_WHOLE_NUMBER:
        return float(value)
    raise ConfigError(f"{path}: must be {' or '.join(one.__name__ for one in allowed if one is not NoneType)}")
