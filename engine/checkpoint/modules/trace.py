"""The attention function that modules of transformers call, and the calls of a dry run.

Each module holds the attention of its layer under the name ATTENTION: `Trace` while a dry run looks at the calls, then
engine.model.modules_model.PagedAttention. So a step's tables are found from the module, and no code must pass them on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kernels.backend import AttentionVariant, Heads, Scores
from wire.errors import ModelError

ATTENTION = "baton_attention"
"""The name of the attention function in transformers' interface, and of a module's attribute."""
KNOWN = {"scaling", "sliding_window", "softcap", "s_aux"}
"""Arguments that change scores, and that pages have."""
HARMLESS = {
    *("dropout", "is_causal", "position_ids", "position_embeddings", "cache_position", "use_cache"),
    *("output_attentions", "output_hidden_states", "return_dict", "output_router_logits"),
}
"""Arguments that say nothing of scores in evaluation without a cache."""


def refuse(reasons: Mapping[str, object]) -> None:
    """Raises ModelError with the first reason that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise ModelError(reason)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Implements an attention function of transformers, for modules with the attribute ATTENTION.

    Raises ModelError for a call with a mask or biases, which pages do not have.
    """
    refuse({"its code adds a mask or biases of its own to scores": attention_mask is not None})
    return getattr(module, ATTENTION).attend(module, query, key, value, settings), None


@dataclass(frozen=True)
class Call:
    """A call of attention in a dry run: the module, its device, the heads, and the attention that it asked for."""

    module: nn.Module
    device: torch.device
    heads: Heads
    variant: AttentionVariant


@dataclass
class Trace:
    """The calls of a dry run, in which a token sees its own value alone."""

    calls: list[Call] = field(default_factory=list)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, settings: Mapping[str, Any]
    ) -> Tensor:
        """Attends with [1, heads, T, size]; returns [1, T, heads, size]. Raises ModelError for what pages lack."""
        given = {name: one for name, one in settings.items() if one is not None}
        (_, num_queries, _, size), num_kv = query.shape, key.shape[1]
        unknown = min(given.keys() - KNOWN - HARMLESS, default="")
        refuse(
            {
                f"its attention takes {unknown[:64]}, which pages do not have": unknown,
                "its tokens see the tokens after them: it is an encoder": not given.get(
                    "is_causal", getattr(module, "is_causal", True)
                ),
                f"queries, keys and values of {[*query.shape]}, {[*key.shape]}, {[*value.shape]} fit no page": (
                    key.shape != value.shape or key.shape[3] != size or size % 2 or num_queries % num_kv
                ),
            }
        )
        sinks = given.get("s_aux")
        scores = Scores(given.get("softcap"), None if sinks is None else sinks.float())
        variant = AttentionVariant(given.get("scaling", size**-0.5), given.get("sliding_window"), scores=scores)
        heads = Heads(num_queries=num_queries, num_kv=num_kv, size=size, query_norm=None, key_norm=None, norm_eps=0.0)
        self.calls.append(Call(module, query.device, heads, variant))
        return value.repeat_interleave(num_queries // num_kv, 1).transpose(1, 2)
