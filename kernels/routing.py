"""The routing of rows to experts, in plain torch: the oracle of the other backends. Source: arXiv 2101.03961."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """The chosen experts of rows, int32 [T, num_chosen], ascending in each row, and their shares, float32 likewise."""

    experts: Tensor
    shares: Tensor

    @property
    def num_chosen(self) -> int:
        return self.experts.shape[1]


class Gating(Enum):
    """The shares of chosen experts in a row: from a softmax over all experts, or over the chosen ones alone.

    OF_ALL: as they are (Qwen3-MoE without `norm_topk_prob`). OF_ALL_NORMED: divided by their sum (Mixtral, Qwen3-MoE).
    OF_CHOSEN: gpt-oss.
    """

    OF_ALL = 0
    OF_ALL_NORMED = 1
    OF_CHOSEN = 2


def route(logits: Tensor, num_chosen: int, shares: Gating, out: Routing | None = None) -> Routing:
    """Chooses the experts with the largest logits [T, experts] of each row; the softmax is in float32.

    Of equal logits the first expert's counts as larger. NaN counts as the smallest; a softmax over it is NaN.
    """
    wide = logits.float()
    ranked = wide.where(~wide.isnan(), -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    experts = ranked[:, :num_chosen].sort(dim=-1).values
    is_alone = shares is Gating.OF_CHOSEN
    chosen = wide.gather(1, experts).softmax(-1) if is_alone else wide.softmax(-1).gather(1, experts)
    if shares is Gating.OF_ALL_NORMED:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    if out is None:
        return Routing(experts.int(), chosen)
    return Routing(out.experts.copy_(experts), out.shares.copy_(chosen))


def combine(rows: Tensor, routing: Routing, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Adds up share * row over each token's rows [T, num_chosen, columns], in their order, then `residual`.

    The sums are in float32 and rounded once.
    """
    total = torch.zeros_like(rows[:, 0], dtype=torch.float32)
    for shares, own in zip(routing.shares.unbind(1), rows.float().unbind(1), strict=True):
        total = total + shares[:, None] * own
    total = (total if residual is None else residual.float() + total).to(rows.dtype)
    return total if out is None else out.copy_(total)
