"""The JSON schema that a grammar is built from: a request's schema, narrowed and never widened. Pure.

Keywords that constrain nothing are left out: annotations, and bounds at the ends of doubles.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from wire.errors import InvalidRequest
from wire.typed_reader import Misfit, located

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26]|0[48])00)"
_NO_FEBRUARY = "(0[13-9]|1[0-2])"
_DATE = f"({_YEAR}-({_NO_FEBRUARY}-[0-3][0-9]|02-([01][0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_TIME = r"[0-9]{2}:[0-9]{2}:[0-5][0-9](\.[0-9]{1,9})?([Zz]|[+-][0-9:]{5})"
_EXACT = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}[Tt]{_TIME}$", "time": f"^{_TIME}$"}
"""Patterns for formats where llguidance accepts too much: 29 February of any year, second 60, endless fractions."""
_LITERAL = ("const", "enum", "default", "example", "examples")
_NAMED = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_AT_ONCE = frozenset({"properties", "anyOf", "oneOf", "$ref"})
_SEVERAL = frozenset({"allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"})
_OPEN = frozenset({"additionalProperties", "patternProperties", "minProperties", "propertyNames"})
_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
"""Formats that llguidance knows; any other is an annotation."""
_FORMAT = re.compile(r'"format"\s*:\s*"([^"]*)"')
_UNHELD = frozenset(
    (
        *("$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "contains", "dependencies"),
        *("dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains", "not", "propertyNames"),
        *("then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
    )
)
"""Constraints that llguidance cannot express."""
_PLAIN = re.compile(r"\\[^bB]|\[\^?\]?(?:\\.?|[^\]\\])*\]?", re.DOTALL)
"""An escape or a character class in a pattern; an unclosed class reaches to the end."""
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[bB]")
_IDLE: Mapping[str, tuple[Any, ...]] = {
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
"""Values at which a keyword constrains nothing."""
_BESIDE: Mapping[str, tuple[str, ...]] = {
    "minContains": ("contains",),
    "maxContains": ("contains",),
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
}
"""Keywords that constrain nothing unless a keyword listed here is beside them."""
MAX_BOUND = (1 << 63) - 1024
"""Largest bound of whole numbers that llguidance, which keeps it as a double, tells from the end of int64."""
_EDGES = dict.fromkeys(("maximum", "exclusiveMaximum"), MAX_BOUND) | dict.fromkeys(
    ("minimum", "exclusiveMinimum"), -MAX_BOUND
)
_ENDS = ((1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64)
MAX_DOUBLE = 1e308


def has_own_format(source: str) -> bool:
    """Whether a schema, as JSON, has a format that no grammar expresses."""
    if _FORMATS.issuperset(_FORMAT.findall(source)):
        return False
    try:
        schema = json.loads(source)
        return isinstance(schema, dict) and _mapped(schema, _known) != schema
    except (ValueError, RecursionError):
        return False


def exact_schema(schema: Mapping[str, Any], param: str = "response_format") -> dict[str, Any]:
    """Returns a schema with patterns in place of formats; objects that list properties take no further properties.

    Each value valid under it is valid under the given schema, too. Raises InvalidRequest, naming the request's field
    `param`, for a schema nested too deeply, and for a constraint that no grammar can express.
    """
    try:
        read = _close if not any(map(_is_composed, _objects(schema))) else dict
        refer = _referred if not any("$id" in one for one in _objects(schema)) else dict
        return _mapped(schema, lambda one: read(_patterned(_bounded(refer(_held(one))))))
    except Misfit as misfit:
        raise InvalidRequest(param, f"{misfit.under('')}: {misfit}") from misfit
    except RecursionError as error:
        raise InvalidRequest(param, "the schema is nested too deeply") from error


def _mapped(schema: Mapping[str, Any], change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Returns a schema with a change applied to each schema in it."""

    def map_value(key: str, value: Any) -> Any:
        if key in _LITERAL or key.startswith("x-") or not isinstance(value, dict | list):
            return value
        if isinstance(value, dict) and key not in _NAMED:
            return _mapped(value, change)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        mapped = located({place: (partial(map_value, ""), one) for place, one in items})
        return mapped if isinstance(value, dict) else [*mapped.values()]

    return located({key: (partial(map_value, key), one) for key, one in change(schema).items()})


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yields each object in a schema: schemas, and objects that only look like schemas."""
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(one)


def _is_composed(schema: Mapping[str, Any]) -> bool:
    """Whether a value must match several schemas at once; closing one schema would exclude another's properties."""
    return bool(_SEVERAL.intersection(schema)) or len(_AT_ONCE.intersection(schema)) > 1


def _known(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema without its format, if llguidance does not know it."""
    return {name: one for name, one in schema.items() if name != "format" or str(one) in _FORMATS}


def _referred(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema itself. Raises Misfit for a reference to another document."""
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref[:1] not in "#":
        raise Misfit("points outside the schema").within("$ref")
    return {**schema}


def _held(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema without keywords that constrain nothing. Raises Misfit if no grammar can express it."""
    held = {
        name: one
        for name, one in _known(schema).items()
        if one not in _IDLE.get(name, ()) and not schema.keys().isdisjoint(_BESIDE.get(name, (name,)))
    }
    for name, one in held.items():
        looks = name == "pattern" and isinstance(one, str) and _LOOKS_AROUND.search(_PLAIN.sub("x", one))
        if name in _UNHELD or looks:
            raise Misfit("is a constraint that no grammar can hold").within(name)
    return held


def _bounded(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema of numbers with bounds that a grammar can express. Raises Misfit for other bounds.

    Whole numbers are bounded 1,024 before the ends of int64. For other numbers a bound at the ends of int64 or of
    doubles is left out. A bound that leaves no number fits no grammar.
    """
    kinds = schema.get("type")
    is_whole = kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds and "number" not in kinds)
    is_outward = {
        name: one * _EDGES[name] > 0
        for name, one in schema.items()
        if name in _EDGES and type(one) in (int, float) and abs(one) > MAX_BOUND
    }
    for name in is_outward:
        is_end = is_whole or abs(schema[name]) in _ENDS or abs(schema[name]) >= MAX_DOUBLE
        if not (is_end and is_outward[name]):
            raise Misfit("is a bound beyond 2^63, which no grammar can hold").within(name)
    edges = {name: _EDGES[name] for name in is_outward}
    return {name: edges.get(name, one) for name, one in schema.items() if is_whole or name not in edges}


def _close(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an object's schema, closed to unlisted properties if it lists some and does not mention others."""
    listed, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, dict) or not isinstance(required, list) or _OPEN.intersection(schema):
        return {**schema}
    return {**schema, "additionalProperties": False} if all(one in listed for one in required) else {**schema}


def _patterned(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema with the pattern of its format, besides its own pattern, if any."""
    given = schema.get("format")
    pattern = _EXACT.get(given) if isinstance(given, str) else None
    if pattern is None:
        return schema
    if "pattern" not in schema:
        return {**schema, "pattern": pattern}
    more = schema.get("allOf", [])
    return {**schema, "allOf": [*more, {"pattern": pattern}]} if isinstance(more, list) else schema
