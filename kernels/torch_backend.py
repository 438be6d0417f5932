"""The operations of a decoder in plain torch: the oracle of the other backends, and their substitute."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import reference, routing
from kernels.backend import Activation, Angles, AttentionVariant, Experts, Heads, KVPages, Recorder, Tables, Weight
from kernels.quantized.matrix import Quantized
from kernels.routing import Routing

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.CLAMPED_SWISH: lambda gate: (gate.float() * torch.sigmoid(1.702 * gate.float())).to(gate.dtype),
}
CLAMP = 7.0
"""The largest gate of CLAMPED_SWISH."""
TILE_ROWS = 16
"""Rows of one product on a CPU: torch gives a row different bits among 2 rows than among 8."""


class TorchBackend:
    """Torch's operations, which round where transformers does."""

    name = "torch"
    version = "torch-5"

    def record(self) -> Recorder | None:
        return None

    def pack(self, weight: Tensor) -> Weight:
        columns, depth = weight.shape
        return Weight(weight, columns, depth, weight.dtype)

    def pack_exactly(self, weight: Tensor) -> Weight:
        return self.pack(weight)

    def pack_gated(self, gate_up: Tensor) -> Weight:
        return self.pack(gate_up)

    def pack_codes(self, parts: Sequence[Quantized], dtype: torch.dtype) -> Weight:
        return self.pack(torch.cat([part.dequantize().to(dtype) for part in parts]))

    def embed(self, token_ids: Tensor, table: Weight, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
        rows = F.embedding(token_ids, table.data)
        return _given(rows if scale == 1 else rows * scale, out)

    def rms_norm(
        self, states: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        wide = states.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        normed = (weight * (wide * scale).to(weight.dtype)).to(states.dtype)
        return _given(normed if residual is None else residual + normed, out)

    def linear(
        self,
        states: Tensor,
        weight: Weight,
        bias: Tensor | None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        product = _in_tiles(states, weight.data) if states.device.type == "cpu" else F.linear(states, weight.data)
        product = product if bias is None else product + bias
        return _given(product, out) if residual is None else torch.add(product, residual, out=out)

    def logits(self, states: Tensor, weight: Weight, cap: float | None = None, out: Tensor | None = None) -> Tensor:
        product = self.linear(states, weight, None)
        rows = product.float() if out is None else out.copy_(product)
        return rows if cap is None else _given(capped(rows, cap), out)

    def rotate_and_write(
        self, qkv: Tensor, heads: Heads, angles: Angles, pages: KVPages, slot_mapping: Tensor
    ) -> Tensor:
        rows = qkv.view(len(qkv), -1, heads.size)
        query, key, value = torch.split(rows, [heads.num_queries, heads.num_kv, heads.num_kv], dim=1)
        if heads.query_norm is not None and heads.key_norm is not None:
            query = self.rms_norm(query, heads.query_norm, heads.norm_eps)
            key = self.rms_norm(key, heads.key_norm, heads.norm_eps)
        cosines, sines = angles.cosines[:, None], angles.sines[:, None]
        key = rotate(key, cosines, sines)
        if pages.int4 is not None:
            reference.write_kv(key, value, pages.int4.open, reference.open_slots(pages, slot_mapping))
            reference.close_blocks(pages, slot_mapping)
            return rotate(query, cosines, sines)
        if pages.scales is not None:
            (key, key_scales), (value, value_scales) = (
                reference.quantize(one, pages.data.dtype) for one in (key, value)
            )
            reference.write_kv(key_scales[..., None], value_scales[..., None], pages.scales[..., None], slot_mapping)
        reference.write_kv(key, value, pages.data, slot_mapping)
        return rotate(query, cosines, sines)

    def attend(
        self,
        query: Tensor,
        pages: KVPages,
        tables: Tables,
        variant: AttentionVariant,
        out: Tensor | None = None,
    ) -> Tensor:
        lens, blocks, num_decodes = tables.context_lens, tables.block_tables, tables.num_decodes
        turned, turns = query, tables.turns
        if variant.num_sinks and turns is not None:
            turned = rotate(query, turns.cosines[:, None], -turns.sines[:, None])
        parts = []
        if num_decodes:
            decodes = query[:num_decodes], pages, blocks[:num_decodes], lens[:num_decodes], variant
            parts.append(reference.paged_decode_attention(*decodes, turned[:num_decodes]))
        if num_decodes < len(lens):
            starts = tables.cu_query_lens[num_decodes:] - num_decodes
            prompts = query[num_decodes:], pages, blocks[num_decodes:], lens[num_decodes:], starts, variant
            parts.append(reference.paged_prefill_attention(*prompts, turned[num_decodes:]))
        return _given(parts[0] if len(parts) == 1 else torch.cat(parts), out)

    def gated_linear(
        self,
        states: Tensor,
        weight: Weight,
        bias: Tensor | None,
        activation: Activation,
        product: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        return self.gate(self.linear(states, weight, bias, None, product), activation, out)

    def gate(self, gate_up: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation is Activation.CLAMPED_SWISH:
            gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP) + 1
        return _given(_by_row(ACTIVATIONS[activation], gate) * up, out)

    def experts(self, weights: Sequence[Weight]) -> Experts:
        return list_experts(weights)

    route = staticmethod(routing.route)
    combine = staticmethod(routing.combine)

    def expert_linear(
        self, states: Tensor, experts: Experts, routing: Routing, bias: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        num_chosen, result = routing.num_chosen, states.new_empty(*routing.experts.shape, experts.columns)
        rows = states.repeat_interleave(num_chosen, 0) if states.dim() == 2 else states.flatten(0, 1)
        for expert in routing.experts.unique().tolist():
            tokens, choices = torch.nonzero(routing.experts == expert, as_tuple=True)
            own = None if bias is None else bias[expert]
            result[tokens, choices] = self.linear(rows[tokens * num_chosen + choices], experts.weights[expert], own)
        return _given(result, out)


def list_experts(weights: Sequence[Weight]) -> Experts:
    """Implements `Backend.experts`."""
    first = weights[0]
    if len({(one.columns, one.depth, one.dtype) for one in weights}) > 1:
        raise ValueError("the matrices of experts must have one shape and dtype")
    table = [[one.data.data_ptr(), one.data.dtype is torch.uint8] for one in weights]
    return Experts(tuple(weights), torch.tensor(table, dtype=torch.int64, device=first.data.device))


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Returns cap * tanh(logit / cap) for each logit; without a cap the logits."""
    return logits if cap is None else _by_row(torch.tanh, logits / cap) * cap


def _by_row(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Calls a function of each number; on a CPU row by row.

    Threads would share the whole anywhere, and the end of a share is computed in another way.
    """
    return torch.stack([function(one) for one in rows]) if rows.device.type == "cpu" and len(rows) else function(rows)


def _given(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


def rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotates heads [T, heads, size], element i with element i + size / 2."""
    first, second = states.float().chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1).to(states.dtype)


def _in_tiles(states: Tensor, weight: Tensor) -> Tensor:
    padded = F.pad(states, (0, 0, 0, -len(states) % TILE_ROWS))
    return torch.cat([F.linear(tile, weight) for tile in padded.split(TILE_ROWS)])[: len(states)]
