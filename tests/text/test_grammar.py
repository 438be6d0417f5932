import datetime
import json
from collections.abc import Mapping
from itertools import product
from typing import TypeVar

import pytest
from llguidance import LLMatcher, LLTokenizer

from text import child_processes
from text.exact_schema import has_own_format
from text.grammar import GrammarProcesses, new_matcher
from wire.errors import InvalidRequest, Unsupported
from wire.sampling import FormatKind, ResponseFormat

T = TypeVar("T")


async def test_grammars_are_built_first_in_a_process_that_may_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_processes, "MAX_WAIT_S", 60.0)  # its processor time ends it, not the clock
    processes = GrammarProcesses()
    try:
        await processes.check(ResponseFormat(FormatKind.REGEX, "yes|no"))
        with pytest.raises(InvalidRequest, match="cannot be built"):
            await processes.check(ResponseFormat(FormatKind.REGEX, "("))
        with pytest.raises(InvalidRequest, match="cannot be answered"):
            await processes.check(ResponseFormat(FormatKind.JSON_SCHEMA, '{"$ref": "#"}'))
        wide = "|".join(f"word{number}x" for number in range(400_000))
        with pytest.raises(InvalidRequest, match="too long"):
            await processes.check(ResponseFormat(FormatKind.REGEX, wide))
        await processes.check(ResponseFormat(FormatKind.LARK, 'start: "a"'))
    finally:
        await processes.close()


async def test_without_the_library_a_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    processes = GrammarProcesses()
    with pytest.raises(Unsupported, match="llguidance"):
        await processes.check(ResponseFormat(FormatKind.REGEX, "a"))
    await processes.close()


def taken(schema: Mapping[str, object], values: list[T]) -> list[T]:
    """The values that a schema's grammar takes."""
    start = new_matcher(ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps(schema)), LLTokenizer("byte"))
    found = []
    for value in values:
        matcher, text = start.deep_copy(), [*json.dumps(value).encode()]
        if matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting():
            found.append(value)
    return found


def is_date(value: str) -> bool:
    try:
        return bool(datetime.date.fromisoformat(value))
    except ValueError:
        return False


def test_dates_are_of_the_calendar_and_minutes_have_sixty_seconds() -> None:
    years = (0, 1, 4, 80, 96, 100, 400, 1000, 1900, 2000, 2023, 2024, 2100, 8000, 9999)
    dates = [f"{y:04}-{m:02}-{d:02}" for y, m, d in product(years, range(14), (0, 1, 28, 29, 30, 31, 32))]
    date = {"type": "string", "format": "date"}
    assert taken(date, dates) == [one for one in dates if is_date(one)]
    assert taken({**date, "pattern": "^20"}, ["2024-02-29", "1996-02-29", "2023-02-29"]) == ["2024-02-29"]
    times = ["23:59:59Z", "23:59:60Z", "00:00:00.5+01:00", "00:00:60.5+01:00", "00:00:01z", f"00:00:01.{'0' * 10}Z"]
    assert taken({"type": "string", "format": "time"}, times) == times[::2]
    instants = [f"2024-02-29T{one}" for one in times] + ["2023-02-29T00:00:00Z"]
    assert taken({"type": "string", "format": "date-time"}, instants) == instants[:5:2]


