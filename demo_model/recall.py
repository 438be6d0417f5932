"""The recall task, which measures the demo model: a prompt states facts and asks for a value."""

import random
from dataclasses import dataclass
from enum import IntEnum

from demo_model import words
from demo_model.corpus import Fact, Split
from demo_model.prompts import WORDINGS, Context, ask, count_tokens, make_context

_MAX_QUESTION_LEN = count_tokens("<|user|> Question: which colour has Penny?<|assistant|>")


class Depth(IntEnum):
    """The third of a prompt's facts that has the asked fact."""

    EARLY = 0
    MIDDLE = 1
    LATE = 2


@dataclass(frozen=True)
class RecallPrompt:
    """A prompt, and the word that should follow."""

    text: str
    value: str


def make_recall_prompt(rng: random.Random, split: Split, max_len: int, depth: Depth) -> RecallPrompt:
    """Makes a prompt of close to `max_len` tokens, never more, in a random wording."""
    wording = rng.choice(WORDINGS)
    context = make_context(rng, split, words.NAMES, max_len - _MAX_QUESTION_LEN)
    fact = _choose_fact(rng, context, depth)
    return RecallPrompt(f"{wording.opening}{context.text} {ask(context, fact, wording)}", fact.value)


def is_right(prompt: RecallPrompt, continuation: str) -> bool:
    """Tells whether an answer is exactly the asked value."""
    return continuation.strip().removesuffix(".") == prompt.value


def _choose_fact(rng: random.Random, context: Context, depth: Depth) -> Fact:
    num_facts = len(context.facts)
    first = num_facts * depth // len(Depth)
    end = num_facts * (depth + 1) // len(Depth)
    return context.facts[rng.randrange(first, max(end, first + 1))]
