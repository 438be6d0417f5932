import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.model.sampler import Draw, choose, likeliest, logprobs_of, score, uniform
from wire.sampling import Logprobs, SamplingParams

VOCAB = 50


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def draw(position: int = 0, choice: int = 0, output: tuple[int, ...] = (), **settings: Any) -> Draw:
    return Draw(
        params=SamplingParams(**{"seed": 7, **settings}), choice=choice, prompt_ids=(1,) * position, output_ids=output
    )


def chosen(rows: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    tokens: list[int] = choose(rows, draws).token_ids.tolist()
    return tokens


def drawn_tokens(row: torch.Tensor, num: int, **settings: Any) -> list[int]:
    draws = [draw(position, **settings) for position in range(num)]
    return chosen(row.expand(num, VOCAB).clone(), draws)


def test_greedy_takes_the_likeliest() -> None:
    rows = logits(3)
    assert chosen(rows.clone(), [draw(temperature=0.0)] * 3) == rows.argmax(-1).tolist()


def test_a_bias_is_added_to_its_token_alone_and_leaves_logprobs_as_they_are() -> None:
    rows = logits(2)
    first, last = (int(row.argmin()) for row in rows)
    draws = [draw(temperature=0.0, logit_bias=((first, 100.0),), logprobs=1), draw(temperature=0.0)]
    drawn = choose(rows.clone(), draws)
    assert drawn.token_ids.tolist() == [first, int(rows[1].argmax())]
    [scores] = drawn.scores
    assert scores.rows == [0]
    assert logprobs_of(scores.numbers)[0].chosen == pytest.approx(float(rows[0].log_softmax(-1)[first]))
    assert not draws[0].is_plain
    assert draws[1].is_plain
    banned = draw(temperature=0.0, logit_bias=((last, -100.0),), output=())
    assert chosen(rows[1:].clone(), [banned]) != [last]


def test_uniform_depends_on_seed_choice_and_position_and_on_nothing_else() -> None:
    assert uniform(1, 2, 3) == uniform(1, 2, 3)
    assert len({uniform(1, 2, 3), uniform(2, 2, 3), uniform(1, 3, 3), uniform(1, 2, 4), uniform(2, 1, 3)}) == 5
    values = [uniform(2**63 - 1, 0, position) for position in range(4000)]
    assert all(0 <= value < 1 for value in values)
    assert abs(sum(values) / 4000 - 0.5) < 0.02


def test_a_draw_is_the_same_alone_and_in_a_batch() -> None:
    rows = logits(8)
    draws = [draw(position, temperature=0.9, top_p=0.95) for position in range(8)]
    together = chosen(rows.clone(), draws)
    alone = [chosen(rows[i : i + 1].clone(), draws[i : i + 1])[0] for i in range(8)]
    assert together == alone


def test_frequencies_follow_the_softmax() -> None:
    row = torch.full((1, VOCAB), -20.0)
    row[0, :3] = torch.tensor([0.6, 0.3, 0.1]).log()
    tokens = drawn_tokens(row, 4000)
    shares = [tokens.count(token) / 4000 for token in range(3)]
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.03)


def test_temperature_sharpens() -> None:
    row = torch.full((1, VOCAB), -20.0)
    row[0, :2] = torch.tensor([0.6, 0.4]).log()
    assert drawn_tokens(row, 500, temperature=0.2).count(0) / 500 == pytest.approx(0.6**5 / (0.6**5 + 0.4**5), abs=0.05)


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0}, {0}),
        ({"top_p": 0.45}, {0}),
        ({"top_p": 0.55}, {0, 1}),
        ({"min_p": 0.5}, {0, 1}),
    ],
)
def test_cuts_keep_the_head_of_the_distribution(settings: dict[str, object], allowed: set[int]) -> None:
    row = torch.full((1, VOCAB), -20.0)
    row[0, :4] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(drawn_tokens(row, 400, **settings)) == allowed


def test_top_p_counts_within_what_top_k_left() -> None:
    row = torch.full((1, VOCAB), -20.0)
    row[0, :4] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert set(drawn_tokens(row, 400, top_k=2, top_p=0.55)) == {0}


def test_penalties_by_the_formulas() -> None:
    row = logits()
    one = Draw(
        params=SamplingParams(
            temperature=0, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logprobs=0
        ),
        choice=0,
        prompt_ids=(3,),
        output_ids=(4, 4),
    )
    expected = row.clone()
    for token in (3, 4):
        expected[0, token] = expected[0, token] / 2 if expected[0, token] > 0 else expected[0, token] * 2
    expected[0, 4] -= 0.5 + 2 * 0.25
    choose(given := row.clone(), [one])
    torch.testing.assert_close(given, expected)


def test_banned_tokens_do_not_come() -> None:
    row = logits()
    best = int(row.argmax())
    one = Draw(params=SamplingParams(temperature=0), choice=0, prompt_ids=(1,), output_ids=(), banned=(best,))
    assert chosen(row, [one]) != [best]


def test_logprobs_are_of_the_distribution_before_any_setting() -> None:
    row = logits()
    expected = torch.log_softmax(row, -1)[0]
    one = choose(row.clone(), [draw(temperature=0.3, top_k=3, logprobs=5, presence_penalty=1.0, output=(2,))])
    [logprobs] = logprobs_of(one.scores[0].numbers)
    assert logprobs.chosen == pytest.approx(float(expected[one.token_ids[0]]))
    assert [token for token, _ in logprobs.top] == expected.topk(5).indices.tolist()


def test_a_row_that_is_no_number_spoils_only_itself() -> None:
    rows = logits(3)
    rows[1, 4] = torch.nan
    expected = rows.argmax(-1).tolist()
    assert chosen(rows, [draw(temperature=0.0)] * 3) == [expected[0], -1, expected[2]]


def test_likeliest_is_the_first_of_equals_and_none_of_a_row_with_no_number() -> None:
    rows = logits(7)
    rows[0, 11] = rows[0, 30] = 50.0
    rows[1, 4], rows[2, 5], rows[3, 6] = torch.nan, torch.inf, -torch.inf
    rows[4, 7] = torch.finfo(torch.float32).min
    expected = rows.argmax(-1).tolist()
    assert expected[0] == 11
    assert likeliest(rows).tolist() == [11, -1, -1, -1, *expected[4:]]


def test_scores_of_many_rows_are_of_the_softmax_and_none_of_a_row_with_no_number() -> None:
    rows = logits(70)
    rows[3, 4], rows[65, 5] = torch.nan, -torch.inf
    token_ids = [row % VOCAB for row in range(70)]
    found = logprobs_of(score(rows, token_ids, 2))
    expected = torch.log_softmax(rows, -1)
    for row, (one, token_id) in enumerate(zip(found, token_ids, strict=True)):
        if row in (3, 65):
            assert math.isnan(one.chosen)
        else:
            values, ids = expected[row].topk(2)
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
            assert one == Logprobs(float(expected[row, token_id]), top)
