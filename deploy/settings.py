"""Tables of settings, as a TOML file or the command line gives them, to frozen dataclasses."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from deploy.byte_size import parse_bytes
from wire.errors import ConfigError

T = TypeVar("T")


def build(cls: type[T], table: Mapping[str, Any], where: str = "") -> T:
    """An instance of a dataclass, nested ones from nested tables; what is absent takes its default.

    A field whose name ends in `_bytes` may be given as text with a unit. Raises ConfigError for an unknown key or a
    value of another type, naming it.
    """
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in table:
        if key not in names:
            raise ConfigError(f"unknown setting {where}{key[:64]}; known here: {', '.join(names)}")
    return cls(**{key: _convert(hints[key], value, f"{where}{key}") for key, value in table.items()})


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables united; where both have a value, `over` has its way."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _convert(hint: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be a table, like [{name}]")
        return build(hint, value, f"{name}.")
    if name.endswith("_bytes") and isinstance(value, str):
        return parse_bytes(value)
    allowed = _types(hint)
    if type(value) not in allowed and not (float in allowed and type(value) is int):
        raise ConfigError(f"{name} must be {_describe(allowed)}, not {str(value)[:64]!r}")
    return value


def _types(hint: Any) -> tuple[type, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _describe(allowed: tuple[type, ...]) -> str:
    nouns = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return " or ".join(nouns[one] for one in allowed if one in nouns)
