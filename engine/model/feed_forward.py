"""The feed-forward layer of a decoder: a gated product for all rows, or a mixture of experts."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.model.buffers import Buffers
from kernels.backend import Activation, Backend, Experts, Weight
from kernels.routing import Gating

PROMPT_ROWS = 512
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
        is_recorded = to.gate_up is not None  # for one number of rows
        if not is_recorded and normed.device.type == "cpu" and len(normed) > PROMPT_ROWS:
            return self._run_in_parts(do, normed, to, residual, out)
        weight, bias = self.gate_up.weight, self.gate_up.bias
        gated = do.gated_linear(normed, weight, bias, self.activation, to.gate_up, to.gated)
        return self.down.run(do, gated, residual, out)

    def _run_in_parts(
        self, do: Backend, normed: Tensor, to: Buffers, residual: Tensor | None, out: Tensor | None
    ) -> Tensor:
        """Runs the rows of a long prompt a part at a time."""
        out = normed.new_empty(len(normed), self.down.weight.columns) if out is None else out
        for start in range(0, len(normed), PROMPT_ROWS):
            rows = slice(start, start + PROMPT_ROWS)
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
