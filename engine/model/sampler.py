"""From logits to tokens. Random numbers come from a counter, never from a state: the same seed, choice and position
give the same draw in every batch, process and attempt.

Order: logit_bias, penalties, min_tokens, grammar, temperature, top_k, top_p, min_p. Log-probabilities are of the
model's own distribution, before all of these. Source of the generator: Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3" (SC '11).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.grammar.matcher import Matcher
from wire.errors import BatonError
from wire.sampling import Logprobs, SamplingParams

SCORED_AT_ONCE = 64
LEAST = torch.finfo(torch.float32).min
"""The logit of a token that a grammar forbids: `likeliest` takes an infinite one for a fault of the model."""
_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Draw:
    """A row of logits and the way to choose from it. `banned` are the tokens that may not come yet (min_tokens).

    matcher: of the grammar that the choice must follow, if any; `Masks` has what follows from it.
    """

    params: SamplingParams
    choice: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    banned: Sequence[int] = ()
    matcher: Matcher | None = None

    @property
    def position(self) -> int:
        """Of the token to be drawn, counted over prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_plain(self) -> bool:
        """True where the next token is the likeliest, without log-probabilities."""
        params = self.params
        is_as_is = not (params.has_penalties or params.logit_bias or self.banned or self.matcher)
        return params.is_greedy and is_as_is and params.logprobs is None


@dataclass(frozen=True)
class Masks:
    """The tokens that grammars forbid. forbidden: bool [M, V], on the host, of these M rows of a step's draws.

    faults: of rows where nothing is allowed, by row.
    """

    rows: Sequence[int]
    forbidden: torch.Tensor
    faults: Mapping[int, BatonError] = field(default_factory=dict)

    def apply(self, logits: torch.Tensor) -> None:
        """Masks rows of `logits` [R, V] float32 in place."""
        if len(self.rows) == len(logits):
            logits.masked_fill_(self.forbidden.to(logits.device), LEAST)
        elif self.rows:
            rows = torch.tensor(self.rows, device=logits.device)
            logits[rows] = logits[rows].masked_fill_(self.forbidden.to(logits.device), LEAST)


NO_MASKS = Masks((), torch.empty(0, 0, dtype=torch.bool))


@dataclass(frozen=True)
class Drawn:
    """A token, or None where the row had a value that is no number, or its grammar allows no token."""

    token_id: int | None
    logprobs: Logprobs | None = None


@torch.inference_mode()
def sample(logits: torch.Tensor, draws: Sequence[Draw], masks: Masks = NO_MASKS) -> list[Drawn]:
    """Draws a token for each row of `logits` [R, V] float32, which it may modify. Rows do not influence one another."""
    is_finite = torch.isfinite(logits).all(dim=-1).tolist()
    logprobs = _logprobs_wanted(logits, draws)
    _penalize(logits, draws)
    masks.apply(logits)
    tokens = _greedy(logits) if all(draw.params.is_greedy for draw in draws) else _mixed(logits, draws)
    return [
        Drawn(token, _logprobs_of(logprobs.get(row), token, draws[row]))
        if is_finite[row] and row not in masks.faults
        else Drawn(None)
        for row, token in enumerate(tokens)
    ]


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Finds the likeliest token of each row [R, V] float32; returns int64 [R], on the host.

    The first of equals; -1 for a row with a value that is no number, or infinite.
    """
    # argmax takes NaN for the greatest, as amin takes it for the least.
    best = argmax(logits)
    span = logits.gather(1, best[:, None]).squeeze(1) - logits.amin(-1)
    return torch.where(span < torch.inf, best, -1).cpu()


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Finds the place of the greatest value of each row [R, V], int64 [R]; numpy is ten times as fast on a CPU."""
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.is_cpu else logits.argmax(-1)


