"""From logits to tokens. Random numbers come from a counter, never from a state: the same seed, choice and position
give the same number in every batch, process and attempt.

Order: logit_bias, penalties, min_tokens, grammar, temperature, top_k, top_p, min_p. Log-probabilities come from the
model's own distribution, before all of these. Source of the generator: Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3" (SC '11).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from engine.model.batch import argmax
from engine.model.matcher import Matcher
from kernels.accelerator import accelerator_of
from wire.errors import BatonError
from wire.sampling import Logprobs, SamplingParams

SCORED_AT_ONCE = 64
LEAST = torch.finfo(torch.float32).min
"""The logit of a token that a grammar forbids; `likeliest` takes an infinite logit for a fault of the model."""
_NO_LIMIT = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The way to choose a token from a row of logits. banned: tokens that may not come yet (min_tokens).

    matcher: the state of the choice's grammar, if any; `Masks` has the tokens that it forbids.
    """

    params: SamplingParams
    choice: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    banned: Sequence[int] = ()
    matcher: Matcher | None = None

    @property
    def position(self) -> int:
        """The position of the drawn token, counted over prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_plain(self) -> bool:
        """True where the next token is the likeliest, without log-probabilities."""
        params = self.params
        is_as_is = not (params.has_penalties or params.logit_bias or self.banned or self.matcher)
        return params.is_greedy and is_as_is and params.logprobs is None


PLAIN = Draw(params=SamplingParams(temperature=0), choice=0, prompt_ids=(), output_ids=())
"""The draw of a row whose next token is the likeliest."""


@dataclass(frozen=True)
class Masks:
    """The tokens that grammars forbid. forbidden: bool [M, V], on the host; rows: the step's draws that they belong to.

    faults: errors of rows without any allowed token, by row.
    """

    rows: Sequence[int]
    forbidden: torch.Tensor
    faults: Mapping[int, BatonError] = field(default_factory=dict)

    def apply(self, logits: torch.Tensor) -> None:
        """Masks rows of `logits` [R, V] float32 in place."""
        if len(self.rows) == len(logits):
            logits.masked_fill_(to_device(self.forbidden, logits.device), LEAST)
        elif self.rows:
            rows = _index(self.rows, logits)
            logits[rows] = logits[rows].masked_fill_(to_device(self.forbidden, logits.device), LEAST)

    def at(self, places: Sequence[int]) -> "Masks":
        """Renumbers the masks' rows by the places of their draws among all rows."""
        faults = {places[row]: fault for row, fault in self.faults.items()}
        return Masks([places[row] for row in self.rows], self.forbidden, faults)


NO_MASKS = Masks((), torch.empty(0, 0, dtype=torch.bool))


@dataclass(frozen=True)
class RowScores:
    """Log-probabilities of rows, on a device.

    numbers: float64 [L, 1 + 2 * K]: the log-probability of the row's token, NaN for a faulty row; log-probabilities of
    the K likeliest tokens; the ids of these.
    """

    rows: Sequence[int]
    numbers: torch.Tensor


@dataclass(frozen=True)
class Chosen:
    """Tokens of R rows, on the device of their logits.

    token_ids: int64 [R], -1 where a value of the row is no number. scores: log-probabilities of rows that want them.
    faults: errors of rows whose grammar allows no token, by row.
    """

    token_ids: torch.Tensor
    scores: Sequence[RowScores] = ()
    faults: Mapping[int, BatonError] = field(default_factory=dict)

    def among(self, token_ids: torch.Tensor, places: Sequence[int]) -> "Chosen":
        """Writes the rows' tokens to these places of `token_ids`."""
        token_ids[places] = self.token_ids
        scores = [RowScores([places[row] for row in one.rows], one.numbers) for one in self.scores]
        return Chosen(token_ids, scores, {places[row]: fault for row, fault in self.faults.items()})


