"""The backends that this machine can run, by name, for tests that hold for each of them."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels import reference, row_operations
from kernels.attention.decode import paged_decode_attention
from kernels.attention.prompts import paged_prefill_attention
from kernels.backend import Angles, AttentionVariant, Backend, Heads, KVPages, Tables
from kernels.cpu import library
from kernels.cpu.library import IN_BLOCKS, ISA_TO_FEATURES, best_isa, can_run
from kernels.selection import select_backend

WriteKv = Callable[[Tensor, Tensor, Tensor, Tensor], None]
PagedDecodeAttention = Callable[[Tensor, KVPages, Tensor, Tensor, AttentionVariant], Tensor]
PagedPrefillAttention = Callable[[Tensor, KVPages, Tensor, Tensor, Tensor, AttentionVariant], Tensor]

ISAS = [isa for isa in ISA_TO_FEATURES if isa not in IN_BLOCKS and can_run(isa) and not torch.cuda.is_available()]
"""None on a machine with a GPU: it may have no compiler, and tests there put tensors on the device."""
NAMES = ["torch", *ISAS]
TILES = [isa for isa in IN_BLOCKS if ISAS and can_run(isa)]
"""The kernels with the order of sums of AMX, itself where a processor has it."""
PRODUCTS = [*TILES, *ISAS]
"""The kernels that differ in the products of linear layers."""


@cache
def make_backend(name: str) -> Backend:
    return select_backend(torch.device("cpu"), name)


def cpu_decode(
    query: Tensor, pages: KVPages, block_tables: Tensor, context_lens: Tensor, variant: AttentionVariant
) -> Tensor:
    """Attends as `kernels.reference.paged_decode_attention` does, with the C++ kernels of this machine."""
    starts = torch.arange(len(context_lens) + 1, dtype=torch.int32)
    tables = Tables(block_tables, context_lens, starts, len(context_lens))
    return make_backend(best_isa()).attend(query, pages, tables, variant)


def cpu_prefill(
    query: Tensor,
    pages: KVPages,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_query_lens: Tensor,
    variant: AttentionVariant,
) -> Tensor:
    """Attends as `kernels.reference.paged_prefill_attention` does, with the C++ kernels of this machine."""
    tables = Tables(block_tables, context_lens, cu_query_lens, 0)
    return make_backend(best_isa()).attend(query, pages, tables, variant)


def triton_write(key: Tensor, value: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
    """Writes as `kernels.reference.write_kv` does, with the Triton kernel and angles that turn nothing."""
    num_rows, num_kv_heads, head_dim = key.shape
    qkv = torch.cat([key, value], dim=1).flatten(1)
    cosines = torch.ones(num_rows, head_dim // 2, device=key.device)
    angles, heads = (
        Angles(cosines, torch.zeros_like(cosines)),
        Heads(num_queries=0, num_kv=num_kv_heads, size=head_dim, query_norm=None, key_norm=None, norm_eps=0.0),
    )
    row_operations.rotate_and_write(qkv, heads, angles, KVPages(kv_layer), slot_mapping)


DECODES: dict[str, PagedDecodeAttention] = {
    "reference": reference.paged_decode_attention,
    "triton": paged_decode_attention,
    **({"cpu": cpu_decode} if ISAS else {}),
}
PREFILLS: dict[str, PagedPrefillAttention] = {
    "reference": reference.paged_prefill_attention,
    "triton": paged_prefill_attention,
    **({"cpu": cpu_prefill} if ISAS else {}),
}


def lend_kernels(cache: Path) -> None:
    """Copies this user's compiled kernels into another cache: compiling takes a minute.

    A library that is there stays as it is: a worker that runs has it mapped, and would die of new bytes in it.
    """
    folder = cache / "baton" / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    for flags in map(library.compiler_flags, {best_isa(), *ISAS} if ISAS else ()):
        file = library.compiled(library.unit_paths(), flags, library.source_version())
        if not (folder / file.name).exists():
            shutil.copy2(file, folder)
