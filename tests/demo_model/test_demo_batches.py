"""What a training step sees: repeats that can be looked up, texts with their weights, the same for the same seed."""

import itertools
import random

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from demo_model import CHECKPOINT
from demo_model.batches import make_repeats, make_texts


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(CHECKPOINT)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def test_every_counted_repeat_stood_there_before(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = make_repeats(random.Random(0), tokenizer, 16, 64)
    for tokens, weights in zip(batch.token_ids.tolist(), batch.weights.tolist(), strict=True):
        pairs = list(itertools.pairwise(tokens))
        counted = [index for index in range(1, 64) if weights[index]]
        assert counted
        assert all(pairs[index - 1] in pairs[: index - 1] for index in counted)


def test_texts_count_their_answers_fully(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = make_texts(random.Random(1), tokenizer, 16, 128)
    assert batch.token_ids.shape == batch.weights.shape == (16, 128)
    ends = batch.token_ids == tokenizer.eos_token_id
    assert (batch.weights[ends] >= 0.5).all()
    assert (batch.weights == 1.0).sum() >= ends.sum()


def test_batches_follow_from_the_seed(tokenizer: PreTrainedTokenizerFast) -> None:
    for make in (make_repeats, make_texts):
        first, again = (make(random.Random(2), tokenizer, 4, 64) for _ in range(2))
        assert torch.equal(first.token_ids, again.token_ids)
        assert torch.equal(first.weights, again.weights)
