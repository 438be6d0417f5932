"""A model whose layers are transformers' own modules, over this engine's pages and the products of its backend."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.config import ServedConfig
from engine.checkpoint.modules.outline import Outline, dry_run, keeps_some_logits
from engine.checkpoint.modules.trace import ATTENTION, Call, refuse
from engine.model.batch import Batch
from engine.model.decoder import check_kv_dtype, compute_dtype
from engine.model.products import check_numbers, pack_products
from kernels.backend import Angles, AttentionVariant, Backend, Heads, KVPages, Tables
from kernels.reference import weigh
from kernels.selection import select_backend
from wire.kv_policy import parse_kv_policy
from wire.layout import KVLayout


class Step:
    """The step under way of a model, which its layers share: its tensors, pages, and angles that rotate nothing."""

    batch: Batch
    kv: KVPages
    tables: Tables
    angles: Angles

    def begin(self, batch: Batch, kv: KVPages, head_size: int) -> None:
        ones = torch.ones(len(batch.token_ids), head_size // 2, device=batch.token_ids.device)
        self.batch, self.kv, self.angles = batch, kv, Angles(ones, torch.zeros_like(ones))
        self.tables = Tables(batch.block_tables, batch.context_lens, batch.cu_query_lens, batch.num_decodes)


@dataclass(frozen=True)
class PagedAttention:
    """The attention of a layer: writes its keys and values into pages, and attends over them."""

    backend: Backend
    step: Step
    layer: int
    heads: Heads
    variant: AttentionVariant

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, settings: Mapping[str, Any]
    ) -> Tensor:
        """Attends as `Trace.attend` does; the settings are as in the dry run."""
        step = self.step
        qkv, pages = torch.cat((query, key, value), 1)[0].transpose(0, 1).flatten(1), step.kv.layer(self.layer)
        queries = self.backend.rotate_and_write(qkv, self.heads, step.angles, pages, step.batch.slot_mapping)
        for one in step.batch.watched:
            one.queries[self.layer] = queries[one.rows]
        return self.backend.attend(queries, pages, step.tables, self.variant)[None]


class ModulesModel:
    """A `CausalModel` of transformers' modules. Its twin is `engine.model.decoder.Decoder`.

    Promises no row that is the same in any batch: products and attention are this engine's, other operations torch's.
    """

    keeps_phases = False

    def __init__(
        self, config: ServedConfig, model: nn.Module, calls: list[Call], layout: KVLayout, backend: Backend
    ) -> None:
        """Takes a model on its device, with packed products, and its calls of attention in a dry run."""
        self.config = config
        self.layout = layout
        self.device = calls[0].device
        self.vocab_size = config.vocab_size
        self.max_context_len = config.max_context_len
        self.eos_token_ids = config.eos_token_ids
        self._model = model
        self._variants = [call.variant for call in calls]
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self._keeps_some = keeps_some_logits(model)
        self._step = Step()
        for layer, call in enumerate(calls):
            setattr(call.module, ATTENTION, PagedAttention(backend, self._step, layer, call.heads, call.variant))

    @classmethod
    def load(
        cls,
        folder: Path,
        dtype: str | None,
        device: torch.device,
        block_size: int,
        backend: Backend | None = None,
        kv_dtype: str = "auto",
        kv_policy: str = "full",
    ) -> "ModulesModel":
        """Loads a checkpoint folder, with weights of this process alone. Arguments and errors as of `Decoder.load`."""
        checkpoint = Checkpoint(folder)
        check_numbers(checkpoint, outline := Outline(checkpoint.values))
        backend = backend or select_backend(device)
        check_kv_dtype(device, kv_dtype)
        resolved = compute_dtype(dtype, checkpoint.config, backend)
        config = checkpoint.config.keeping(parse_kv_policy(kv_policy, kv_dtype))
        layout = config.kv_layout(str(resolved).removeprefix("torch."), block_size, kv_dtype)
        model = outline.fill(checkpoint.read_floats(resolved), resolved)
        with outline.refusing():
            pack_products(model, backend, device)
            calls = _require_only_attention_mixes(model.to(device), config.vocab_size)
        return cls(config, model, calls, layout, backend)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVPages) -> Tensor:
        """Implements `CausalModel.forward`, for one thread."""
        batch = batch.to(self.device)
        self._step.begin(batch, kv, self.layout.head_dim)
        some = {"logits_to_keep": batch.sample_rows} if self._keeps_some else {}
        ids, positions = batch.token_ids[None], batch.positions[None]
        logits: Tensor = self._model(input_ids=ids, position_ids=positions, use_cache=False, **some).logits[0]
        return (logits if some else logits[batch.sample_rows]).float()

    def new_queries(self, num_rows: int) -> Tensor:
        shape = len(self._variants), num_rows, self.config.attention.num_heads, self.layout.head_dim
        return torch.empty(shape, dtype=self._dtype, device=self.device)

    @torch.inference_mode()
    def weigh(self, queries: Tensor, kv: KVPages, block_table: Tensor, num_tokens: int) -> Tensor:
        layers = enumerate(zip(queries, self._variants, strict=True))
        return torch.stack([weigh(query, kv.layer(at), block_table, num_tokens, one) for at, (query, one) in layers])


def _require_only_attention_mixes(model: nn.Module, vocab_size: int) -> list[Call]:
    """Returns the calls of a dry run. Raises ModelError if a token's logits depend on others without attention."""
    (calls, logits), (_, others) = dry_run(model), dry_run(model, first=vocab_size - 1)
    reason = "its tokens see earlier ones by other ways than attention, which pages do not keep"
    refuse({reason: not torch.allclose(logits[1:], others[1:], rtol=1e-3, atol=1e-3)})
    return calls
