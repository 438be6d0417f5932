"""Texts that state facts and ask for some of them, in the wordings that the demo model is trained on.

A text's length counts words and punctuation marks, each of which is one token of the demo model's tokenizer.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from demo_model.corpus import TOPICS, Fact, Split, Topic, make_facts, make_sentence

END = "<|end|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"

_TOKEN = re.compile(r"<\|\w+\|>|\w+|[^\w\s]")
_FACT_LEN = len(_TOKEN.findall("Ben 19,"))
_HEADING_LEN = len(_TOKEN.findall("Rooms:"))
_MAX_SENTENCE_LEN = 12
_MIN_FACTS = 2


@dataclass(frozen=True)
class Wording:
    """The words before the facts, and between the asked name and its value."""

    opening: str
    closing: str


COMPLETION = Wording("", "?")
WORDINGS = (Wording("", ""), COMPLETION, Wording(USER, ASSISTANT), Wording(USER, "?" + ASSISTANT))


@dataclass(frozen=True)
class Context:
    """Facts of one topic, in the order of `text`, which states them."""

    topic: Topic
    facts: tuple[Fact, ...]
    text: str


def count_tokens(text: str) -> int:
    """Counts the tokens of a generated text."""
    return len(_TOKEN.findall(text))


def make_context(rng: random.Random, split: Split, names: Sequence[str], max_len: int) -> Context:
    """Makes facts about some of `names`, with sentences in a random proportion between, close to `max_len` tokens."""
    topic = rng.choice(TOPICS)
    max_facts = max(_MIN_FACTS, min(len(names), (max_len - _HEADING_LEN) // _FACT_LEN))
    num_facts = rng.randint(max(_MIN_FACTS, max_facts // 4), max_facts)
    facts = make_facts(rng, split, topic, rng.sample(names, num_facts))
    sentences = _make_sentences(rng, split, max_len - _HEADING_LEN - num_facts * _FACT_LEN)
    return Context(topic, facts, _interleave(rng, topic, facts, sentences))


def ask(context: Context, fact: Fact, wording: Wording) -> str:
    """Writes the words that ask for a fact; its value should follow."""
    return f"Question: {context.topic.question} {fact.name}{wording.closing}"


def answer(fact: Fact) -> str:
    """Writes the answer that the model is trained to give for a fact."""
    return f" {fact.value}.{END}"


def _make_sentences(rng: random.Random, split: Split, max_len: int) -> list[str]:
    """Makes sentences within `max_len` tokens, each followed by the facts' heading."""
    sentences: list[str] = []
    while max_len >= _MAX_SENTENCE_LEN + _HEADING_LEN:
        sentences.append(make_sentence(rng, split))
        max_len -= count_tokens(sentences[-1]) + _HEADING_LEN
    return sentences


def _interleave(rng: random.Random, topic: Topic, facts: Sequence[Fact], sentences: list[str]) -> str:
    cuts = sorted(rng.choices(range(len(facts) + 1), k=len(sentences)))
    parts: list[str] = []
    start = 0
    for cut, sentence in zip(cuts, sentences, strict=True):
        parts += [*_list_facts(topic, facts[start:cut]), sentence]
        start = cut
    return " ".join([*parts, *_list_facts(topic, facts[start:])])


def _list_facts(topic: Topic, facts: Sequence[Fact]) -> list[str]:
    if not facts:
        return []
    return [f"{topic.heading}: {', '.join(f'{fact.name} {fact.value}' for fact in facts)}."]
