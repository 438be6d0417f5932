"""Answers in parts: the same however their text is split, and all of it but marks and the ends of calls."""

import sys
import time
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from text.answer.answer import AnswerParser, Part, ReasoningCount
from text.answer.calls import MAX_HEAD_CHARS, Arguments, CallBegun, Reasoning
from text.answer.formats import CALL_FORMATS, CHANNELS, AnswerFormats

F, G = ("f", '{"a": 1}'), ("g", "{}")
QWEN_F, QWEN_G = (f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in (F, G))
UNTAGGED_F, UNTAGGED_G = (f'{{"name": "{name}", "arguments": {given}}}' for name, given in (F, G))
LLAMA_F, LLAMA_G = (f'{{"name": "{name}", "parameters": {given}}}' for name, given in (F, G))
MISTRAL = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
BARE = '[TOOL_CALLS]f[ARGS]{"a": 1}\n[TOOL_CALLS]g[CALL_ID]Ab1[ARGS] {}'
ASSISTANT, CHANNEL, MESSAGE = "<|start|>assistant", "<|channel|>", "<|message|>"
ANALYSIS, FINAL, TOLD = (f"{CHANNEL}{name}{MESSAGE}" for name in ("analysis", "final", "commentary"))
HARMONY_F, HARMONY_G = (
    f"{CHANNEL}commentary to=functions.{name} <|constrain|>json{MESSAGE}{given}<|call|>" for name, given in (F, G)
)
LONG = "a" * MAX_HEAD_CHARS
NESTED = '{"a": "}\\"] </tool_call> {"}'
Told = list[str | tuple[str, str]]
CASES: list[tuple[str, str, Told | None]] = [
    ("qwen", QWEN_F, [F]),
    ("qwen", f"{QWEN_F}\n{QWEN_G}\n", [F, G]),
    ("qwen", f"Let me see.\n{QWEN_F}", ["Let me see.\n", F]),
    ("qwen", f"{QWEN_F} done", [F, " done"]),
    ("qwen", f'<tool_call>{{"name": "f", "arguments": {NESTED}, "id": "}}"}}</tool_call>', [("f", NESTED)]),
    ("qwen", '<tool_call>{"arguments": {"a":1}, "name": "f"}</tool_call>', [F]),
    ("qwen", f'<tool_call>{{"id": "{LONG}", "arguments": {{"a":1}}, "name": "f"}}</tool_call> ', [F]),
    ("qwen", f'<tool_call>{{"id": "{LONG}", "name": "h"}}</tool_call>', None),
    ("qwen", f'<tool_call>{{"id": "{LONG}', None),
    ("qwen", '<tool_call>{"id": 1, "name": "f", "arguments": {"a": "\\ud800"}}', None),
    ("qwen", '<tool_call>{"id": 1, "name": "f", "arguments": {"a": 1e999}}', None),
    ("qwen", "a < b <tool", ["a < b <tool"]),
    ("qwen", "<tool_call>not JSON</tool_call>", None),
    ("qwen", '<tool_call>{"name": "f", "argum', None),
    ("qwen", '<tool_call>{"name": "f", "arguments": {"a', [("f", '{"a')]),
    ("qwen", '<tool_call>{"name": "f", "arguments": {"a": NaN}', [("f", '{"a": NaN}')]),
    ("qwen", '<tool_call>{"name": "h", "arguments": {}}</tool_call>', None),
    ("qwen", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None),
    ("qwen", '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>', None),
    ("qwen", '<tool_call>{"a": ]}</tool_call>', None),
    ("qwen", LLAMA_F, None),
    ("qwen", UNTAGGED_F, [F]),
    ("qwen", f"\n{UNTAGGED_F}\n{UNTAGGED_G}</tool_call>\n", [F, G]),
    ("qwen", f"```json\n{UNTAGGED_F}\n```\n\n```\n{UNTAGGED_G}\n``` done", [F, G, " done"]),
    ("qwen", f"``` json\n{UNTAGGED_F}", None),
    ("qwen", f'```json\n{{\n  "name": "g",\n  "arguments": {NESTED}\n}}\n``', [("g", NESTED)]),
    ("qwen", f"{QWEN_F}\n```python\na```", [F, "\n```python\na```"]),
    ("qwen", f"{UNTAGGED_F} and {UNTAGGED_G}", [F, f" and {UNTAGGED_G}"]),
    ("qwen", f"Like this: {UNTAGGED_F}", None),
    ("qwen", '{"name": "h", "arguments": {}}', None),
    ("qwen", '{"name": "f", "arguments": 1}', None),
    ("qwen", '{"arguments": {}, "name": "f"}', None),
    ("qwen", f'{{{" " * MAX_HEAD_CHARS}"name": "f", "arguments": {{}}}}', None),
    ("qwen", '```json\n{"na', None),
    ("mistral", UNTAGGED_F, None),
    ("llama", LLAMA_F, [F]),
    ("llama", f"<|python_tag|>{LLAMA_F}; {LLAMA_G}", [F, G]),
    ("llama", f"\n{LLAMA_F}\n", [F]),
    ("llama", f"Like this: {LLAMA_F}", None),
    ("llama", "<|python_tag|>print(1)", None),
    ("llama", '{"answer": 42} is what I found', None),
    ("mistral", MISTRAL, [F, G]),
    ("mistral", f"Well. {MISTRAL}", ["Well. ", F, G]),
    ("mistral", f"{MISTRAL}{MISTRAL}", [F, G, F, G]),
    ("mistral", '[TOOL_CALLS][{"arguments": {}, "name": "g"}, {"name": "f", "arguments": {"a": 1}}]', [G, F]),
    ("mistral", '[TOOL_CALLS][{"name": "g", "arguments": {}}, 3]', [G, ", 3]"]),
    ("mistral", '[TOOL_CALLS][{"name": "g", "arguments": {}} and', [G, "and"]),
    ("mistral", "[TOOL_CALLS] {}", None),
    ("mistral", "[TOOL_CALLS]", None),
    ("mistral-args", BARE, [F, G]),
    ("mistral", f"Well. {BARE} [TOOL_CALLS]done", ["Well. ", F, G, " [TOOL_CALLS]done"]),
    ("mistral", "[TOOL_CALLS]h[ARGS]{}", None),
    ("mistral", "[TOOL_CALLS]f[ARGS][]", None),
    ("mistral", "[TOOL_CALLS]f[ARGS]{", [("f", "{")]),
    ("mistral", f"[TOOL_CALLS]f [ARGS]{MISTRAL}", ["[TOOL_CALLS]f [ARGS]", F, G]),
    ("qwen", "<tool_call>f[ARGS]{}", None),
    ("harmony", HARMONY_F, [F]),
    ("harmony", f"{HARMONY_F}{ASSISTANT}{HARMONY_G}", [F, G]),
    ("harmony", f" to=functions.f{CHANNEL}commentary json{MESSAGE}{F[1]}", [F]),
    ("harmony", f"{TOLD}Let me see.<|end|>{ASSISTANT}{HARMONY_F}", ["Let me see.", F]),
    ("harmony", f"{FINAL}a < b <|en<|return|>", ["a < b <|en"]),
    ("harmony", f"{FINAL}cut <|e", ["cut <|e"]),
    ("harmony", f"{CHANNEL}commentary to=functions.h{MESSAGE}{{}}", None),
    ("harmony", f"{CHANNEL}{LONG}{MESSAGE}", None),
    ("harmony", "to=be or not to be", None),
    ("harmony", "to=5", None),
    ("harmony", f"{CHANNEL}final The answer is 4.", None),
    ("harmony", f"{ASSISTANT} hello", None),
    ("harmony", f"{HARMONY_F}{ASSISTANT[:-1]}", [F]),
    ("harmony", f"{HARMONY_F}{ASSISTANT[:-9]}", [F]),
    ("harmony", f" to=functions.f{CHANNEL}commentary json{MESSAGE}<|call|>", [("f", "{}")]),
    ("harmony", f" to=functions.f{CHANNEL}commentary json{MESSAGE}", [("f", "{}")]),
    ("harmony", "hello", None),
    ("harmony", f"hello {HARMONY_F.removesuffix('<|call|>')}", None),
]
"""A format, a text, and what is found in it; None is the text itself."""
TEXTS = [(name, text, expected or [text]) for name, text, expected in CASES]
THOUGHTS: list[tuple[str, str, str, Told]] = [
    ("think", "<think>\nso\n</think>\n\nyes", "so", ["yes"]),
    ("think", "\n<think> so < </thin k </think>yes", "so < </thin k", ["yes"]),
    ("think", "<think>\n\n</think>\n\n", "", []),
    ("think", "<think>cut </thi", "cut </thi", []),
    ("think", "<think>cut \n", "cut", []),
    ("think", "no <think>so</think>", "", ["no <think>so</think>"]),
    ("think", " <thi", "", [" <thi"]),
    ("think", f"<think>{QWEN_F}</think>{QWEN_F} ok", QWEN_F, [F, " ok"]),
    ("think", f"<think>so</think>\n{QWEN_F}", "so", [F]),
    ("magistral", "[THINK]so[/THINK]yes", "so", ["yes"]),
    ("", "<think>so</think>", "", ["<think>so</think>"]),
    ("harmony", f"{ANALYSIS}so<|end|>{ASSISTANT}{FINAL}yes", "so", ["yes"]),
    ("harmony", f"{ANALYSIS}so<|end|>{ASSISTANT}{ANALYSIS} on<|end|>{ASSISTANT}{HARMONY_F}", "so on", [F]),
    ("harmony", f"{ANALYSIS}cut <|", "cut <|", []),
    ("harmony", f"{ANALYSIS}<|end|>{ASSISTANT}{FINAL}", "", []),
    *(("harmony", HARMONY_F[:at], "", []) for at in range(len(CHANNEL), HARMONY_F.index(MESSAGE))),
    ("harmony", f" to=functions.f{CHANNEL}commentary", "", []),
    ("harmony", f"{CHANNEL}fin", "", []),
    ("harmony", "yes", "", ["yes"]),
]
PIECES = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "[CALL_ID]", "<think>", "</think>"),
    *(ASSISTANT, CHANNEL, MESSAGE, "analysis", "to=functions.f", "<|end|>", "<|call|>", HARMONY_F),
    *("{", "}", "[", "]", '"', "\\", ";", ",", "a", " ", LONG, " " * 9, "```json\n", "```", UNTAGGED_F),
)
VALID = ('"name": "f"', '"arguments": {}', '"parameters": {}', ", ", QWEN_F, LLAMA_F, MISTRAL, BARE)