class Reading:
    """Tensors on their way to the host; tensors of one device travel in one copy.

    Several tensors travel as float64, which holds ids and float32 exactly.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        """Begins the copy, after the work queued so far on the current stream. Does not block."""
        self._parts = parts
        self._copied: torch.Event | None = None
        if (device := parts[0].device).type != "cpu":
            values = parts[0] if len(parts) == 1 else torch.cat([one.double().flatten() for one in parts])
            if values.numel():
                self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
                self._host.copy_(values, non_blocking=True)
                self._copied = torch.Event(device)
                self._copied.record(torch.accelerator.current_stream(device))

    def wait(self) -> list[torch.Tensor]:
        """Waits for the copy, not for later work, and returns the tensors."""
        if self._copied is None:
            return [one.cpu() for one in self._parts]
        self._copied.synchronize()
        pieces = self._host.split([one.numel() for one in self._parts])
        return [piece.view(one.shape) for piece, one in zip(pieces, self._parts, strict=True)]


@torch.inference_mode()
def choose(logits: torch.Tensor, draws: Sequence[Draw], masks: Masks = NO_MASKS) -> Chosen:
    """Draws a token for each row of `logits` [R, V] float32, which it may modify. Does not wait for a device.

    Rows do not influence one another.
    """
    is_finite = torch.isfinite(logits).all(dim=-1)
    rankings = _rankings(logits, draws)
    _penalize(logits, draws)
    masks.apply(logits)
    tokens = _choose(logits, draws)
    return Chosen(torch.where(is_finite, tokens, -1), [one.scores(tokens) for one in rankings], masks.faults)


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies values of the host to a device without waiting; torch keeps the pinned memory until they are copied."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def select(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Copies rows of `logits`, without waiting."""
    return logits[_index(rows, logits)]


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Finds the likeliest token of each row [R, V] float32; returns int64 [R], on the same device.

    Among equals the first; -1 for a row with a NaN or infinite value.
    """
    if logits.is_cpu:
        rows = logits.numpy()  # its operations take half the time of torch's for few rows
        chosen = rows.argmax(-1)
        with np.errstate(invalid="ignore", over="ignore"):  # rows of infinities, or with a span beyond float32
            spans = rows[np.arange(len(rows)), chosen] - rows.min(-1)
        chosen[~(spans < np.inf)] = -1
        return torch.from_numpy(chosen)
    return accelerator_of(logits.device).likeliest(logits)


@torch.inference_mode()
def score(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> torch.Tensor:
    """Scores the token that follows each row of `logits` [R, V] float32, as in `RowScores.numbers`. Does not wait.

    Takes 64 rows at a time, to save memory.
    """
    tokens, scored = to_device(torch.tensor(token_ids, dtype=torch.int64), logits.device), []
    for rows, after in zip(logits.split(SCORED_AT_ONCE), tokens.split(SCORED_AT_ONCE), strict=True):
        logprobs = torch.log_softmax(rows, dim=-1)
        chosen = torch.where(torch.isfinite(rows).all(-1, keepdim=True), logprobs.gather(1, after[:, None]), torch.nan)
        values, ids = logprobs.topk(min(num_top, rows.shape[1]))
        scored.append(torch.cat([one.double() for one in (chosen, values, ids)], dim=1))
    return torch.cat(scored)


def logprobs_of(numbers: torch.Tensor) -> list[Logprobs]:
    """Makes log-probabilities from rows of `RowScores.numbers`, on the host."""
    num = numbers.shape[1] // 2
    return [Logprobs(own, tuple(zip(map(int, rest[num:]), rest[:num], strict=True))) for own, *rest in numbers.tolist()]


def uniform(seed: int, choice: int, position: int) -> float:
    """Returns the number in [0, 1) that belongs to a seed, a choice and an absolute position (Philox 4x64)."""
    bits = int(np.random.Philox(key=[seed, choice], counter=position).random_raw())
    return (bits >> 11) * 2.0**-53


def _choose(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Chooses the token of each row, int64 [R]."""
    rows = [row for row, draw in enumerate(draws) if not draw.params.is_greedy]
    if len(rows) == len(draws):
        return _random(logits, draws)
    tokens = argmax(logits)
    if rows:
        index = _index(rows, logits)
        tokens[index] = _random(logits[index], [draws[row] for row in rows])
    return tokens