@torch.inference_mode()
def score(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> tuple[Logprobs, ...] | None:
    """Scores the token that follows each row of `logits` [R, V] float32; None where a value is no number.

    Takes the rows by 64, so that their log-probabilities need little memory.
    """
    if not bool(torch.isfinite(logits).all()):
        return None
    scored: list[Logprobs] = []
    for start in range(0, len(token_ids), SCORED_AT_ONCE):
        rows = torch.log_softmax(logits[start : start + SCORED_AT_ONCE], dim=-1)
        tokens = torch.tensor(token_ids[start : start + SCORED_AT_ONCE], device=rows.device)
        chosen = rows.gather(1, tokens[:, None]).squeeze(1).tolist()
        values, ids = rows.topk(min(num_top, rows.shape[1]))
        tops = (tuple(zip(*one, strict=True)) for one in zip(ids.tolist(), values.tolist(), strict=True))
        scored += map(Logprobs, chosen, tops)
    return tuple(scored)


def uniform(seed: int, choice: int, position: int) -> float:
    """Draws the number in [0, 1) of a seed, a choice and an absolute position (Philox 4x64)."""
    bits = int(np.random.Philox(key=[seed, choice], counter=position).random_raw())
    return (bits >> 11) * 2.0**-53


def _greedy(logits: torch.Tensor) -> list[int]:
    return [int(token) for token in argmax(logits).tolist()]


def _mixed(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    greedy = _greedy(logits)
    rows = [row for row, draw in enumerate(draws) if not draw.params.is_greedy]
    for row, token in zip(rows, _random(logits[rows], [draws[row] for row in rows]), strict=True):
        greedy[row] = token
    return greedy


def _random(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Inverts the cumulative distribution in the order of token ids.

    In any other order, such as that of probability, two tokens that are nearly as likely may trade places by rounding.
    """
    temperatures = _column([draw.params.temperature for draw in draws], logits)
    probs = _cut(torch.softmax(logits.double() / temperatures, dim=-1), [draw.params for draw in draws])
    cumulative = probs.cumsum(dim=-1)
    aim = _column([uniform(draw.params.seed, draw.choice, draw.position) for draw in draws], logits)
    # Rounding may put the aim on the very end: the last token that is possible at all is then meant.
    below_end = torch.nextafter(cumulative[:, -1:], torch.zeros_like(cumulative[:, -1:]))
    chosen = torch.searchsorted(cumulative, torch.minimum(aim * cumulative[:, -1:], below_end), right=True)
    return [int(token) for token in chosen.clamp_(max=probs.shape[1] - 1).squeeze(1).tolist()]


def _cut(probs: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Zeroes probabilities [R, V] by top_k, then top_p of the rest, then min_p; the result is not normalized."""
    if not any(one.top_k > 0 or one.top_p < 1 or one.min_p > 0 for one in params):
        return probs
    falling, order = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[1], device=probs.device)
    falling = falling * (ranks < _column([one.top_k if one.top_k > 0 else _NO_LIMIT for one in params], probs))
    falling = falling / falling.sum(dim=-1, keepdim=True)
    before = falling.cumsum(dim=-1) - falling
    in_nucleus = (before < _column([one.top_p for one in params], probs)) | (ranks == 0)
    above_floor = falling >= _column([one.min_p for one in params], probs) * falling[:, :1]
    return torch.zeros_like(probs).scatter_(1, order, falling * (in_nucleus & above_floor))


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)


def _penalize(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    for row, draw in enumerate(draws):
        for token_id, bias in draw.params.logit_bias:
            logits[row, token_id] += bias
        if draw.params.has_penalties:
            _penalize_row(logits[row], draw)
        if draw.banned:
            logits[row, list(draw.banned)] = -torch.inf


def _penalize_row(row: torch.Tensor, draw: Draw) -> None:
    """Penalizes repetition over prompt and output (Keskar et al., 2019), presence and frequency over output only."""
    params = draw.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*draw.prompt_ids, *draw.output_ids}), device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if draw.output_ids:
        ids, counts = torch.unique(torch.tensor(draw.output_ids, device=row.device), return_counts=True)
        row[ids] -= params.frequency_penalty * counts + params.presence_penalty


def _logprobs_wanted(logits: torch.Tensor, draws: Sequence[Draw]) -> dict[int, torch.Tensor]:
    rows = [row for row, draw in enumerate(draws) if draw.params.logprobs is not None]
    if not rows:
        return {}
    return dict(zip(rows, torch.log_softmax(logits[rows], dim=-1), strict=True))


def _logprobs_of(row: torch.Tensor | None, token: int, draw: Draw) -> Logprobs | None:
    if row is None or draw.params.logprobs is None:
        return None
    values, ids = row.topk(min(draw.params.logprobs, row.shape[0]))
    return Logprobs(float(row[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
