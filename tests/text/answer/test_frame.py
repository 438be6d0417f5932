"""Grammars of answers: what each takes and refuses, with marks spelled and as tokens; parsers read what they take."""

import json
from typing import Any, ClassVar

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from tests.harness.checkpoints import byte_level_tokenizer
from text.answer.answer import AnswerParser
from text.answer.calls import CallBegun
from text.answer.formats import CALL_FORMATS, CHANNELS, AnswerFormats
from text.answer.frame import NO_FRAME, AnswerFrame, ToolUse
from text.byte_tokenizer import ByteTokenizer
from text.grammar import new_matcher
from text.tokenizer import Tokenizer
from wire.errors import InvalidRequest, Unsupported
from wire.sampling import FormatKind, ResponseFormat

A_NUMBER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: tuple[dict[str, Any], ...] = (
    {"type": "function", "function": {"name": "f", "parameters": A_NUMBER}},
    {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}},
)
REQUIRED, STRICT = ToolUse(TOOLS, required=True), ToolUse(TOOLS, strict=frozenset({"f"}))
NUMBER = ResponseFormat(FormatKind.JSON_SCHEMA, '{"type": "integer"}')
DATE = ResponseFormat(FormatKind.REGEX, r"\d+/\d+")
YES = ResponseFormat(FormatKind.LARK, 'start: word\nword: "yes" | "no"')
BYTES = LLTokenizer("byte")
F, G = ("f", '{"a": 1}'), ("g", '{"b": [2]}')
BAD = ("f", '{"b": 1}')


def frame_of(
    tool_format: str, use: ToolUse, prompt: str = "", channel: str = "", budget: int | None = None
) -> AnswerFrame:
    return AnswerFrame.behind(prompt, AnswerFormats(tool_format, channel), use, budget)


def written(tool_format: str, *calls: tuple[str, str], opened: bool = True) -> str:
    form = CALL_FORMATS[tool_format]
    made = form.between.join(f"{form.head(name)}{given}{form.tail}" for name, given in calls)
    return f"{form.opener if form.needs_opener and opened else ''}{form.lead}{made}{form.trail}"


def takes(frame: AnswerFrame, text: str, content: ResponseFormat | None = None) -> bool:
    """Whether an answer may be this text and end."""
    grammar = frame.grammar(content)
    assert grammar is not None
    matcher = new_matcher(grammar, BYTES)
    taken: int = matcher.try_consume_tokens([*text.encode()])
    return taken == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize("form", CALL_FORMATS)
def test_required_calls_are_all_of_an_answer(form: str) -> None:
    frame = frame_of(form, REQUIRED)
    for calls in ([F], [G], [F, G, F]):
        text = written(form, *calls)
        assert takes(frame, text)
        names = [
            one.name for one in AnswerParser(AnswerFormats(form), {"f", "g"}).feed(text) if isinstance(one, CallBegun)
        ]
        assert names == [name for name, _ in calls]
    assert not any(takes(frame, text) for text in ("", "hello", written(form, BAD), written(form, ("h", "{}"))))
    assert not takes(frame, f"{written(form, F)} more")
    only = frame_of(form, ToolUse(TOOLS, required=True, only="g", parallel=False))
    assert takes(only, written(form, G))
    assert not takes(only, written(form, F))
    assert not takes(only, written(form, G, G))


