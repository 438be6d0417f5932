import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import jsonschema
import pytest

from engine.core import EngineCore
from engine.events import Failed
from engine.grammar import masks
from engine.grammar.grammars import Grammars
from engine.model.hash_model import HashModel
from engine.request import ChoiceSoFar, EngineRequest, HandOff
from engine.speculation.speculator import NgramProposer, Speculator
from kv_store.tiers.memory_tier import MemoryTier
from tests.harness.engines import Run, drive, gained, make_core, release, request, rest_of
from tests.harness.node import Node
from tests.harness.oracle_proposer import oracle_drafts
from text.byte_tokenizer import ByteTokenizer
from wire.errors import InvalidRequest, Unsupported
from wire.layout import KVLayout
from wire.sampling import FormatKind, Logprobs, ResponseFormat, SamplingParams

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
END = 256
MODEL = HashModel(LAYOUT, 300, eos_token_ids=(END,))
GRAMMARS = Grammars(lambda: ByteTokenizer().definition, MODEL.vocab_size, MODEL.eos_token_ids)
PROMPT = tuple(range(1, 40))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9, "pattern": "^[a-z]*$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
        "inner": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "inner"],
    "additionalProperties": False,
}
PERSON = ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps(SCHEMA))
FREE = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=200, response_format=PERSON),
    "logprobs": SamplingParams(temperature=0.0, max_tokens=200, logprobs=2, response_format=PERSON),
    "seeded": SamplingParams(temperature=1.0, seed=3, max_tokens=200, top_p=0.9, top_k=50, response_format=PERSON),
    "penalties": SamplingParams(
        temperature=0.7, seed=4, max_tokens=200, presence_penalty=0.5, repetition_penalty=1.2, response_format=PERSON
    ),
    "two": SamplingParams(temperature=1.0, seed=7, max_tokens=200, n=2, logprobs=1, response_format=PERSON),
}


def ready(asked: EngineRequest) -> EngineRequest:
    return GRAMMARS.prepare(asked)


def answers(core: EngineCore, asked: Sequence[EngineRequest]) -> list[list[str]]:
    """Runs requests to their end; returns the texts of their choices."""
    return [[text_of(output) for output in run.outputs.values()] for run in drive(core, [ready(one) for one in asked])]


def text_of(output: Sequence[int]) -> str:
    assert output[-1] == END
    return bytes(output[:-1]).decode()


def form(kind: FormatKind, source: str, max_tokens: int = 100) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=1, max_tokens=max_tokens, response_format=ResponseFormat(kind, source))


def asked_of_all_kinds(seed: int = 0) -> list[EngineRequest]:
    """Requests of all kinds, and free ones between them, with prompts of their own."""
    draw = random.Random(seed)
    kinds = [kind for one in PARAMS.values() for kind in (one, FREE)]
    return [request([draw.randrange(256) for _ in range(20 + 3 * number)], one) for number, one in enumerate(kinds)]


@pytest.mark.parametrize("kind", PARAMS)
def test_an_answer_is_of_its_schema_and_ends_by_itself(kind: str) -> None:
    for number in range(5):
        (texts,) = answers(make_core(MODEL), [request((number, *PROMPT), PARAMS[kind])])
        assert len(texts) == PARAMS[kind].n
        for text in texts:
            jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("kind", "source", "accepted"),
    [
        (FormatKind.REGEX, "(yes|no), [0-9]{3}", r"(yes|no), [0-9]{3}"),
        (FormatKind.LARK, 'start: "a" b "c"\nb: "x" | "(" b ")"', r"a\(*x\)*c"),
        (FormatKind.JSON_SCHEMA, '{"enum": ["one", "two"]}', '"(one|two)"'),
    ],
)
def test_each_language(kind: FormatKind, source: str, accepted: str) -> None:
    run = drive(make_core(MODEL), [ready(request(PROMPT, form(kind, source)))])[0]
    text = bytes(token for token in run.outputs[0] if token != END).decode(errors="replace")
    assert re.fullmatch(accepted, text)
    assert len(run.outputs[0]) > 1


def test_masks_of_the_step_and_of_a_thread_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, found = asked_of_all_kinds(), []
    for max_here_s in (float("inf"), -1.0, masks.MAX_HERE_S):
        monkeypatch.setattr(masks, "MAX_HERE_S", max_here_s)
        found.append([run.outputs for run in drive(make_core(MODEL), [ready(one) for one in asked])])
    assert found[1:] == found[:1] * 2


def test_alone_and_among_others_with_and_without_guesses_and_preempted() -> None:
    asked = asked_of_all_kinds()
    expected = [drive(make_core(MODEL), [ready(one)])[0].outputs for one in asked]
    outputs = {one.prompt_ids: [*output.values()] for one, output in zip(asked, expected, strict=True)}
    for num_blocks in (256, 24):
        for speculator in (None, Speculator(NgramProposer()), oracle_drafts(outputs, 0.3)):
            core = make_core(MODEL, num_blocks=num_blocks, speculator=speculator)
            assert [run.outputs for run in drive(core, [ready(one) for one in asked])] == expected
            assert speculator is None or core.stats().num_accepted_tokens > 0
    assert core.stats().num_preemptions > 0


