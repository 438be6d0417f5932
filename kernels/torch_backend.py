"""The operations of a decoder in plain torch: the oracle of the others, and what serves where they cannot be had."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import reference
from kernels.backend import Angles, Heads, Tables, Weight

TILE_ROWS = 16
"""A product of so many rows at a time on a CPU: torch's own gives a row other bits among 2 and among 8."""


class TorchBackend:
    """Torch's operations, step by step as transformers rounds them."""

    name = "torch"
    version = "torch-2"

    def pack(self, weight: Tensor) -> Weight:
        return Weight(weight, *weight.shape)

    def embed(self, token_ids: Tensor, table: Weight) -> Tensor:
        return F.embedding(token_ids, table.data)

    def rms_norm(self, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = states.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * (wide * scale).to(states.dtype)

    def linear(self, states: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
        product = _in_tiles(states, weight.data) if states.device.type == "cpu" else F.linear(states, weight.data)
        product = product if bias is None else product + bias
        return product if residual is None else product + residual

    def logits(self, states: Tensor, weight: Weight) -> Tensor:
        return self.linear(states, weight, None).float()

    def rotate_and_write(
        self, qkv: Tensor, heads: Heads, angles: Angles, kv_layer: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        rows = qkv.view(len(qkv), -1, heads.size)
        query, key, value = torch.split(rows, [heads.num_queries, heads.num_kv, heads.num_kv], dim=1)
        if heads.query_norm is not None and heads.key_norm is not None:
            query = self.rms_norm(query, heads.query_norm, heads.norm_eps)
            key = self.rms_norm(key, heads.key_norm, heads.norm_eps)
        cosines, sines = angles.cosines[:, None], angles.sines[:, None]
        self.write_kv(_rotate(key, cosines, sines), value, kv_layer, slot_mapping)
        return _rotate(query, cosines, sines)

    def attend(self, query: Tensor, kv_layer: Tensor, tables: Tables, scale: float, window: int | None) -> Tensor:
        lens, blocks, num_decodes = tables.context_lens, tables.block_tables, tables.num_decodes
        if num_decodes == len(lens):
            return self.decode(query, kv_layer, blocks, lens, scale, window)
        starts = tables.cu_query_lens[num_decodes:] - num_decodes
        prompts = query[num_decodes:], kv_layer, blocks[num_decodes:], lens[num_decodes:], starts, scale, window
        attended = reference.paged_prefill_attention(*prompts)
        if num_decodes == 0:
            return attended
        decodes = query[:num_decodes], kv_layer, blocks[:num_decodes], lens[:num_decodes], scale, window
        return torch.cat((self.decode(*decodes), attended))

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if gate_up.device.type != "cpu":
            return F.silu(gate) * up
        # Row by row: threads would share the whole anywhere, and the end of a share is computed in another way.
        return torch.stack([F.silu(one) * other for one, other in zip(gate, up, strict=True)])

    write_kv = staticmethod(reference.write_kv)
    decode = staticmethod(reference.paged_decode_attention)


def _rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotates heads [T, heads, size], element i with element i + size / 2."""
    first, second = states.float().chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1).to(states.dtype)


def _in_tiles(states: Tensor, weight: Tensor) -> Tensor:
    padded = F.pad(states, (0, 0, 0, -len(states) % TILE_ROWS))
    return torch.cat([F.linear(tile, weight) for tile in padded.split(TILE_ROWS)])[: len(states)]
