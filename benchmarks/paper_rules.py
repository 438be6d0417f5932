"""SnapKV and H2O as their papers have them, by head, on dense attention in torch; the product keeps whole pages.

SnapKV (arXiv 2404.14469): the last 32 rows of a prompt vote for its tokens, votes are pooled over 7 neighbours, and
each head keeps the tokens with the most votes beside these rows. What is generated stays.
H2O (arXiv 2306.14048): all rows vote, each head keeps half of its budget for the latest tokens and half for the tokens
with the most votes, and loses one at each step.

A KV head's votes are the sum over its query heads.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn.functional import max_pool1d
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache

from benchmarks.quality_backends import CutText, log_likelihood, until_end

_ATTENTION = "attention_with_votes"
_NUM_WATCHED, _NUM_POOLED = 32, 7
_ROWS_AT_ONCE = 512


class PaperRule(Protocol):
    """A choice of the tokens whose KV each head keeps."""

    @property
    def num_watched(self) -> int | None:
        """The last rows of a prompt that vote; None for all rows."""
        ...

    def budget(self, num_prompt: int, num_generated: int) -> int:
        """Returns the tokens that each head keeps."""
        ...

    def keep(self, votes: torch.Tensor, budget: int) -> torch.Tensor:
        """Chooses kept places, int64 [num_kv_heads, kept], ascending. votes: float32 [num_kv_heads, tokens]."""
        ...


@dataclass(frozen=True)
class SnapKV:
    """The rule of SnapKV's paper. share: the part of a prompt's tokens that each head keeps."""

    share: float
    num_watched: int | None = _NUM_WATCHED

    def budget(self, num_prompt: int, num_generated: int) -> int:
        return round(self.share * num_prompt) + num_generated

    def keep(self, votes: torch.Tensor, budget: int) -> torch.Tensor:
        pooled = max_pool1d(votes[:, :-_NUM_WATCHED], _NUM_POOLED, stride=1, padding=_NUM_POOLED // 2)
        return _with_latest(pooled, budget, _NUM_WATCHED)


@dataclass(frozen=True)
class H2O:
    """The rule of H2O's paper. share: the budget over a prompt's length."""

    share: float
    num_watched: int | None = None

    def budget(self, num_prompt: int, num_generated: int) -> int:
        return round(self.share * num_prompt)

    def keep(self, votes: torch.Tensor, budget: int) -> torch.Tensor:
        num_latest = budget // 2
        return _with_latest(votes[:, : votes.shape[1] - num_latest], budget, num_latest)


PAPER_RULES: dict[str, PaperRule] = {
    "snapkv=25%, by its paper": SnapKV(0.25),
    "h2o=25%, by its paper": H2O(0.25),
    "h2o=10%, by its paper": H2O(0.1),
}


def _with_latest(votes: torch.Tensor, budget: int, num_latest: int) -> torch.Tensor:
    """Chooses the earlier tokens with the most votes, and all latest ones. votes: a number for each earlier token."""
    num_heads, num_earlier = votes.shape
    heaviest = votes.topk(min(budget - num_latest, num_earlier), -1).indices.sort(-1).values
    latest = torch.arange(num_earlier, num_earlier + num_latest).expand(num_heads, -1)
    return torch.cat([heaviest, latest], -1)


class Votes:
    """Sums of attention weights by layer: float32 [num_kv_heads, tokens]. num_watched: the last rows that count."""

    def __init__(self, num_layers: int, num_watched: int | None) -> None:
        self.of: list[torch.Tensor] = [torch.zeros(1, 0)] * num_layers
        self._num_watched = num_watched

    def add(self, layer: int, weights: torch.Tensor, rows_left: int) -> None:
        """Adds rows' weights, [num_kv_heads, query heads of each, rows, tokens]; rows_left: rows that follow them."""
        num_rows = weights.shape[2]
        first = 0 if self._num_watched is None else max(0, num_rows + rows_left - self._num_watched)
        total = torch.zeros(weights.shape[0], weights.shape[3])
        total[:, : self.of[layer].shape[1]] = self.of[layer]
        self.of[layer] = total + weights[:, :, first:].sum((1, 2))


