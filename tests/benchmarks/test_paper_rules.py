"""SnapKV and H2O by their papers: with the whole budget as transformers, else each head keeps its own tokens."""

import random

import pytest
import torch
import transformers

from benchmarks.paper_rules import H2O, PaperBackend, PaperRule, SnapKV, Votes
from benchmarks.quality_backends import CutText, TransformersBackend
from demo_model import CHECKPOINT

_DRAW = random.Random(5)
_TEXT = CutText.cut([_DRAW.randrange(10, 1000) for _ in range(150)], 120)


@pytest.mark.parametrize("rule", [SnapKV(1.0), H2O(2.0)])
def test_a_budget_for_all_tokens_changes_nothing(rule: PaperRule) -> None:
    ours, reference = PaperBackend(CHECKPOINT, rule), TransformersBackend(CHECKPOINT)
    assert ours.generate([_TEXT], 16) == reference.generate([_TEXT], 16)
    assert ours.log_likelihood(_TEXT) == pytest.approx(reference.log_likelihood(_TEXT), rel=1e-5)


@pytest.mark.parametrize("rule", [SnapKV(0.4), H2O(0.25)])
def test_a_small_budget_changes_the_text(rule: PaperRule) -> None:
    whole = TransformersBackend(CHECKPOINT).log_likelihood(_TEXT)
    assert abs(PaperBackend(CHECKPOINT, rule).log_likelihood(_TEXT) / whole - 1) > 1e-3


def test_votes_are_the_attention_of_the_last_rows() -> None:
    votes = Votes(1, num_watched=3)
    weights = torch.rand(2, 4, 10, 10)
    votes.add(0, weights[:, :, :8], rows_left=2)
    votes.add(0, weights[:, :, 8:], rows_left=0)
    assert torch.allclose(votes.of[0], weights[:, :, 7:].sum((1, 2)))


def test_snapkv_keeps_neighbours_and_the_watched_rows() -> None:
    votes = torch.zeros(2, 100)
    votes[0, 10] = votes[1, 50] = 1.0
    kept = SnapKV(0.39).keep(votes, 39)
    assert kept[0].tolist() == [*range(7, 14), *range(68, 100)]
    assert kept[1].tolist() == [*range(47, 54), *range(68, 100)]


def test_h2o_keeps_half_of_the_latest() -> None:
    votes = torch.arange(10, 0, -1).float()[None]
    assert H2O(0.4).keep(votes, 4).tolist() == [[0, 1, 8, 9]]


def test_bytes_count_kept_tokens() -> None:
    config = transformers.AutoConfig.from_pretrained(CHECKPOINT)
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    kept: dict[PaperRule, int] = {SnapKV(0.5): 60 + 30, H2O(0.25): 30}
    for rule, num_tokens in kept.items():
        assert PaperBackend(CHECKPOINT, rule).bytes_per_token(_TEXT) == num_tokens * token_bytes / 150