def test_forced_text_takes_fewer_steps_for_the_same_tokens() -> None:
    asked, num_steps, found = asked_of_all_kinds(), list[int](), []
    for speculator in (Speculator(max_draft_len=0), None, Speculator(NgramProposer())):
        core, outputs = make_core(MODEL, speculator=speculator), list[list[list[int]]]()
        num_steps.append(0)
        for one in asked[::2]:
            core.add(ready(one))
            outputs.append([[] for _ in one.choices])
            while core.has_requests:
                output = core.step()
                num_steps[-1] += 1
                for choice, token_id in zip(output.choices, output.token_ids, strict=True):
                    outputs[-1][choice.index].append(token_id)
        found.append(outputs)
    plain, forced, both = num_steps
    assert found[1:] == found[:1] * 2
    assert max(forced, both) < 0.7 * plain


def test_log_probabilities_are_of_the_model_and_not_of_the_mask() -> None:
    core, found = make_core(MODEL), list[Logprobs]()
    core.add(ready(request(PROMPT, PARAMS["logprobs"])))
    while core.has_requests:
        found += core.step().logprobs.values()
    assert any(one.chosen < max(value for _, value in one.top) for one in found)


@pytest.mark.parametrize("kind", PARAMS)
def test_after_a_hand_off_and_from_each_tier(kind: str) -> None:
    sampling = PARAMS[kind]
    asked = [request((number, *PROMPT), sampling) for number in range(4)]
    expected = [run.outputs for run in drive(make_core(MODEL), [ready(one) for one in asked])]
    cold = MemoryTier(LAYOUT)
    node = Node(LAYOUT, cold=cold)
    handed = prefilled(make_core(MODEL, node), asked)
    assert [run.outputs for run in resumed(make_core(MODEL, node), handed)] == expected
    release(node, handed)
    node.write_all_cold()
    restarted = Node(LAYOUT, cold=cold)
    handed = prefilled(make_core(MODEL, restarted), asked)
    assert {*handed[0].fetched[0].found} == {"redis"}
    assert [run.outputs for run in resumed(make_core(MODEL, restarted), handed)] == expected


def prefilled(core: EngineCore, asked: Sequence[EngineRequest]) -> list[Run]:
    return drive(core, [ready(HandOff(**vars(one))) for one in asked])


def resumed(core: EngineCore, runs: Sequence[Run]) -> list[Run]:
    return drive(core, [ready(rest_of(run)) for run in runs])


@pytest.mark.parametrize("num_before", [1, 2, 9, 30])
def test_after_a_lost_worker_another_goes_on_with_the_very_tokens(num_before: int) -> None:
    asked = request(PROMPT, PARAMS["two"])
    whole = drive(make_core(MODEL), [ready(asked)])[0].outputs
    choices = tuple(ChoiceSoFar(index, tuple(output[:num_before])) for index, output in whole.items())
    assert drive(make_core(MODEL), [ready(replace(asked, choices=choices))])[0].outputs == whole


@pytest.mark.parametrize(
    "given",
    [
        ResponseFormat(FormatKind.JSON_SCHEMA, '{"$ref": "https://example.com/schema"}'),
        ResponseFormat(FormatKind.JSON_SCHEMA, '{"$ref": "#"}'),
        ResponseFormat(FormatKind.JSON_SCHEMA, '{"type": "integer", "minimum": 5, "maximum": 3}'),
        ResponseFormat(FormatKind.JSON_SCHEMA, '{"allOf": [{"type": "string"}, {"type": "integer"}]}'),
        ResponseFormat(FormatKind.JSON_SCHEMA, '{"type": "array", "items":' * 5000 + "{}" + "}" * 5000),
        ResponseFormat(FormatKind.JSON_SCHEMA, '{"type": "fish"}'),
        ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps({"properties": {f"p{i}": {} for i in range(1500)}})),
        ResponseFormat(FormatKind.JSON_SCHEMA, "{"),
        ResponseFormat(FormatKind.JSON_SCHEMA, "3"),
        ResponseFormat(FormatKind.JSON_SCHEMA, "true"),
        ResponseFormat(FormatKind.REGEX, "(" * 30_000 + ")" * 30_000),
        ResponseFormat(FormatKind.REGEX, "a{3,1"),
        ResponseFormat(FormatKind.REGEX, "[^\\s\\S]"),
        ResponseFormat(FormatKind.LARK, "start: start"),
        ResponseFormat(FormatKind.LARK, "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
        ResponseFormat(FormatKind.LARK, "no grammar"),
        ResponseFormat(FormatKind.LARK, '{"grammars": []}'),
    ],
    ids=lambda given: given.source[:30],
)
def test_a_grammar_that_cannot_be_built_or_accepts_nothing_is_refused(given: ResponseFormat) -> None:
    with pytest.raises(InvalidRequest, match="response_format"):
        ready(request(PROMPT, SamplingParams(response_format=given)))


