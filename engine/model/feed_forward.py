"""The feed-forward layer of a decoder: a gated product for all rows, or a mixture of experts."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.model.buffers import Buffers
from kernels.backend import Activation, Backend, Experts, Weight
from kernels.routing import Gating

ROWS_AT_ONCE = 512
"""Rows of a long prompt that pass a dense layer together on a CPU: gate and up of more would leave its caches."""


@dataclass(frozen=True)
class Linear:
    """weight [out, in] as the backend packs it, bias [out] or None."""

    weight: Weight
    bias: Tensor | None = None

    def run(self, do: Backend, states: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Multiplies rows, as `Backend.linear` does."""
        return do.linear(states, self.weight, self.bias, residual, out)


@dataclass(frozen=True)
class ExpertLinear:
    """A matrix of each expert as the backend lists them, bias [experts, out] or None."""

    experts: Experts
    bias: Tensor | None = None


class FeedForward(Protocol):
    """The feed-forward layer of a decoder's layer, norms aside."""

    @property
    def matrices(self) -> tuple[Weight, ...]:
        """The packed matrices of the layer, of all experts for a mixture."""

    def run(
        self, do: Backend, normed: Tensor, to: Buffers, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Computes the outputs of rows [T, hidden], and adds `residual`, which may be `out`; `normed` may be `out`."""


@dataclass(frozen=True, kw_only=True)
class DenseLayer:
    """A `FeedForward` of one gated product for all rows. gate_up: gate and up as one matrix."""

    gate_up: Linear
    down: Linear
    activation: Activation

    @property
    def matrices(self) -> tuple[Weight, ...]:
        return self.gate_up.weight, self.down.weight

    def run(
        self, do: Backend, normed: Tensor, to: Buffers, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if to.gate_up is not None or normed.device.type != "cpu" or len(normed) <= ROWS_AT_ONCE:
            gated = do.gate(self.gate_up.run(do, normed, out=to.gate_up), self.activation, to.gated)
            return self.down.run(do, gated, residual, out)
        out = normed.new_empty(len(normed), self.down.weight.columns) if out is None else out
        for start in range(0, len(normed), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            self.run(do, normed[rows], to, None if residual is None else residual[rows], out[rows])
        return out


@dataclass(frozen=True, kw_only=True)
class MixtureLayer:
    """A `FeedForward` whose rows go to the `num_chosen` experts with their largest logits. Source: arXiv 1701.06538."""

    router: Linear
    num_chosen: int
    shares: Gating
    gate_up: ExpertLinear
    down: ExpertLinear
    activation: Activation

    @property
    def matrices(self) -> tuple[Weight, ...]:
        return self.router.weight, *self.gate_up.experts.weights, *self.down.experts.weights

    def run(
        self, do: Backend, normed: Tensor, to: Buffers, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        routing = do.route(self.router.run(do, normed, out=to.routed), self.num_chosen, self.shares, to.routing)
        gate_up = do.expert_linear(normed, self.gate_up.experts, routing, self.gate_up.bias, to.expert_gate_up)
        gated = do.gate(gate_up, self.activation, to.expert_gated)
        rows = do.expert_linear(gated, self.down.experts, routing, self.down.bias, to.expert_rows)
        return do.combine(rows, routing, residual, out)
