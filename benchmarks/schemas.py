"""JSON schemas drawn from the features of the specification (2020-12), strings, arrays and objects bounded. Pure."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

Schema = dict[str, Any]
WORDS = ("name", "age", "city", "tags", "price", "größe", "a b", 'with "quotes"', "x/y", "日付")
PATTERNS = ("^[A-Z]{2}-[0-9]{1,4}$", "^(red|green|blue)$", "^[a-z]{1,8}$", r"^\d{3}\.\d{2}$", "^[^@ ]{1,6}@[a-z]{1,6}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -12,
    3.5,
    "",
    "yes",
    "naïve",
    'a "b" \\ c',
    "a\nb",
    [],
    [1, "a"],
    {},
    {"k": [None, 2]},
)
MAX_DEPTH = 3


def draw_schema(draw: random.Random) -> Schema:
    """Draws a schema of an object, with definitions that it may refer to."""
    definitions = {name: _leaf(draw) for name in ("first", "second")}
    return {"$defs": definitions, **_object(draw, 0), "title": "Answer"}


def features(schema: object) -> set[str]:
    """Returns the keywords of a schema, and its types and formats."""
    if isinstance(schema, list):
        return set().union(*map(features, schema))
    if not isinstance(schema, dict):
        return set()
    named = {f"{key} {value}" for key, value in schema.items() if key in ("type", "format") and isinstance(value, str)}
    below = [
        part
        for key, value in schema.items()
        if key not in ("const", "enum", "default")
        for part in (value.values() if key in ("properties", "$defs") else [value])
    ]
    return {*schema, *named}.union(*map(features, below)) - {"title"}


def _any(draw: random.Random, depth: int) -> Schema:
    if depth >= MAX_DEPTH or draw.random() < 0.4:
        return _leaf(draw)
    return draw.choice(_COMPOSITES)(draw, depth)


def _leaf(draw: random.Random) -> Schema:
    made = draw.choice(_LEAVES)(draw)
    return {**made, "description": "What it is.", "default": None} if draw.random() < 0.1 else made


def _string(draw: random.Random) -> Schema:
    least = draw.choice((0, 0, 1, 3))
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(1, 12)}


def _integer(draw: random.Random) -> Schema:
    low = draw.randint(-1000, 1000)
    high = low + draw.choice((1, 5, 40, 10_000))
    lower = {draw.choice(("minimum", "exclusiveMinimum")): low}
    step = {"multipleOf": draw.choice((1, 2))} if draw.random() < 0.2 else {}
    return {"type": "integer", **lower, "maximum": high, **step}


def _number(draw: random.Random) -> Schema:
    low = draw.uniform(-10, 10)
    step = {"multipleOf": draw.choice((0.5, 0.01))} if draw.random() < 0.5 else {}
    upper = {draw.choice(("maximum", "exclusiveMaximum")): round(low, 2) + draw.choice((1, 100))}
    return {"type": "number", "minimum": round(low, 2), **upper, **step}


def _pattern(draw: random.Random) -> Schema:
    return {"type": "string", "pattern": draw.choice(PATTERNS)}


def _format(draw: random.Random) -> Schema:
    return {"type": "string", "format": draw.choice(FORMATS)}


def _enum(draw: random.Random) -> Schema:
    return {"enum": draw.sample(VALUES, draw.randint(1, 5))}


def _const(draw: random.Random) -> Schema:
    return {"const": draw.choice(VALUES)}


def _nullable(draw: random.Random) -> Schema:
    return {"type": draw.choice((["boolean", "null"], ["string", "null"], ["integer", "boolean"])), **_BOUNDS}


def _narrowed(_: random.Random) -> Schema:
    return {"allOf": [{"type": "integer", "minimum": 0}, {"maximum": 20}, {"exclusiveMinimum": 3}]}


def _plain(kind: str, _: random.Random) -> Schema:
    return {"type": kind}


def _reference(draw: random.Random, _: int) -> Schema:
    return {"$ref": f"#/$defs/{draw.choice(('first', 'second'))}"}


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(WORDS, draw.randint(0 if depth else 1, 4))
    properties = {name: _any(draw, depth + 1) for name in names}
    required = [name for name in names if draw.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    bounds = {"minItems": least, "maxItems": least + draw.randint(0, 2)}
    return {"type": "array", "items": _any(draw, depth + 1), **bounds}


def _tuple(draw: random.Random, depth: int) -> Schema:
    first = [_any(draw, depth + 1) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}


def _any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(draw, depth + 1) for _ in range(draw.randint(2, 3))]}


def _one_of(draw: random.Random, depth: int) -> Schema:
    """Draws cases that a constant tells apart."""
    cases = [_object(draw, depth + 1) for _ in range(2)]
    for kind, case in zip(("cat", "dog"), cases, strict=True):
        case["properties"] = {"kind": {"const": kind}, **case["properties"]}
        case["required"] = ["kind", *case["required"]]
    return {"oneOf": cases}


_BOUNDS = {"maxLength": 8, "minimum": -9, "maximum": 9}
_LEAVES: tuple[Callable[[random.Random], Schema], ...] = (
    *(partial(_plain, "boolean"), partial(_plain, "null")),
    *(_string, _string, _integer, _integer, _number, _pattern, _format, _enum, _const, _nullable, _narrowed),
)
_COMPOSITES: tuple[Callable[[random.Random, int], Schema], ...] = (
    *(_object, _object, _array, _array, _tuple, _any_of, _one_of, _reference),
)