def attention_with_votes(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float,
    votes: Votes,
    **settings: object,
) -> tuple[torch.Tensor, None]:
    """Attends causally to all keys, rows of the batch's one sequence at their end; adds the weights to votes."""
    num_heads, num_rows, width = query.shape[1:]
    num_kv_heads, num_tokens = key.shape[1:3]
    rows = query[0].view(num_kv_heads, num_heads // num_kv_heads, num_rows, width)
    outputs = []
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, num_rows)
        scores = (rows[:, :, start:stop] @ key[0][:, None].transpose(-1, -2)).float() * scaling
        positions = torch.arange(start, stop)[:, None] + num_tokens - num_rows
        weights = scores.masked_fill_(torch.arange(num_tokens) > positions, -torch.inf).softmax(-1)
        votes.add(module.layer_idx, weights, num_rows - stop)
        outputs.append(weights.to(value.dtype) @ value[0][:, None])
    return torch.cat(outputs, 2).view(1, num_heads, num_rows, width).transpose(1, 2), None


@dataclass
class _Kept:
    """The KV that is left of a prompt and of generated tokens, and its votes."""

    prompt_ids: tuple[int, ...]
    votes: Votes
    cache: Any = field(default_factory=DynamicCache)
    num_generated: int = 0

    @property
    def num_run(self) -> int:
        return len(self.prompt_ids) + self.num_generated


class PaperBackend:
    """A model in transformers, under a rule of a paper."""

    def __init__(self, folder: Path, rule: PaperRule, dtype: torch.dtype = torch.float32) -> None:
        AttentionInterface.register(_ATTENTION, attention_with_votes)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=_ATTENTION)
        self._model = model.eval()
        self._rule = rule
        end = model.generation_config.eos_token_id
        self._end_ids = frozenset(end if isinstance(end, list) else [end])
        self._last: _Kept | None = None

    def generate(self, texts: Sequence[CutText], max_tokens: int) -> list[list[int]]:
        """Continues each text greedily, up to and without the end of text."""
        return [until_end(self._continue(text, max_tokens), self._end_ids) for text in texts]

    @torch.inference_mode()
    def log_likelihood(self, text: CutText) -> float:
        """Sums the natural log-probabilities of given tokens but the first."""
        kept = self._prefill(text.prompt_ids)
        logits = [self._step(kept, token_id) for token_id in text.given_ids[:-1]]
        return log_likelihood(torch.stack(logits), text.given_ids[1:])

    @torch.inference_mode()
    def bytes_per_token(self, text: CutText) -> float:
        """Computes the bytes of kept KV a token, once the given tokens are run."""
        kept = self._prefill(text.prompt_ids)
        for token_id in text.given_ids:
            self._step(kept, token_id)
        num_bytes: int = sum(one.nbytes for layer in kept.cache.layers for one in (layer.keys, layer.values))
        return num_bytes / kept.num_run

    @torch.inference_mode()
    def _continue(self, text: CutText, max_tokens: int) -> list[int]:
        kept = self._prefill(text.prompt_ids)
        answer: list[int] = []
        for token_id in text.given_ids:
            logits = self._step(kept, token_id)
        while len(answer) < max_tokens:
            answer.append(int(logits.argmax()))
            logits = self._step(kept, answer[-1])
        return answer

    def _prefill(self, prompt_ids: tuple[int, ...]) -> _Kept:
        """Returns what is left of a prompt. Questions about one text, which follow one another, compute it once."""
        if self._last is None or self._last.prompt_ids != prompt_ids:
            self._last = _Kept(prompt_ids, Votes(self._model.config.num_hidden_layers, self._rule.num_watched))
            self._run(self._last, prompt_ids, 0)
            self._drop(self._last)
        return copy.deepcopy(self._last)

    def _step(self, kept: _Kept, token_id: int) -> torch.Tensor:
        logits = self._run(kept, (token_id,), kept.num_run)
        kept.num_generated += 1
        self._drop(kept)
        return logits

    def _run(self, kept: _Kept, token_ids: Sequence[int], position: int) -> torch.Tensor:
        """Runs tokens behind the kept ones; returns the last one's logits, float32 [vocabulary]."""
        positions = torch.arange(position, position + len(token_ids))[None]
        found = self._model(torch.tensor([token_ids]), None, positions, kept.cache, votes=kept.votes, logits_to_keep=1)
        return found.logits[0, -1].float()  # type: ignore[no-any-return]

    def _drop(self, kept: _Kept) -> None:
        """Leaves each head of each layer its budget."""
        budget = self._rule.budget(len(kept.prompt_ids), kept.num_generated)
        for place, (layer, votes) in enumerate(zip(kept.cache.layers, kept.votes.of, strict=True)):
            if votes.shape[1] > budget:
                chosen = self._rule.keep(votes, budget)
                taken = chosen[None, :, :, None].expand(-1, -1, -1, layer.keys.shape[-1])
                layer.keys, layer.values = layer.keys.gather(2, taken), layer.values.gather(2, taken)
                kept.votes.of[place] = votes.gather(1, chosen)
