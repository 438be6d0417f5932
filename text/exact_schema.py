"""A JSON schema as its grammar is built from it: narrowed to what models should write, never widened. Pure."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from wire.errors import InvalidRequest

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26]|0[48])00)"
_NO_FEBRUARY = "(0[13-9]|1[0-2])"
_DATE = f"({_YEAR}-({_NO_FEBRUARY}-[0-3][0-9]|02-([01][0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_TIME = r"[0-9]{2}:[0-9]{2}:[0-5][0-9](\.[0-9]{1,9})?([Zz]|[+-][0-9:]{5})"
_EXACT = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}[Tt]{_TIME}$", "time": f"^{_TIME}$"}
"""Patterns of formats that llguidance takes too much for: 29 February of any year, second 60, fractions without end."""
_LITERAL = ("const", "enum", "default", "examples")
_NAMED = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_AT_ONCE = frozenset({"properties", "anyOf", "oneOf", "$ref"})
_SEVERAL = frozenset({"allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"})
_OPEN = frozenset({"additionalProperties", "patternProperties", "minProperties", "propertyNames"})


def exact_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema with patterns of its formats and, where its objects list their properties, without further ones.

    Each value of the returned schema is one of the given schema, too. Raises InvalidRequest for one nested too deeply.
    """
    try:
        read = _close if not any(map(_is_composed, _objects(schema))) else dict
        return _mapped(schema, lambda one: read(_patterned(one)))
    except RecursionError as error:
        raise InvalidRequest("response_format", "the schema is nested too deeply") from error


def _mapped(schema: Mapping[str, Any], change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Returns a schema with a change of each schema in it."""

    def map_value(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [map_value("", one) for one in value]
        if not isinstance(value, dict):
            return value
        return {name: map_value("", one) for name, one in value.items()} if key in _NAMED else _mapped(value, change)

    return {key: one if key in _LITERAL else map_value(key, one) for key, one in change(schema).items()}


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yields each object in a schema: schemas, and what only looks like one."""
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(one)


def _is_composed(schema: Mapping[str, Any]) -> bool:
    """Whether a value has to be in several schemas at once: one that is closed leaves out what another lists."""
    return bool(_SEVERAL.intersection(schema)) or len(_AT_ONCE.intersection(schema)) > 1


def _close(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema of an object without properties that it does not list, where it lists some and is silent."""
    listed, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, dict) or not isinstance(required, list) or _OPEN.intersection(schema):
        return {**schema}
    return {**schema, "additionalProperties": False} if all(one in listed for one in required) else {**schema}


def _patterned(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema with the pattern of its format, beside one that it may have."""
    given = schema.get("format")
    pattern = _EXACT.get(given) if isinstance(given, str) else None
    if pattern is None:
        return schema
    if "pattern" not in schema:
        return {**schema, "pattern": pattern}
    more = schema.get("allOf", [])
    return {**schema, "allOf": [*more, {"pattern": pattern}]} if isinstance(more, list) else schema
