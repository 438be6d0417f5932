"""Generated text for the demo model: lists of facts with questions about them, and plain English sentences."""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from demo_model import words

END = "<|end|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"

_SPLIT_MODULUS = 8


class Split(Enum):
    """Which part of the generated language a text is drawn from; no fact or sentence is in both."""

    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True)
class Topic:
    """What a list of facts is about: its heading, how one asks about a name, and the possible values."""

    heading: str
    question: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Fact:
    """A name and the value that a prompt gives it."""

    name: str
    value: str


@dataclass(frozen=True)
class Piece:
    """A stretch of training text and how much its tokens count in the loss."""

    text: str
    weight: float


TOPICS = (
    Topic("Rooms", "which room has", words.NUMBERS),
    Topic("Seats", "which seat has", words.NUMBERS),
    Topic("Ages", "how old is", words.NUMBERS),
    Topic("Pets", "which pet has", words.ANIMALS),
    Topic("Colours", "which colour has", words.COLOURS),
    Topic("Fruits", "which fruit has", words.FRUITS),
)


def split_of_fact(name: str, value: str, values: tuple[str, ...]) -> Split:
    """The only split in which `name` may have `value`: every eighth diagonal of the table is held out."""
    diagonal = words.NAMES.index(name) + values.index(value)
    return Split.HELD_OUT if diagonal % _SPLIT_MODULUS == 0 else Split.TRAIN


def split_of_sentence(sentence: str) -> Split:
    """The only split in which `sentence` may occur."""
    return Split.HELD_OUT if zlib.crc32(sentence.encode()) % _SPLIT_MODULUS == 0 else Split.TRAIN
