"""The tensors that a forward pass writes."""

from dataclasses import dataclass, replace

import torch

from engine.checkpoint.config import ModelConfig
from kernels.routing import Routing


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """The tensors that a forward pass writes, for a number of rows; None where each pass makes its own.

    routed, routing: a router's logits and its choice. expert_gate_up, expert_gated, expert_rows: a row for each chosen
    expert of each row.
    """

    states: torch.Tensor | None = None
    normed: torch.Tensor | None = None
    qkv: torch.Tensor | None = None
    attended: torch.Tensor | None = None
    gate_up: torch.Tensor | None = None
    gated: torch.Tensor | None = None
    routed: torch.Tensor | None = None
    routing: Routing | None = None
    expert_gate_up: torch.Tensor | None = None
    expert_gated: torch.Tensor | None = None
    expert_rows: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    @classmethod
    def make(cls, config: ModelConfig, num_rows: int, num_samples: int, dtype: torch.dtype) -> "Buffers":
        """Makes the tensors of a step. num_samples: the rows of logits."""
        attention, hidden, mlp = config.attention, config.hidden_size, config.intermediate_size
        num_heads, size = attention.num_heads, attention.head_dim

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(num_rows, *shape, dtype=dtype)

        buffers = cls(
            states=empty(hidden),
            normed=empty(hidden),
            qkv=empty((num_heads + 2 * attention.num_kv_heads) * size),
            attended=empty(num_heads, size),
            gate_up=empty(2 * mlp),
            gated=empty(mlp),
            logits=torch.empty(num_samples, config.vocab_size),
        )
        if (mixture := config.mixture) is None:
            return buffers
        width, num_chosen = mixture.intermediate_size, mixture.num_chosen
        experts = torch.zeros(num_rows, num_chosen, dtype=torch.int32)
        return replace(
            buffers,
            routed=empty(mixture.num_experts),
            routing=Routing(experts, torch.empty(experts.shape)),
            expert_gate_up=empty(num_chosen, 2 * width),
            expert_gated=empty(num_chosen, width),
            expert_rows=empty(num_chosen, hidden),
        )


NO_BUFFERS = Buffers()