@pytest.mark.parametrize("declared", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_function_without_parameters_has_no_arguments_where_a_call_is_held(declared: dict[str, Any]) -> None:
    tools = ({"type": "function", "function": {"name": "g", **declared}},)
    for use in (ToolUse(tools, required=True), ToolUse(tools, strict=frozenset({"g"}))):
        assert takes(frame_of("qwen", use), written("qwen", ("g", "{}")))
        assert not takes(frame_of("qwen", use), written("qwen", G))
    assert takes(frame_of("qwen", ToolUse(tools, parallel=False)), written("qwen", G))


@pytest.mark.parametrize("form", CALL_FORMATS)
def test_a_strict_tool_is_text_or_calls(form: str) -> None:
    frame = frame_of(form, STRICT)
    assert all(
        takes(frame, text) for text in ("", "hello", written(form, F), written(form, F, G), written(form, ("g", "{}")))
    )
    assert not takes(frame, written(form, BAD))
    if CALL_FORMATS[form].needs_opener:
        assert takes(frame, f"Well. {written(form, G, F)}")
        assert not takes(frame, f"Well. {written(form, BAD)}")
    single = frame_of(form, ToolUse(TOOLS, frozenset({"f"}), parallel=False))
    assert takes(single, written(form, F))
    assert not takes(single, written(form, F, F))


@pytest.mark.parametrize("shape", ["{}", "```json\n{}\n```", "\n```{}```"])
@pytest.mark.parametrize("space", ["", "\n  "])
def test_a_call_without_marks_is_held_as_one_with_them(shape: str, space: str) -> None:
    def untagged(name: str, given: str) -> str:
        return shape.replace("{}", f'{{{space}"name": "{name}",{space}"arguments": {given}{space.rstrip(" ")}}}')

    frame, single = frame_of("qwen", STRICT), frame_of("qwen", ToolUse(TOOLS, parallel=False))
    for one in (frame, single):
        assert takes(one, untagged(*F))
        assert takes(one, untagged("h", "{}"))
        assert takes(one, f"See: {untagged(*BAD)}")
        assert not takes(one, f"{untagged(*F)}\n{untagged(*F)}")
    assert takes(single, untagged(*BAD))
    assert not takes(frame, untagged(*BAD))
    assert not takes(frame_of("qwen", REQUIRED), untagged(*F))
    parts = AnswerParser(AnswerFormats("qwen"), {"f", "g"}).feed(untagged(*F))
    assert [one.name for one in parts if isinstance(one, CallBegun)] == ["f"]


@pytest.mark.parametrize(("content", "right", "wrong"), [(NUMBER, "12", "a"), (DATE, "1/2", "1"), (YES, "yes", "yes.")])
def test_content_in_a_format_stands_beside_calls_and_behind_reasoning(
    content: ResponseFormat, right: str, wrong: str
) -> None:
    frame = frame_of("qwen", ToolUse(TOOLS))
    assert takes(frame, right, content)
    assert takes(frame, written("qwen", BAD), content)
    assert not takes(frame, wrong, content)
    thinks = frame_of("qwen", ToolUse(), "", "think")
    assert takes(thinks, right, content)
    assert takes(thinks, f"<think>\nso\n</think>\n\n{right}", content)
    assert not takes(thinks, f"<think>\nso\n</think>\n\n{wrong}", content)
    opened = frame_of("qwen", REQUIRED, "user: hi<think>\n", "think")
    assert opened.opening == "<think>"
    assert takes(opened, f"so</think>\n{written('qwen', F)}", content)
    assert not takes(opened, right, content)


@pytest.mark.parametrize("form", CALL_FORMATS)
def test_one_call_at_most_is_held_to_without_a_strict_tool(form: str) -> None:
    frame = frame_of(form, ToolUse(TOOLS, parallel=False))
    assert all(takes(frame, text) for text in ("", "hello", written(form, F), written(form, BAD)))
    assert not takes(frame, written(form, F, G))
    assert not takes(frame, f"{written(form, F)} more")
    assert frame_of(form, ToolUse(parallel=False)).grammar(None) is None


def test_an_answer_that_goes_on_with_a_message_is_in_its_channel_or_behind() -> None:
    formats = AnswerFormats("qwen", "think")
    for message in ("So", "<think>a</think>So", "<think>a</think><think>b</think>", ""):
        frame = AnswerFrame.within(message, formats, ToolUse(), 5)
        assert (frame.channel, frame.opening, frame.grammar(NUMBER)) == (None, "", NUMBER)
    thinking = AnswerFrame.within("<think>a", formats, ToolUse())
    assert thinking.opening == "<think>"
    assert takes(thinking, "b</think>\n12", NUMBER)
    assert not takes(thinking, "12", NUMBER)
    assert AnswerFrame.within("a", AnswerFormats("qwen"), ToolUse(TOOLS)).grammar(None) is None


def test_what_needs_no_grammar_has_none() -> None:
    assert NO_FRAME.grammar(None) is None
    assert NO_FRAME.grammar(NUMBER) == NUMBER
    assert frame_of("qwen", ToolUse(TOOLS), "", "think").grammar(None) is None
    closed = frame_of("qwen", ToolUse(), "<think>\n\n</think>\n\n", "think", 5)
    assert (closed.channel, closed.grammar(None), closed.grammar(NUMBER)) == (None, None, NUMBER)


class Codec(ByteTokenizer):
    """Bytes, and tokens for marks."""

    special_tokens = ("[TOOL_CALLS]", "[ARGS]")
    ids: ClassVar[dict[str, int]] = {"[TOOL_CALLS]": 256, "[ARGS]": 257, "</think>": 258}

    def encode_rendered(self, text: str) -> list[int]:
        return [self.ids[text]] if text in self.ids else super().encode_rendered(text)


def takes_tokens(frame: AnswerFrame, *parts: str | int) -> bool:
    grammar = frame.grammar(None, Codec())
    assert grammar is not None
    tokens = [token for part in parts for token in ([part] if isinstance(part, int) else part.encode())]
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(grammar.source), log_level=0)
    taken: int = matcher.try_consume_tokens(tokens)
    return taken == len(tokens) and matcher.is_accepting()