def parsed(tool_format: str, pieces: list[str], reasoning_format: str = "") -> tuple[str, Told]:
    """The reasoning; the calls, and the texts between them."""
    parser = AnswerParser(AnswerFormats(tool_format, reasoning_format), {"f", "g"})
    parts: list[Part] = [part for piece in pieces for part in parser.feed(piece)]
    reasoning, told = "", Told()
    for part in [*parts, *parser.flush()]:
        last = told[-1] if told else None
        if isinstance(part, Reasoning):
            reasoning += part.text
        elif isinstance(part, CallBegun):
            told.append((part.name, ""))
        elif isinstance(part, Arguments):
            assert isinstance(last, tuple)
            told[-1] = (last[0], last[1] + part.text)
        elif isinstance(last, str):
            told[-1] = last + part
        else:
            told.append(part)
    return reasoning, told


@pytest.mark.parametrize(("tool_format", "text", "expected"), TEXTS)
def test_texts_and_calls_split_anywhere(tool_format: str, text: str, expected: Told) -> None:
    assert parsed(tool_format, [text]) == ("", expected)
    assert parsed(tool_format, list(text)) == ("", expected)
    for at in range(len(text)):
        assert parsed(tool_format, [text[:at], text[at:]]) == ("", expected)


@pytest.mark.parametrize(("reasoning_format", "text", "thought", "expected"), THOUGHTS)
def test_reasoning_and_content_split_anywhere(reasoning_format: str, text: str, thought: str, expected: Told) -> None:
    assert parsed("qwen", list(text), reasoning_format) == (thought, expected)
    for at in range(len(text)):
        assert parsed("qwen", [text[:at], text[at:]], reasoning_format) == (thought, expected)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([*CALL_FORMATS]),
    st.sampled_from(["", "think", "harmony"]),
    st.lists(st.sampled_from((*PIECES, *VALID)), max_size=20),
    st.data(),
)
def test_any_text_in_any_pieces(tool_format: str, reasoning_format: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    whole = parsed(tool_format, [text], reasoning_format)
    ends = [*accumulate(data.draw(st.lists(st.integers(1, 9))), initial=0), len(text)]
    assert parsed(tool_format, [text[start:end] for start, end in pairwise(ends)], reasoning_format) == whole
    assert parsed(tool_format, [*text], reasoning_format) == whole
    has_headers = "harmony" in (tool_format, reasoning_format)  # which are dropped
    if not has_headers and not reasoning_format and not any(isinstance(one, tuple) for one in whole[1]):
        assert whole[1] == [text] * bool(text)


def test_arguments_of_any_depth_are_a_call_or_text() -> None:
    for depth in range(0, sys.getrecursionlimit(), 7):
        arguments = f'{{"a": {"[" * depth}{"]" * depth}}}'
        assert parsed("qwen", [f'<tool_call>{{"name": "f", "arguments": {arguments}}}']) == ("", [("f", arguments)])
        text = f'<tool_call>{{"arguments": {arguments}, "name": "f"}}'
        assert parsed("qwen", [text]) in (("", [("f", arguments)]), ("", [text]))


def test_parts_are_told_as_they_come() -> None:
    parser = AnswerParser(AnswerFormats("qwen", "think"), {"f"})
    told = [
        ("<think>a", [Reasoning("a")]),
        (" b", [Reasoning(" b")]),
        ("</", []),
        ("think>\n", []),
        ("hello ", ["hello "]),
        ("<tool", []),
        ("s> ", ["<tools> "]),
        ('<tool_call>\n{"name": "f", ', []),
        ('"arguments": {', [CallBegun("f"), Arguments("{")]),
        ('"a": ', [Arguments('"a": ')]),
        ("1}", [Arguments("1}")]),
        ("}\n</tool", []),
    ]
    assert [parser.feed(piece) for piece, _ in told] == [expected for _, expected in told]
    assert parser.flush() == []


def test_json_that_is_no_call_is_told_as_it_comes() -> None:
    """It is held back only as long as it may begin a call of a known function, alone or in a block of code."""
    parser = AnswerParser(AnswerFormats("qwen"), {"find"})
    told = [('{"name"', []), (': "fi', []), ("sh", ['{"name": "fish']), ('", "arguments": {', ['", "arguments": {'])]
    assert [parser.feed(piece) for piece, _ in told] == [expected for _, expected in told]
    parser = AnswerParser(AnswerFormats("qwen"), {"find"})
    told = [("```", []), ("py", ["```py"]), ("thon\n{", ["thon\n{"])]
    assert [parser.feed(piece) for piece, _ in told] == [expected for _, expected in told]


@pytest.mark.parametrize(
    ("template", "tool", "reasoning"),
    [
        ("{% if tools %}<tool_call>", "qwen", ""),
        ('{% if tools %}{"name": , "parameters": {', "llama", ""),
        ("{{ tools }}[TOOL_CALLS]", "mistral", ""),
        ("{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]", "mistral-args", ""),
        ("<tool_call>", "", ""),
        ("{{ tools }}", "", ""),
        ("{{ content.split('</think>')[-1] }}", "", "think"),
        ("{{ tools }}<tool_call></think>", "qwen", "think"),
        (f"{{{{ tools }}}}{ANALYSIS}{{{{ thought }}}} to=functions.{{{{ name }}}}", "harmony", "harmony"),
    ],
)
def test_templates_tell_their_formats(template: str, tool: str, reasoning: str) -> None:
    assert AnswerFormats.of(template) == AnswerFormats(tool, reasoning)


def test_settings_name_formats() -> None:
    both = "{{ tools }}<tool_call></think>"
    assert AnswerFormats.of(both, "off", "magistral") == AnswerFormats("", "magistral")
    assert AnswerFormats.of("", "mistral", "off") == AnswerFormats("mistral", "")


@pytest.mark.parametrize("spaces", ["", " " * 8])
def test_a_name_may_have_128_letters(spaces: str) -> None:
    name = "f" * 128
    for tool_format, text in (
        ("qwen", f'<tool_call>{{{spaces}"name"{spaces}:{spaces}"{name}"{spaces},{spaces}"arguments"{spaces}: {{}}}}'),
        ("mistral-args", f"[TOOL_CALLS]{name}[CALL_ID]{'a' * 64}[ARGS]{spaces}{{}}"),
    ):
        parser = AnswerParser(AnswerFormats(tool_format, ""), {name})
        parts = [part for char in text for part in parser.feed(char)]
        assert CallBegun(name) in [*parts, *parser.flush()]


@pytest.mark.parametrize("tool_format", CALL_FORMATS)
def test_calls_are_read_as_they_are_written(tool_format: str) -> None:
    form = CALL_FORMATS[tool_format]
    calls = form.between.join(f"{form.head(name)}{given}{form.tail}" for name, given in (F, G))
    assert parsed(tool_format, [f"{form.opener}{form.lead}{calls}{form.trail}"]) == ("", [F, G])


def test_many_calls_at_once_take_time_by_their_length() -> None:
    began_s = time.process_time()
    AnswerParser(AnswerFormats("llama"), {"f"}).feed(f"{LLAMA_F};" * 60_000)
    assert time.process_time() - began_s < 5


@pytest.mark.parametrize(
    ("form", "lead", "piece"),
    [
        ("qwen", "<tool_call>{", '"a": 1, '),
        ("qwen", QWEN_F, " "),
        ("mistral", "[TOOL_CALLS]", " "),
        ("llama", "{", '"a": 1, '),
        ("llama", "", "\n"),
        ("qwen", "{", " "),
        ("qwen", "```json", "\n"),
        ("qwen", UNTAGGED_F, " "),
    ],
)
def test_pieces_that_wait_take_time_by_their_number(form: str, lead: str, piece: str) -> None:
    def seconds(num_pieces: int) -> float:
        parser = AnswerParser(AnswerFormats(form), {"f"})
        parser.feed(lead)
        began_s = time.process_time()
        for _ in range(num_pieces):
            parser.feed(piece)
        return time.process_time() - began_s

    few_s = min(seconds(10_000) for _ in range(3))
    assert min(seconds(80_000) for _ in range(2)) < 14 * few_s


@pytest.mark.parametrize("opening", ["", "<think>", "<think>a", "<think>a</think>"])
def test_white_space_token_by_token_takes_time_by_its_length(opening: str) -> None:
    count = ReasoningCount(CHANNELS["think"], opening)
    began_s = time.process_time()
    for _ in range(400_000):
        count.add(" ")
    assert time.process_time() - began_s < 5
