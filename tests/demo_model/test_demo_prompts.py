"""Prompts: facts that can be found in the text, lengths as promised, depth where it says."""

import random

import pytest

from demo_model import words
from demo_model.corpus import Split, split_of_fact
from demo_model.prompts import COMPLETION, answer, ask, count_tokens, make_context
from demo_model.recall import Depth, RecallPrompt, is_right, make_recall_prompt


@pytest.mark.parametrize("max_len", [40, 64, 300, 900])
def test_a_context_states_each_fact_once_and_in_order(max_len: int) -> None:
    context = make_context(random.Random(max_len), Split.HELD_OUT, words.NAMES, max_len)
    places = [context.text.index(f" {fact.name} {fact.value}") for fact in context.facts]
    assert places == sorted(places)
    assert len({fact.name for fact in context.facts}) == len(context.facts)
    assert {split_of_fact(fact, context.topic) for fact in context.facts} == {Split.HELD_OUT}


@pytest.mark.parametrize("max_len", [64, 300, 900])
def test_a_prompt_is_nearly_as_long_as_it_may_be(max_len: int) -> None:
    rng = random.Random(0)
    prompts = [make_recall_prompt(rng, Split.HELD_OUT, max_len, depth) for depth in Depth for _ in range(50)]
    lengths = [count_tokens(prompt.text) for prompt in prompts]
    assert max(lengths) <= max_len
    assert sum(lengths) / len(lengths) > 0.8 * max_len


@pytest.mark.parametrize("depth", list(Depth))
def test_the_asked_fact_stands_at_its_depth(depth: Depth) -> None:
    rng = random.Random(1)
    for _ in range(50):
        context_text, question = make_recall_prompt(rng, Split.HELD_OUT, 300, depth).text.split(" Question: ")
        name = question.split("has ")[-1].split("is ")[-1].split("?")[0].split("<")[0]
        stated = [word for word in context_text.replace(",", " ").split() if word in words.NAMES]
        third = len(stated) / len(Depth)
        assert third * depth - 1 < stated.index(name) < third * (depth + 1)


def test_a_question_ends_where_its_answer_starts() -> None:
    context = make_context(random.Random(2), Split.TRAIN, ("Ben", "Anna"), 20)
    fact = context.facts[0]
    asked = ask(context, fact, COMPLETION) + answer(fact)
    assert asked == f"Question: {context.topic.question} {fact.name}? {fact.value}.<|end|>"


@pytest.mark.parametrize(
    ("continuation", "expected"),
    [(" 19.", True), (" 19", True), (" 91.", False), (" 190.", False), ("", False), (" 19. 20.", False)],
)
def test_an_answer_is_right_when_it_is_the_value_alone(continuation: str, expected: bool) -> None:
    assert is_right(RecallPrompt("Rooms: Ben 19. Question: which room has Ben", "19"), continuation) is expected
