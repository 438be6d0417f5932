import pytest

from engine.events import Finished, TierTokens
from wire.ids import AttemptId
from wire.sampling import FinishReason, Logprobs
from worker.stopwatch import Span
from worker.update import NOTHING_NEW, ChoiceTokens, End, PromptScores, Update

ID = AttemptId("r")
END = End(spans=(Span("prefill.queue", 1, 2),))
LOGPROBS = Logprobs(-0.5, ((7, -0.5), (8, -1.0)))


def test_tokens_of_a_choice_join() -> None:
    first = ChoiceTokens(2, 5, (70,), (LOGPROBS,))
    second = ChoiceTokens(2, 6, (80,), (LOGPROBS,))
    last = ChoiceTokens.finished(Finished(ID, 2, FinishReason.STOP, 80), num_output=7)
    assert first.followed_by(second).followed_by(last) == ChoiceTokens(
        2, 5, (70, 80), (LOGPROBS, LOGPROBS), FinishReason.STOP, 80
    )


def test_updates_join_choice_by_choice() -> None:
    tiers = TierTokens({"host": 32})
    first = Update((ChoiceTokens(0, 3, (1, 2)), ChoiceTokens(1, 4, (5,))), prompt=tiers)
    second = Update((ChoiceTokens(1, 5, (6,)), ChoiceTokens(2, 1, (9,))), num_held=4, releases_hold=True, end=END)
    assert first.followed_by(second) == Update(
        (ChoiceTokens(0, 3, (1, 2)), ChoiceTokens(1, 4, (5, 6)), ChoiceTokens(2, 1, (9,))),
        prompt=tiers,
        num_held=4,
        releases_hold=True,
        end=END,
    )


def test_nothing_new_changes_nothing() -> None:
    update = Update((ChoiceTokens(0, 3, (1, 2)),), prompt=TierTokens({}, 3), num_held=4, end=END)
    assert NOTHING_NEW.followed_by(update) == update


@pytest.mark.parametrize("num_tokens", range(9))
def test_a_cut_update_is_told_in_order_and_whole(num_tokens: int) -> None:
    scores = PromptScores(3, (LOGPROBS,) * 3)
    choices = (ChoiceTokens(0, 5, (1, 2), (LOGPROBS,) * 2), ChoiceTokens(1, 0, (7, 8, 9), (), FinishReason.LENGTH))
    update = Update(choices, TierTokens({}, 3), 4, releases_hold=True, end=END, scores=scores)
    head, rest = update.cut(num_tokens)
    assert (head.num_tokens, rest.num_tokens) == (num_tokens, 8 - num_tokens)
    assert head == Update(head.choices, scores=head.scores)
    assert head.followed_by(rest) == update
    assert not (head.choices and rest.scores)