def test_objects_that_list_properties_have_no_others() -> None:
    listed = {"type": "object", "properties": {"a": {"type": "integer"}}}
    one, two = {"a": 1}, {"a": 1, "b": 2}
    assert taken(listed, [one, two]) == [one]
    assert taken({"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}], "$defs": {"x": listed}}, [one, two]) == [one]
    assert taken({"type": "object", "properties": {"properties": listed}}, [{"properties": one}]) == [
        {"properties": one}
    ]
    for free in (
        {"type": "object"},
        {**listed, "additionalProperties": {"type": "integer"}},
        {**listed, "required": ["a", "b"]},
        {**listed, "allOf": [{"properties": {"b": {"type": "integer"}}}]},
        {**listed, "$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "properties": {"b": {"type": "integer"}}}}},
    ):
        assert two in taken(free, [two]), free


FORMATS = (
    *(
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "idn-email",
        "idn-hostname",
        "int32",
        "ipv4",
        "ipv6",
        "iri",
    ),
    *("iri-reference", "json-pointer", "regex", "relative-json-pointer", "time", "unknown", "uri", "uri-reference"),
    *("uri-template", "url", "uuid", "x-phone"),
)


def is_built_as_it_is(schema: Mapping[str, object]) -> bool:
    """Whether llguidance itself has a grammar for a schema."""
    return not LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(json.dumps(schema))).is_error()


def test_a_format_that_no_grammar_holds_is_an_annotation() -> None:
    for name in FORMATS:
        schema = {"type": "string", "format": name}
        is_held = is_built_as_it_is(schema)
        assert has_own_format(json.dumps({"properties": {"a": schema}})) is not is_held, name
        assert is_held or taken(schema, ["a", 1]) == ["a"]
    assert taken({"type": "integer", "format": "int64"}, [1, "a"]) == [1]
    assert taken({"properties": {"format": {"type": "integer"}}, "required": ["format"]}, [{"format": 1}, {}]) == [
        {"format": 1}
    ]


def test_words_that_constrain_nothing_are_left_out() -> None:
    record = {"type": "object", "additionalProperties": {"type": "integer"}}
    for names in ({"type": "string"}, {}, True):
        assert taken({**record, "propertyNames": names}, [{"a": 1}, {"a": "b"}]) == [{"a": 1}]
    assert taken({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, [[1, 1], ["a"]]) == [[1, 1]]
    described = {"x-rules": {"if": 1, "not": 2}, "example": {"not": 1}, "nullable": False, "deprecated": True}
    assert taken({"type": "integer", **described}, [1, "a"]) == [1]


@pytest.mark.parametrize(
    "alone",
    [{"minContains": 1}, {"maxContains": 1}, {"then": {"not": {}}}, {"else": False}, {"if": {"not": {}}}],
    ids=str,
)
def test_a_word_without_the_one_that_it_belongs_to_is_left_out(alone: dict[str, object]) -> None:
    assert taken({"items": {"type": "integer", **alone}, "type": "array"}, [[1], ["a"]]) == [[1]]


def test_a_value_with_a_name_of_a_schema_is_no_schema() -> None:
    value = {"format": "phone", "$ref": "https://example.com", "pattern": r"\b"}
    for schema in ({"const": value}, {"enum": [value]}, {"items": {"default": value}}, {"examples": [value]}):
        assert not has_own_format(json.dumps(schema)), schema
        assert value in taken(schema, [value]) or "items" in schema, schema
    for own in ({"properties": {"enum": {"format": "phone"}}}, {"default": {}, "items": {"format": "phone"}}):
        assert has_own_format(json.dumps(own)), own
    assert not has_own_format('["format": "phone"')


def test_bounds_at_the_ends_of_numbers_are_no_constraint() -> None:
    low, high, safe = -(1 << 63), (1 << 63) - 1, (1 << 53) - 1
    numbers = [low, -safe, -1, 0, 1, safe, high]
    inner = [low + 1024, high - 1023]
    for bounds, least in (
        ({"minimum": low, "maximum": high}, None),
        ({"exclusiveMinimum": low}, None),
        ({"minimum": -1e308, "maximum": 1e308}, None),
        ({"minimum": 0, "maximum": (1 << 64) - 1}, 0),
        ({"minimum": 1, "maximum": 1e308}, 1),
    ):
        for kinds in ("integer", ["integer", "null"]):
            fit = [one for one in (*numbers[1:-1], *inner) if least is None or one >= least]
            assert taken({"type": kinds, **bounds}, [*numbers[1:-1], *inner]) == fit, bounds
    assert taken({"type": "integer", "minimum": -safe, "maximum": safe}, numbers) == numbers[1:-1]
    for bounds in ({"minimum": -1e308, "maximum": 1e308}, {"minimum": low, "maximum": high}, {"maximum": 1.7e308}):
        assert taken({"type": "number", **bounds}, [1.5, -3, "a"]) == [1.5, -3]


UNHELD: list[tuple[dict[str, object], str]] = [
    ({"uniqueItems": True}, "uniqueItems"),
    ({"propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({"properties": {"a": {"anyOf": [{"type": "null"}, {"contains": {}}]}}}, "properties.a.anyOf[1].contains"),
    ({"properties": {"not": {"not": {}}}}, "properties.not.not"),
    ({"items": {"pattern": r"^(?!\.)a"}}, "items.pattern"),
    ({"items": {"pattern": r"a(?<=b)"}}, "items.pattern"),
    ({"type": "number", "maximum": 1e30}, "maximum"),
    ({"items": {"pattern": r"a\b"}}, "items.pattern"),
    ({"items": {"pattern": r"\\\Ba"}}, "items.pattern"),
    ({"items": {"pattern": r"[]\](](?=a)"}}, "items.pattern"),
    ({"items": {"type": "integer", "minimum": 1 << 64}}, "items.minimum"),
    ({"items": {"type": "integer", "maximum": -(1 << 63)}}, "items.maximum"),
    ({"items": {"type": "number", "exclusiveMinimum": 1 << 63}}, "items.exclusiveMinimum"),
    ({"items": {"minimum": 1e308}}, "items.minimum"),
    ({"$defs": {"a": {"if": {}, "then": {}}}}, "$defs.a.if"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
]


@pytest.mark.parametrize(("schema", "path"), UNHELD, ids=lambda one: one if isinstance(one, str) else "")
def test_a_constraint_that_no_grammar_holds_is_refused_by_its_path(schema: dict[str, object], path: str) -> None:
    assert "$defs" in schema or not is_built_as_it_is(schema)
    with pytest.raises(InvalidRequest) as refused:
        taken(schema, [])
    assert refused.value.message.startswith(f"response_format: {path}: is a ")
    assert refused.value.message.endswith("no grammar can hold")


def test_a_parenthesis_that_is_escaped_or_in_a_class_looks_nowhere() -> None:
    assert taken({"type": "string", "pattern": r"^\(?!$"}, ["(!", "!", "a"]) == ["(!", "!"]
    assert taken({"type": "string", "pattern": "^[(?=]$"}, ["(", "?", "a"]) == ["(", "?"]
    assert taken({"type": "string", "pattern": r"^[^\](?=]$"}, ["a", "(", "]"]) == ["a"]
    assert taken({"type": "string", "pattern": r"^(\??=)\\b$"}, ["=\\b", "?=\\b", "b"]) == ["=\\b", "?=\\b"]


@pytest.mark.parametrize("ref", ["https://example.com/point.json", "point.json#/x"])
def test_a_reference_out_of_the_schema_is_refused_by_its_path(ref: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^response_format: items\.\$ref: points outside the schema$"):
        taken({"items": {"$ref": ref}}, [])
    named = {"$id": "https://example.com/", "$defs": {"x": {"$id": "point.json", "x": {"type": "null"}}}}
    assert taken({**named, "properties": {"a": {"$ref": "point.json#/x"}}}, [{"a": None}, {"a": 1}]) == [{"a": None}]


async def test_the_path_of_a_constraint_comes_back_from_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = GrammarProcesses()
    schema = ResponseFormat(FormatKind.JSON_SCHEMA, '{"properties": {"a": {"uniqueItems": true}}}')
    try:
        for sources, param in (({}, "response_format"), ({"tools[0].function.parameters": schema}, "tools[0]")):
            with pytest.raises(InvalidRequest, match=r"properties.a.uniqueItems: is a constraint") as refused:
                await processes.check(schema, sources)
            assert refused.value.ids["param"].startswith(param)
    finally:
        await processes.close()


async def test_a_schema_too_wide_behind_its_first_bracket_is_refused_before_a_worker_has_it() -> None:
    processes = GrammarProcesses()
    wide = json.dumps({"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(700)}})
    try:
        with pytest.raises(InvalidRequest, match="cannot be answered"):
            await processes.check(ResponseFormat(FormatKind.JSON_SCHEMA, wide))
    finally:
        await processes.close()