def _random(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Inverts the cumulative distribution in the order of token ids; returns int64 [R].

    In the order of probability, rounding could swap two tokens that are nearly as likely.
    """
    params = [draw.params for draw in draws]
    columns = [
        [one.temperature for one in params],
        [uniform(draw.params.seed, draw.choice, draw.position) for draw in draws],
    ]
    is_cut = any(one.top_k > 0 or one.top_p < 1 or one.min_p > 0 for one in params)
    if is_cut:
        columns.append([one.top_k if one.top_k > 0 else _NO_LIMIT for one in params])
        columns += [[one.top_p for one in params], [one.min_p for one in params]]
    temperature, aim, *limits = to_device(torch.tensor(columns, dtype=torch.float64), logits.device).unsqueeze(2)
    probs = torch.softmax(logits.double() / temperature, dim=-1)
    if is_cut:
        probs = _cut(probs, *limits)
    cumulative = probs.cumsum(dim=-1)
    # Rounding may put the aim on the very end: the last token that is possible at all is then meant.
    below_end = torch.nextafter(cumulative[:, -1:], torch.zeros_like(cumulative[:, -1:]))
    chosen = torch.searchsorted(cumulative, torch.minimum(aim * cumulative[:, -1:], below_end), right=True)
    return chosen.clamp_(max=probs.shape[1] - 1).squeeze(1)


def _cut(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Zeroes probabilities [R, V] by top_k, then top_p of the rest, then min_p; the result is not normalized.

    Limits are float64 [R, 1].
    """
    falling, order = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[1], device=probs.device)
    falling = falling * (ranks < top_k)
    falling = falling / falling.sum(dim=-1, keepdim=True)
    before = falling.cumsum(dim=-1) - falling
    in_nucleus = (before < top_p) | (ranks == 0)
    above_floor = falling >= min_p * falling[:, :1]
    return torch.zeros_like(probs).scatter_(1, order, falling * (in_nucleus & above_floor))


def _index(rows: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return to_device(torch.tensor(rows, dtype=torch.int64), like.device)


Spots = list[tuple[int, npt.ArrayLike, npt.ArrayLike]]
"""Rows, token ids in them, and a number for each."""


def _penalize(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Adds biases, penalizes repetition in prompt and output (Keskar et al., 2019), presence and frequency in output,
    and bans tokens.
    """
    biases, repeated, gained, banned = Spots(), Spots(), Spots(), Spots()
    for row, draw in enumerate(draws):
        params = draw.params
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            biases.append((row, ids, values))
        if params.repetition_penalty != 1.0:
            repeated.append((row, [*{*draw.prompt_ids, *draw.output_ids}], params.repetition_penalty))
        if params.has_penalties and draw.output_ids:
            gained_ids, counts = np.unique(np.array(draw.output_ids), return_counts=True)
            losses = np.float32(params.frequency_penalty) * counts.astype(np.float32)
            gained.append((row, gained_ids, -(losses + np.float32(params.presence_penalty))))
        if draw.banned:
            banned.append((row, [*draw.banned], -torch.inf))
    if biases:
        _add(logits, biases)
    if repeated:
        index, penalties = _spread(repeated, logits.device)
        known = logits[index]
        logits.index_put_(index, torch.where(known > 0, known / penalties, known * penalties))
    if gained:
        _add(logits, gained)
    if banned:
        logits.index_put_(*_spread(banned, logits.device))


def _add(logits: torch.Tensor, spots: Spots) -> None:
    logits.index_put_(*_spread(spots, logits.device), accumulate=True)


def _spread(spots: Spots, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Makes the index of spots (rows, token ids) and their numbers in float32, on a device."""
    all_ids = [np.asarray(ids, dtype=np.int64) for _, ids, _ in spots]
    rows = np.repeat([row for row, _, _ in spots], [len(ids) for ids in all_ids])
    numbers = [
        np.broadcast_to(np.asarray(value, np.float32), len(ids))
        for ids, (*_, value) in zip(all_ids, spots, strict=True)
    ]
    index = to_device(torch.from_numpy(np.stack([rows, np.concatenate(all_ids)])), device)
    return (index[0], index[1]), to_device(torch.from_numpy(np.concatenate(numbers)), device)


@dataclass(frozen=True)
class _Ranking:
    """Rows that want the same number K of likeliest tokens. index: int64 [L]; logprobs: [L, V]; values, ids: [L, K]."""

    rows: Sequence[int]
    index: torch.Tensor
    logprobs: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor

    def scores(self, tokens: torch.Tensor) -> RowScores:
        """Joins the log-probabilities of each chosen token and of the likeliest, and their ids."""
        chosen = self.logprobs.gather(1, tokens[self.index, None])
        return RowScores(self.rows, torch.cat([one.double() for one in (chosen, self.values, self.ids)], dim=1))


def _rankings(logits: torch.Tensor, draws: Sequence[Draw]) -> list[_Ranking]:
    num_to_rows: dict[int, list[int]] = {}
    for row, draw in enumerate(draws):
        if draw.params.logprobs is not None:
            num_to_rows.setdefault(min(draw.params.logprobs, logits.shape[1]), []).append(row)
    rankings: list[_Ranking] = []
    for num, rows in num_to_rows.items():
        index = _index(rows, logits)
        logprobs = torch.log_softmax(logits if len(rows) == len(draws) else logits[index], dim=-1)
        rankings.append(_Ranking(rows, index, logprobs, *logprobs.topk(num)))
    return rankings