def test_marks_that_are_special_tokens_are_these_tokens() -> None:
    frame = frame_of("mistral-args", REQUIRED)
    assert takes_tokens(frame, 256, "f", 257, F[1], 256, "g", 257, "{}")
    assert not takes_tokens(frame, "[TOOL_CALLS]f[ARGS]", F[1])
    strict = frame_of("mistral-args", STRICT)
    assert takes_tokens(strict, "[TOOL_CALLS] is a mark")
    assert takes_tokens(strict, "so", 256, "f", 257, F[1])
    assert not takes_tokens(strict, "so", 256, "f", 257, BAD[1])


@pytest.mark.parametrize("is_special", [False, True])
def test_marks_that_are_one_token_of_a_vocabulary_are_this_token(is_special: bool) -> None:
    """Qwen has its marks among added tokens that are not special; llguidance takes neither kind for its text."""
    backend = byte_level_tokenizer(300)
    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    backend.add_tokens([AddedToken(mark, special=is_special, normalized=False) for mark in marks])
    tokenizer = Tokenizer(backend)
    vocabulary = LLTokenizer(tokenizer.definition, eos_token=0)
    for use, before in ((REQUIRED, ""), (STRICT, "So. ")):
        grammar = frame_of("qwen", use, channel="think").grammar(None, tokenizer)
        assert grammar is not None
        matcher = new_matcher(grammar, vocabulary)
        ids = tokenizer.encode(f"<think>\nso\n</think>\n{before}{written('qwen', F, G)}")
        assert sum(one >= 300 for one in ids) == 6
        assert matcher.try_consume_tokens(ids) == len(ids)
        assert matcher.is_accepting()


@pytest.mark.parametrize("is_token", [False, True])
def test_an_answer_in_harmony_has_the_header_of_its_channel(is_token: bool) -> None:
    """With marks spelled, and as special tokens, which a text of the content cannot have."""
    backend = byte_level_tokenizer(300)
    marks = CHANNELS["harmony"].marks if is_token else ()
    backend.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer = Tokenizer(backend)
    vocabulary = LLTokenizer(tokenizer.definition, eos_token=0)

    def takes(use: ToolUse, content: ResponseFormat | None, text: str) -> bool:
        grammar = frame_of("harmony", use, channel="harmony").grammar(content, tokenizer)
        assert grammar is not None
        matcher, ids = new_matcher(grammar, vocabulary), tokenizer.encode(text)
        return int(matcher.try_consume_tokens(ids)) == len(ids) and matcher.is_accepting()

    thought, final = "<|channel|>analysis<|message|>so<|end|><|start|>assistant", "<|channel|>final<|message|>"
    call, bad = written("harmony", F), written("harmony", BAD)
    for before in ("", thought):
        assert takes(ToolUse(), NUMBER, f"{before}{final}12")
        assert not takes(ToolUse(), NUMBER, f"{before}12")
        assert takes(REQUIRED, None, f"{before}{call}")
        assert not takes(REQUIRED, None, f"{before}{final}hello")
        assert takes(STRICT, None, f"{before}{call}")
        assert takes(STRICT, None, f"{before}{final}hello")
        assert not takes(STRICT, None, f"{before}{bad}")
        assert takes(ToolUse(TOOLS), NUMBER, f"{before}{bad}")


def test_a_prompt_in_harmony_opens_an_answer_with_channels() -> None:
    """A prompt ends as a closed channel does, and the answer's marks are still to come."""
    for before in ("", "<|start|>assistant<|channel|>analysis<|message|>so"):
        prompt = f"{before}<|end|><|start|>user<|message|>hi<|end|><|start|>assistant"
        frame = frame_of("", ToolUse(), prompt, "harmony")
        assert {"<|channel|>", "<|message|>", "<|end|>", "<|start|>"} <= {*frame.marks}
        assert frame.channel is CHANNELS["harmony"]
        assert not frame.is_open
    assert frame_of("", ToolUse(), "<think></think>\n", "think").channel is None


def test_reasoning_ends_at_its_budget() -> None:
    frame = frame_of("qwen", ToolUse(), "<think>", "think", 4)
    assert takes_tokens(frame, "so", 258, "\nyes")
    assert takes_tokens(frame, "soso", 258, "yes")
    assert not takes_tokens(frame, "sosos", 258, "yes")
    free = frame_of("qwen", ToolUse(), "", "think", 4)
    assert takes_tokens(free, "<think>so", 258, "yes")
    assert takes_tokens(free, "yes yes yes")
    assert takes_tokens(free, "<p>yes</p>")
    assert takes_tokens(free, " <thin ice")
    assert not takes_tokens(free, "<think>sosos", 258, "yes")
    with pytest.raises(Unsupported, match="thinking_token_budget"):
        free.grammar(None, ByteTokenizer())


def test_a_schema_that_is_no_unicode_is_refused() -> None:
    schema = {"type": "object", "properties": {"\ud800": {}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
        frame_of("qwen", ToolUse((tool,), required=True)).grammar(None)
    content = ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps(schema))
    with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
        frame_of("", ToolUse(), "", "think").grammar(content)
