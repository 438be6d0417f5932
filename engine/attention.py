"""Attention of one step over paged KV: decoding rows and prompt rows go to kernels of their own."""

import torch

from engine.batch import Batch
from kernels.backend import KernelBackend


class PagedAttention:
    """The attention of one batch, layer after layer."""

    def __init__(self, backend: KernelBackend, batch: Batch, scale: float) -> None:
        self._backend = backend
        self._batch = batch
        self._scale = scale
        self._prompt_starts = batch.cu_query_lens[batch.num_decodes :] - batch.num_decodes

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_layer: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        """Writes the batch's keys and values into a layer, then attends to what its sequences have there.

        query: [T, num_heads, head_dim], as is what is returned; key and value: [T, num_kv_heads, head_dim]; kv_layer:
        [num_pages, 2, num_kv_heads, block_size, head_dim]. window: tokens that a row sees, itself included.
        """
        self._backend.write_kv(key, value, kv_layer, self._batch.slot_mapping)
        num_decodes, num_sequences = self._batch.num_decodes, len(self._batch.context_lens)
        if num_decodes == num_sequences:
            return self._decode(query, kv_layer, window)
        prompts = self._prefill(query[num_decodes:], kv_layer, window)
        if num_decodes == 0:
            return prompts
        return torch.cat((self._decode(query[:num_decodes], kv_layer, window), prompts))

    def _decode(self, query: torch.Tensor, kv_layer: torch.Tensor, window: int | None) -> torch.Tensor:
        tables, lens = self._batch.block_tables[: len(query)], self._batch.context_lens[: len(query)]
        return self._backend.paged_decode_attention(query, kv_layer, tables, lens, self._scale, window)

    def _prefill(self, query: torch.Tensor, kv_layer: torch.Tensor, window: int | None) -> torch.Tensor:
        first = self._batch.num_decodes
        tables, lens = self._batch.block_tables[first:], self._batch.context_lens[first:]
        starts = self._prompt_starts
        return self._backend.paged_prefill_attention(query, kv_layer, tables, lens, starts, self._scale, window)
