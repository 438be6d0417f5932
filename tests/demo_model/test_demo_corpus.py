"""The generated language: two splits that share nothing, and the same text for the same seed."""

import random

import pytest

from demo_model import words
from demo_model.corpus import (
    TOPICS,
    Split,
    Topic,
    invent_names,
    make_facts,
    make_sentence,
    split_of_fact,
    split_of_sentence,
)
from demo_model.documents import make_document


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.heading)
def test_no_fact_is_in_both_splits(topic: Topic) -> None:
    rng = random.Random(0)
    train, held_out = (
        {fact for _ in range(20) for fact in make_facts(rng, split, topic, words.NAMES)} for split in Split
    )
    assert train
    assert held_out
    assert not train & held_out


@pytest.mark.parametrize("split", list(Split))
def test_every_name_has_a_fact_of_each_split(split: Split) -> None:
    facts = make_facts(random.Random(1), split, TOPICS[0], words.NAMES)
    assert [fact.name for fact in facts] == list(words.NAMES)
    assert {split_of_fact(fact, TOPICS[0]) for fact in facts} == {split}


def test_no_sentence_is_in_both_splits() -> None:
    rng = random.Random(2)
    train, held_out = ({make_sentence(rng, split) for _ in range(2000)} for split in Split)
    assert not train & held_out
    assert {split_of_sentence(sentence) for sentence in held_out} == {Split.HELD_OUT}


def test_sentences_hold_no_names() -> None:
    rng = random.Random(3)
    spoken = {word for _ in range(2000) for word in make_sentence(rng, Split.TRAIN).rstrip(".").split()}
    assert not spoken & set(words.NAMES)


def test_names_and_values_of_a_topic_are_distinct() -> None:
    assert len(set(words.NAMES)) == len(words.NAMES)
    assert all(len(set(topic.values)) == len(topic.values) for topic in TOPICS)


def test_invented_names_differ() -> None:
    names = invent_names(random.Random(4), 200)
    assert len(names) == len(set(names)) > 150


def test_documents_follow_from_the_seed() -> None:
    first, again, other = (make_document(random.Random(seed), Split.TRAIN, 200) for seed in (5, 5, 6))
    assert first == again
    assert first != other
