import datetime
import json
from collections.abc import Mapping
from itertools import product
from typing import TypeVar

import pytest
from llguidance import LLTokenizer

from text import child_processes
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


async def test_a_schema_too_wide_behind_its_first_bracket_is_refused_before_a_worker_has_it() -> None:
    processes = GrammarProcesses()
    wide = json.dumps({"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(700)}})
    try:
        with pytest.raises(InvalidRequest, match="cannot be answered"):
            await processes.check(ResponseFormat(FormatKind.JSON_SCHEMA, wide))
    finally:
        await processes.close()
