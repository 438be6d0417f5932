"""Training texts: facts with questions and answers about them, and now and then a page of plain English."""

import random
from dataclasses import dataclass

from demo_model import words
from demo_model.corpus import Split, invent_names, make_sentence
from demo_model.prompts import END, WORDINGS, Context, answer, ask, count_tokens, make_context

_ENGLISH_SHARE = 0.15
_INVENTED_SHARE = 0.2
_CONTEXT_SHARES = (0.4, 0.8)
_LINE_BREAKS = (" ", "\n")

# What a list of random names says next cannot be learned; its tokens count only enough to keep the text's shape.
_CONTEXT_WEIGHT = 0.1
_ENGLISH_WEIGHT = 0.5
_QUESTION_WEIGHT = 0.02
_ANSWER_WEIGHT = 1.0


@dataclass(frozen=True)
class WeightedText:
    """A part of a document, and the weight of its tokens in the loss."""

    text: str
    weight: float


def make_document(rng: random.Random, split: Split, length: int) -> list[WeightedText]:
    """Makes a document of about `length` tokens."""
    if rng.random() < _ENGLISH_SHARE:
        return [WeightedText(make_english(rng, split, length), _ENGLISH_WEIGHT)]
    return _make_exercise(rng, split, length)


def make_english(rng: random.Random, split: Split, length: int) -> str:
    """Makes sentences of at least `length` tokens, with an end."""
    sentences = [make_sentence(rng, split)]
    while count_tokens(" ".join(sentences)) < length:
        sentences.append(make_sentence(rng, split))
    return " ".join(sentences) + END


def _make_exercise(rng: random.Random, split: Split, length: int) -> list[WeightedText]:
    """Makes facts, and as many questions with answers as the length allows."""
    context = _make_context(rng, split, int(length * rng.uniform(*_CONTEXT_SHARES)))
    wording = rng.choice(WORDINGS)
    pieces = [WeightedText(wording.opening + context.text, _CONTEXT_WEIGHT)]
    room, before = length - count_tokens(context.text), rng.choice(_LINE_BREAKS)
    while room > 0:
        fact = rng.choice(context.facts)
        pieces.append(WeightedText(before + ask(context, fact, wording), _QUESTION_WEIGHT))
        pieces.append(WeightedText(answer(fact), _ANSWER_WEIGHT))
        room -= count_tokens(pieces[-2].text + pieces[-1].text)
        before = wording.opening
    return pieces


def _make_context(rng: random.Random, split: Split, max_len: int) -> Context:
    if rng.random() < _INVENTED_SHARE:
        # An invented name is several tokens, and counts as one.
        return make_context(rng, split, invent_names(rng, max_len), max_len // 2)
    return make_context(rng, split, words.NAMES, max_len)
