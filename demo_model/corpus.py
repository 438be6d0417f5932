"""The demo model's generated language: facts about names, and plain English sentences.

Both have two disjoint splits: a fact and a sentence occur in one split only. So a model can answer about held-out facts
only from its prompt.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from demo_model import words

_SPLIT_MODULUS = 8


class Split(Enum):
    """The part of the generated language that a text is drawn from."""

    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True)
class Topic:
    """The subject of a list of facts: a heading, a question to be completed by a name, and the possible values."""

    heading: str
    question: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Fact:
    """A name and the value that a text gives it."""

    name: str
    value: str


TOPICS = (
    Topic("Rooms", "which room has", words.NUMBERS),
    Topic("Seats", "which seat has", words.NUMBERS),
    Topic("Ages", "how old is", words.NUMBERS),
    Topic("Pets", "which pet has", words.ANIMALS),
    Topic("Colours", "which colour has", words.COLOURS),
    Topic("Fruits", "which fruit has", words.FRUITS),
)


def split_of_fact(fact: Fact, topic: Topic) -> Split:
    """Returns a fact's split: in the table of names and values every eighth diagonal is held out."""
    diagonal = zlib.crc32(fact.name.encode()) + topic.values.index(fact.value)
    return Split.HELD_OUT if diagonal % _SPLIT_MODULUS == 0 else Split.TRAIN


def split_of_sentence(sentence: str) -> Split:
    """Returns a sentence's split."""
    return Split.HELD_OUT if zlib.crc32(sentence.encode()) % _SPLIT_MODULUS == 0 else Split.TRAIN


def invent_names(rng: random.Random, max_names: int) -> tuple[str, ...]:
    """Invents up to `max_names` different names, such as Bakoru."""
    return tuple(dict.fromkeys(_invent_name(rng) for _ in range(max_names)))


def make_facts(rng: random.Random, split: Split, topic: Topic, names: Sequence[str]) -> tuple[Fact, ...]:
    """Makes a fact of the split about each name."""
    return tuple(_make_fact(rng, split, topic, name) for name in names)


def make_sentence(rng: random.Random, split: Split) -> str:
    """Draws an English sentence of the split, without any name that a fact could be about."""
    while True:
        sentence = rng.choice(_SENTENCE_MAKERS)(rng)
        if split_of_sentence(sentence) is split:
            return sentence


def _invent_name(rng: random.Random) -> str:
    syllables = (rng.choice(words.CONSONANTS) + rng.choice(words.VOWELS) for _ in range(rng.randint(2, 3)))
    return "".join(syllables).capitalize()


def _make_fact(rng: random.Random, split: Split, topic: Topic, name: str) -> Fact:
    while True:
        fact = Fact(name, rng.choice(topic.values))
        if split_of_fact(fact, topic) is split:
            return fact


def _person(rng: random.Random) -> str:
    return f"the {rng.choice(words.ADJECTIVES)} {rng.choice(words.PEOPLE)}"


def _going(rng: random.Random) -> str:
    person = _person(rng).capitalize()
    return f"{person} {rng.choice(words.MOTIONS)} {rng.choice(words.DIRECTIONS)} {rng.choice(words.PLACES)}."


def _doing(rng: random.Random) -> str:
    person = _person(rng).capitalize()
    return f"{person} {rng.choice(words.DEEDS)} a {rng.choice(words.THINGS)} {rng.choice(words.TIMES)}."


def _being(rng: random.Random) -> str:
    thing, place = rng.choice(words.THINGS), rng.choice(words.PLACES)
    return f"The {thing} in the {place} is {rng.choice(words.COLOURS)} and {rng.choice(words.QUALITIES)}."


def _keeping_company(rng: random.Random) -> str:
    time, animal = rng.choice(words.TIMES).capitalize(), rng.choice(words.ANIMALS)
    return f"{time} the {animal} {rng.choice(words.MOTIONS)} with {_person(rng)}."


_SENTENCE_MAKERS: tuple[Callable[[random.Random], str], ...] = (_going, _doing, _being, _keeping_company)
