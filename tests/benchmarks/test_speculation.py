from itertools import pairwise

import pytest

from benchmarks.speculation import DEMO_MODEL, Contender, Load, Outcome, compare, make_loads
from engine.checkpoint.checkpoint import Checkpoint
from wire.sampling import SamplingParams

LOAD = Load("a load", [[1, 2]], SamplingParams())


class Fixed(Contender):
    """Takes so many seconds and gives such tokens."""

    def __init__(self, seconds: float, tokens: list[int]) -> None:
        self._outcome = Outcome(seconds, {"0": tokens}, num_guessed=4, num_accepted=3)

    def run(self, load: Load) -> Outcome:
        return self._outcome


def test_ratios_are_over_the_first() -> None:
    figures = compare({"none": Fixed(2.0, [5, 6]), "n-gram": Fixed(0.5, [5, 6])}, LOAD, 3)
    assert figures == {"a load: n-gram": 4.0, "a load: n-gram, guesses accepted": 0.75}


def test_other_tokens_end_the_run() -> None:
    with pytest.raises(SystemExit, match="gives other tokens"):
        compare({"none": Fixed(2.0, [5, 6]), "n-gram": Fixed(0.5, [5, 7])}, LOAD, 1)


def test_loads_repeat_or_do_not() -> None:
    tokenizer = Checkpoint(DEMO_MODEL).load_tokenizer()
    repeats, english, fresh = make_loads(tokenizer, 1408, 240, 50, [2])
    for prompt in map(list, repeats.prompts):
        assert len(prompt) == 240
        assert len({*pairwise(prompt)}) < 40
    assert all(len({*pairwise(prompt)}) == 239 for prompt in fresh.prompts)
    assert all(len(prompt) == 240 and len({*pairwise(prompt)}) > 100 for prompt in english.prompts)
    assert repeats.sampling.temperature == 0
    assert fresh.sampling.temperature > 1
