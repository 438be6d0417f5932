"""The batch of a training step."""

import random
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from demo_model.corpus import Split, make_sentence
from demo_model.documents import WeightedText, make_document

_MIN_PERIOD = 4


@dataclass(frozen=True)
class TrainingBatch:
    """The batch of a step: `token_ids` int64 [num_rows, length], and `weights` in the loss, of the same shape."""

    token_ids: torch.Tensor
    weights: torch.Tensor


def make_repeats(rng: random.Random, tokenizer: PreTrainedTokenizerFast, num_rows: int, length: int) -> TrainingBatch:
    """Makes rows that repeat random tokens, each with its period, weighted from the second round on.

    To guess them a model finds the current token's last occurrence and the token after it: the skill that recall needs,
    learned fastest so.
    """
    token_ids = torch.empty(num_rows, length, dtype=torch.int64)
    weights = torch.zeros(num_rows, length)
    for row in range(num_rows):
        period = rng.randint(_MIN_PERIOD, length // 2)
        tokens = torch.tensor(rng.sample(range(len(tokenizer)), period))
        token_ids[row] = tokens.repeat(length // period + 1)[:length]
        weights[row, period + 1 :] = 1.0
    return TrainingBatch(token_ids, weights)


def make_texts(rng: random.Random, tokenizer: PreTrainedTokenizerFast, num_rows: int, length: int) -> TrainingBatch:
    """Makes rows of a training document each, cut at `length`."""
    token_ids = torch.empty(num_rows, length, dtype=torch.int64)
    weights = torch.empty(num_rows, length)
    for row in range(num_rows):
        token_ids[row], weights[row] = _encode(tokenizer, make_document(rng, Split.TRAIN, length), length)
    return TrainingBatch(token_ids, weights)


def make_loops(rng: random.Random, tokenizer: PreTrainedTokenizerFast, num_rows: int, length: int) -> TrainingBatch:
    """Makes rows that repeat a sentence, all tokens weighted alike."""
    token_ids = torch.empty(num_rows, length, dtype=torch.int64)
    for row in range(num_rows):
        tokens = tokenizer(f" {make_sentence(rng, Split.TRAIN)}", add_special_tokens=False)["input_ids"]
        token_ids[row] = torch.tensor(tokens).repeat(length // len(tokens) + 1)[:length]
    return TrainingBatch(token_ids, torch.ones(num_rows, length))


def _encode(
    tokenizer: PreTrainedTokenizerFast, pieces: list[WeightedText], length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes a document's first `length` tokens and their weights, each [length]."""
    encoded = tokenizer([piece.text for piece in pieces], add_special_tokens=False)["input_ids"]
    token_ids = [token for tokens in encoded for token in tokens]
    weights = [piece.weight for piece, tokens in zip(pieces, encoded, strict=True) for _ in tokens]
    return torch.tensor(token_ids[:length]), torch.tensor(weights[:length])
