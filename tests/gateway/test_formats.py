"""Response formats of a body: each form that clients send, as the router gets it, and the forms that are refused."""

import json
from typing import Any

import pytest

from baton.request import make_request
from gateway import fields, formats
from gateway.chat import ChatDialect
from gateway.completions import CompletionsDialect
from text.byte_tokenizer import ByteTokenizer
from text.grammar import new_matcher
from wire.convert import sampling_from_pb
from wire.errors import InvalidRequest
from wire.sampling import FormatKind, ResponseFormat

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}
SOURCE = json.dumps(SCHEMA, ensure_ascii=False)
TOOL = {"type": "function", "function": {"name": "look"}}


def format_of(body: dict[str, Any]) -> ResponseFormat | None:
    """Reads a body of each dialect; returns the format as workers get it."""
    found = []
    for dialect, prompt in ((CompletionsDialect(), {"prompt": "a"}), (ChatDialect(), {"messages": [TURN]})):
        taken = fields.take({**prompt, **body}, dialect.fields)
        (first,) = dialect.take_prompts(taken)
        formats.take_format(taken, dialect.sent)
        found.append(sampling_from_pb(make_request(first, taken).sampling_params).response_format)  # type: ignore[arg-type]
    assert found[0] == found[1]
    return found[0]


TURN = {"role": "user", "content": "a"}
TAKEN: list[tuple[dict[str, Any], FormatKind, str]] = [
    ({"response_format": {"type": "json_object"}}, FormatKind.JSON_SCHEMA, '{"type": "object"}'),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}},
        FormatKind.JSON_SCHEMA,
        SOURCE,
    ),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, FormatKind.JSON_SCHEMA, SOURCE),
    (
        {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
        FormatKind.JSON_SCHEMA,
        SOURCE,
    ),
    ({"structured_outputs": {"json": SCHEMA}}, FormatKind.JSON_SCHEMA, SOURCE),
    ({"structured_outputs": {"json": SOURCE, "regex": None}}, FormatKind.JSON_SCHEMA, SOURCE),
    ({"structured_outputs": {"json_object": True}}, FormatKind.JSON_SCHEMA, '{"type": "object"}'),
    ({"structured_outputs": {"regex": "a|b"}}, FormatKind.REGEX, "a|b"),
    ({"structured_outputs": {"choice": ["a", 'b"\n']}}, FormatKind.LARK, 'start: "a" | "b\\"\\n"'),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, FormatKind.LARK, 'start: "a"'),
    ({"guided_json": SCHEMA}, FormatKind.JSON_SCHEMA, SOURCE),
    ({"guided_json": SOURCE}, FormatKind.JSON_SCHEMA, SOURCE),
    ({"guided_regex": "[0-9]+"}, FormatKind.REGEX, "[0-9]+"),
    ({"guided_choice": ["yes", "no"]}, FormatKind.LARK, 'start: "yes" | "no"'),
    ({"guided_grammar": 'start: "a"', "guided_json": None}, FormatKind.LARK, 'start: "a"'),
]


@pytest.mark.parametrize(("body", "kind", "source"), TAKEN, ids=lambda value: str(value)[:40])
def test_each_form_reaches_workers(body: dict[str, Any], kind: FormatKind, source: str) -> None:
    assert format_of(body) == ResponseFormat(kind, source)


@pytest.mark.parametrize("body", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}], ids=str)
def test_any_text_is_no_format(body: dict[str, Any]) -> None:
    assert format_of(body) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "json_shema": 1}}, "response_format.json_shema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": {"a": "\ud800"}}, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
    ids=str,
)
def test_forms_that_are_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        format_of(body)
    assert refused.value.ids["param"] == param


def test_a_choice_is_one_of_the_texts_whatever_is_in_them() -> None:
    from llguidance import LLTokenizer

    tokenizer = LLTokenizer(ByteTokenizer().definition, eos_token=256)
    texts = ["yes", 'a "quoted" one', "a\nb\\n", "/i", "größer", "\U0001f600", "\x00", "<|end|>", "%json {}"]
    given = format_of({"guided_choice": texts})
    assert given is not None
    for text in texts:
        matcher = new_matcher(given, tokenizer)
        assert matcher.consume_tokens(list(text.encode()))
        assert matcher.is_accepting()
    assert not new_matcher(given, tokenizer).consume_tokens(list(b"yes, no"))
