"""A JSON object from a model folder, read field by field with types and bounds."""

import json
from collections.abc import Callable, ItemsView, Mapping
from typing import Annotated, Any

from wire.errors import ModelError
from wire.typed_reader import Between, Misfit, reader_of

MAX_COUNT = 1 << 31


def parse_object(data: bytes, source: str, parse: Callable[[bytes], Any] = json.loads) -> dict[str, Any]:
    """Parses an object; `source` names it in errors. Raises ModelError for anything else.

    parse: with `wire.typed_reader.once` as its hook, objects that name a key twice are refused, nested ones included.
    """
    try:
        parsed = parse(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{source} is not valid JSON") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{source} is not a JSON object")
    return parsed


class JsonFields:
    """Typed reads from a JSON object. A field that is absent or null has the default. Raises ModelError for a wrong
    field.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source
        self._read_names = set[str]()

    @property
    def unread(self) -> set[str]:
        """Names of the fields, not null, that nothing has asked for."""
        return {name for name, value in self._values.items() if value is not None} - self._read_names

    def __contains__(self, name: str) -> bool:
        self._read_names.add(name)
        return self._values.get(name) is not None

    def items(self) -> ItemsView[str, Any]:
        return self._values.items()

    def raw(self, name: str) -> Any:
        """Returns a field's parsed value, None where absent."""
        self._read_names.add(name)
        return self._values.get(name)

    def wrong(self, name: str, expected: str) -> ModelError:
        """Makes the error for a wrong field."""
        found = "is missing" if name not in self else f"is {str(self._values[name])[:64]}"
        return ModelError(f"{self._source}: {name} {found}, expected {expected}")

    def count(self, name: str, default: int | None = None, most: int = MAX_COUNT, least: int = 1) -> int:
        """Reads an integer from `least` to `most`; required where there is no default."""
        expected = f"an integer from {least} to {most}"
        return int(self._read(name, Annotated[int, Between(least, most)], default, expected))

    def number(self, name: str, least: float, most: float, default: float | None = None) -> float:
        """Reads an int or float from `least` to `most`; required where there is no default."""
        expected = f"a number from {least:g} to {most:g}"
        found: float = self._read(name, Annotated[int | float, Between(least, most)], default, expected)
        return found

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._read(name, bool, default, "true or false"))

    def text(self, name: str, default: str) -> str:
        return str(self._read(name, str, default, "a string"))

    def section(self, name: str) -> "JsonFields":
        """Reads a nested object by name, empty where absent."""
        return JsonFields(self._read(name, dict, {}, "an object"), f"{self._source}: {name}")

    def _read(self, name: str, kind: Any, default: Any, expected: str) -> Any:
        try:
            return reader_of(kind)(self._values[name] if name in self else default)
        except Misfit as misfit:
            raise self.wrong(name, expected) from misfit
