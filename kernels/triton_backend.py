"""The operations of a decoder on a GPU: Triton for rows, pages and packed weights, torch for other products."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from kernels import row_operations, tiles
from kernels.attention import int4_pages
from kernels.attention.decode import paged_decode_attention
from kernels.attention.prompts import paged_prefill_attention
from kernels.backend import (
    TRITON,
    TRITON_EXACT,
    Activation,
    Angles,
    AttentionVariant,
    Experts,
    Heads,
    Interleaved,
    KVPages,
    Tables,
    Weight,
)
from kernels.cpu.library import NoKernels
from kernels.products import experts as expert_operations
from kernels.products import ordered
from kernels.quantized import device_layout, products
from kernels.quantized.device_layout import CodedWeight
from kernels.quantized.matrix import Quantized
from kernels.routing import Routing
from kernels.torch_backend import TorchBackend, capped, rotate


class TritonBackend(TorchBackend):
    """A backend of torch's products with plain weights, and Triton's kernels for everything else.

    A row's attention does not depend on the batch.
    """

    name = TRITON
    version = ""

    def __init__(self) -> None:
        """Names the version by the kernels, their tiles, their compiler and this machine's devices."""
        self.version = f"{self.name}-11-{tiles.digest()}-{triton.__version__}-{tiles.device_name()}"

    _multiply_part = staticmethod(products.multiply_by_panels)
    rms_norm = staticmethod(row_operations.rms_norm)
    gate = staticmethod(row_operations.gate)
    combine = staticmethod(expert_operations.combine)

    def pack_codes(self, parts: Sequence[Quantized], dtype: torch.dtype) -> Weight:
        """Keeps codes packed if the kernels widen them exactly; else packs the widened matrix."""
        if all(device_layout.is_packable(part) for part in parts):
            return device_layout.pack(parts, dtype)
        return super().pack_codes(parts, dtype)

    def embed(self, token_ids: Tensor, table: Weight, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
        if not isinstance(table, CodedWeight):
            return super().embed(token_ids, table, scale, out)
        rows = table.data.new_empty(len(token_ids), table.depth, dtype=table.dtype) if out is None else out
        products.embed(token_ids, table, rows)
        return rows if scale == 1 else rows.mul_(scale)

    def linear(
        self,
        states: Tensor,
        weight: Weight,
        bias: Tensor | None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if isinstance(weight, CodedWeight):
            rows = states.new_empty(len(states), weight.columns) if out is None else out
            return products.linear(states, weight, bias, residual, rows, self._multiply_part)
        if residual is None:
            return F.linear(states, weight.data, bias)
        product = torch.addmm(residual, states, weight.data.T, out=out)
        return product if bias is None else product.add_(bias)

    def logits(self, states: Tensor, weight: Weight, cap: float | None = None, out: Tensor | None = None) -> Tensor:
        if not isinstance(weight, CodedWeight):
            return super().logits(states, weight, cap, out)
        rows = states.new_empty(len(states), weight.columns, dtype=torch.float32) if out is None else out
        products.linear(states, weight, None, None, rows, products.multiply_part)
        return rows if cap is None else rows.copy_(capped(rows, cap))

    def experts(self, weights: Sequence[Weight]) -> Experts:
        """Raises NoKernels for packed codes."""
        if any(isinstance(one, CodedWeight) for one in weights):
            raise NoKernels("no kernel of a GPU multiplies experts of packed codes: take a plain checkpoint, or a CPU")
        return super().experts(weights)

    def expert_linear(
        self, states: Tensor, experts: Experts, routing: Routing, bias: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        rows = states.new_empty(*routing.experts.shape, experts.columns) if out is None else out
        return expert_operations.expert_linear(states, experts, routing, bias, rows)

    def rotate_and_write(
        self, qkv: Tensor, heads: Heads, angles: Angles, pages: KVPages, slot_mapping: Tensor
    ) -> Tensor:
        query = row_operations.rotate_and_write(qkv, heads, angles, pages, slot_mapping)
        if pages.int4 is not None:
            int4_pages.close_blocks(pages, slot_mapping)
        return query

    def attend(
        self,
        query: Tensor,
        pages: KVPages,
        tables: Tables,
        variant: AttentionVariant,
        out: Tensor | None = None,
    ) -> Tensor:
        lens, blocks, num_decodes = tables.context_lens, tables.block_tables, tables.num_decodes
        turned, turns = None, tables.turns
        if variant.num_sinks and turns is not None:
            turned = rotate(query, turns.cosines[:, None], -turns.sines[:, None])
        out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
        first = slice(num_decodes)
        decodes = query[first], pages, blocks[first], lens[first], variant
        paged_decode_attention(*decodes, turned, out[first])
        prompts = query, pages, blocks, lens, tables.cu_query_lens, variant
        paged_prefill_attention(*prompts, turned, out, num_decodes)
        return out


class ExactBackend(TritonBackend):
    """A backend whose products are all of one order: no operation's result for a row depends on other rows."""

    name = TRITON_EXACT
    _multiply_part = staticmethod(products.multiply_part)

    def __init__(self) -> None:
        super().__init__()
        self._counters = ordered.Counters()

    def pack_gated(self, gate_up: Tensor) -> Weight:
        columns, depth = gate_up.shape
        return Interleaved(ordered.interleaved(gate_up), columns, depth, gate_up.dtype)

    def linear(
        self,
        states: Tensor,
        weight: Weight,
        bias: Tensor | None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if isinstance(weight, CodedWeight):
            return super().linear(states, weight, bias, residual, out)
        rows = states.new_empty(len(states), weight.columns) if out is None else out
        return ordered.linear(states, weight.data, bias, residual, rows, self._counters)

    def gated_linear(
        self,
        states: Tensor,
        weight: Weight,
        bias: Tensor | None,
        activation: Activation,
        product: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if not isinstance(weight, Interleaved):  # of codes, or of codes that were widened when they were loaded
            return super().gated_linear(states, weight, bias, activation, product, out)
        rows = states.new_empty(len(states), weight.columns // 2) if out is None else out
        return ordered.linear(states, weight.data, bias, None, rows, self._counters, activation)

    def logits(self, states: Tensor, weight: Weight, cap: float | None = None, out: Tensor | None = None) -> Tensor:
        if isinstance(weight, CodedWeight):
            return super().logits(states, weight, cap, out)
        rows = states.new_empty(len(states), weight.columns, dtype=torch.float32) if out is None else out
        ordered.linear(states, weight.data, None, None, rows, self._counters)
        return rows if cap is None else rows.copy_(capped(rows, cap))
