"""A JSON object from a model folder, read field by field with types and bounds."""

import json
from collections.abc import Callable, ItemsView, Mapping
from typing import Any

from wire.errors import ModelError

MAX_COUNT = 1 << 31


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object; ValueError if it names a key twice."""
    named = dict(pairs)
    if len(named) != len(pairs):
        raise ValueError("a key occurs twice")
    return named


def parse_object(
    data: bytes, source: str, make_object: Callable[[list[tuple[str, Any]]], dict[str, Any]] = dict
) -> dict[str, Any]:
    """Parses an object; `source` names it in errors. Raises ModelError for anything else.

    make_object: `distinct` refuses objects, nested ones included, that name a key twice.
    """
    try:
        parsed = json.loads(data, object_pairs_hook=make_object)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{source} is not valid JSON") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{source} is not a JSON object")
    return parsed


class JsonFields:
    """Typed reads from a JSON object. A field that is absent or null has the default; a wrong one raises ModelError."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def items(self) -> ItemsView[str, Any]:
        return self._values.items()

    def raw(self, name: str) -> Any:
        """Reads a field as JSON gave it, None where absent."""
        return self._values.get(name)

    def wrong(self, name: str, expected: str) -> ModelError:
        """Makes the error for a wrong field."""
        found = "is missing" if name not in self else f"is {str(self._values[name])[:64]}"
        return ModelError(f"{self._source}: {name} {found}, expected {expected}")

    def count(self, name: str, default: int | None = None, most: int = MAX_COUNT, least: int = 1) -> int:
        """Reads an integer from `least` to `most`; required where there is no default."""
        value = self._or(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float, default: float | None = None) -> float:
        """Reads a number from `least` to `most`, as the int or float that it is; required where there is no default."""
        value = self._or(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.wrong(name, f"a number from {least:g} to {most:g}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._or(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._or(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def section(self, name: str) -> "JsonFields":
        """Reads the object of that name, empty where absent."""
        value = self._or(name, {})
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return JsonFields(value, f"{self._source}: {name}")

    def _or(self, name: str, default: Any) -> Any:
        return self._values[name] if name in self else default