@pytest.mark.parametrize(
    "sampling",
    [
        form(FormatKind.REGEX, "(a*)*b"),
        form(FormatKind.REGEX, "(a|b)*a(a|b){600}"),
        form(FormatKind.REGEX, r"(\p{L}{1,500}\p{N}?){1,300}x"),
        form(FormatKind.REGEX, "((((a{0,100}){0,100}){0,100}){0,100})b"),
        form(FormatKind.LARK, 'start: start "a" | "b"'),
        form(FormatKind.LARK, 'start: "a" start'),
        form(FormatKind.LARK, 'start: e\ne: e e | "a" | "a" e | e "a"'),
        form(FormatKind.LARK, 'start: s\ns: s s | s s s | "a" | "b"'),
        form(FormatKind.JSON_SCHEMA, json.dumps({"properties": {f"p{i}": {} for i in range(450)}})),
    ],
    ids=lambda sampling: sampling.response_format.source[:30],
)
def test_a_hostile_grammar_ends_only_its_own_request(sampling: SamplingParams) -> None:
    core, free = make_core(MODEL), request(PROMPT, FREE)
    core.add(free)
    core.add(ready(hostile := request(PROMPT, sampling)))
    tokens = []
    while core.has_requests:
        output = core.step()
        tokens += [token for choice, _, token in gained(output) if choice.attempt_id == free.attempt_id]
        for event in output.events:
            if isinstance(event, Failed):
                assert event.attempt_id == hostile.attempt_id
                assert isinstance(event.error, InvalidRequest)
        assert core.check() == []
    assert tokens == MODEL.oracle(PROMPT, FREE.max_tokens)


def failure_of(sampling: SamplingParams) -> Exception:
    core = make_core(MODEL)
    core.add(ready(request(PROMPT, sampling)))
    (failed,) = [event for _ in range(9) for event in core.step().events if isinstance(event, Failed)]
    assert core.check() == []
    return failed.error


def test_an_end_that_min_tokens_forbids_fails_the_request() -> None:
    given = ResponseFormat(FormatKind.REGEX, "ab")
    error = failure_of(SamplingParams(max_tokens=20, min_tokens=5, response_format=given))
    assert isinstance(error, InvalidRequest)
    assert "min_tokens" in error.message


def test_a_grammar_whose_tokens_take_long_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    given = SamplingParams(max_tokens=20, response_format=ResponseFormat(FormatKind.REGEX, "[ab]{30}"))
    thread_times = count(0.0, 0.05)
    monkeypatch.setattr("engine.grammar.matcher.time.thread_time", lambda: next(thread_times))
    error = failure_of(given)
    assert isinstance(error, InvalidRequest)
    assert "too long" in error.message


def test_the_fault_of_a_grammar_leaves_the_prompts_blocks_to_others() -> None:
    core, prompt = make_core(MODEL), tuple(range(1, 101))
    free = replace(FREE, max_tokens=2)
    drive(core, [request(prompt, free)])
    bad = replace(free, max_tokens=20, min_tokens=10, response_format=ResponseFormat(FormatKind.REGEX, "a"))
    core.add(ready(request(prompt, bad)))
    assert [event for _ in range(9) for event in core.step().events if isinstance(event, Failed)]
    assert drive(core, [request(prompt, free)])[0].fetched[0].num_found >= 80


def test_a_grammar_that_dries_up_amid_the_answer_fails_the_request() -> None:
    """`b` wants an `a` that no text of two characters has room for: what follows the first is found out late."""
    error = failure_of(form(FormatKind.LARK, 'start: "a" b\nb: "b" b'))
    assert isinstance(error, InvalidRequest)


def test_tokens_of_an_earlier_attempt_that_are_not_of_the_grammar_are_refused() -> None:
    asked = request(PROMPT, PARAMS["greedy"])
    with pytest.raises(InvalidRequest, match="response_format"):
        ready(replace(asked, choices=(ChoiceSoFar(0, (123, 124)),)))


def test_without_matchers_a_format_is_refused_and_not_forgotten() -> None:
    with pytest.raises(Unsupported):
        make_core(MODEL).add(request(PROMPT, PARAMS["greedy"]))


def test_without_an_end_token_no_answer_could_end() -> None:
    with pytest.raises(Unsupported, match="ends"):
        Grammars(lambda: ByteTokenizer().definition, 300, ()).prepare(request(PROMPT, PARAMS["greedy"]))


def test_without_the_library_a_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    grammars = Grammars(lambda: ByteTokenizer().definition, 300, (END,))
    assert grammars.prepare(asked := request(PROMPT, FREE)) is asked
    with pytest.raises(Unsupported, match="llguidance"):
        grammars.prepare(request(PROMPT, PARAMS["greedy"]))


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParams(ignore_eos=True, response_format=PERSON), "ignore_eos"),
        (form(FormatKind.REGEX, ""), "response_format"),
        (form(FormatKind.REGEX, "a" * (64 << 10) + "a"), "response_format"),
    ],
)
def test_a_format_out_of_range_is_refused(sampling: SamplingParams, param: str) -> None:
    with pytest.raises(InvalidRequest, match=param):
        sampling.require_in_range(300)
