"""Attention by warp groups on a Hopper, against dense attention: its language has no interpreter."""

import pytest
import torch

from kernels.attention import prompts
from kernels.attention.prompts import choose_groups, paged_prefill_attention
from kernels.tiles import GroupTile
from tests.kernels.paged_batch import Heads, dense_attention, make_paged_batch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper", allow_module_level=True)

TILES = pytest.mark.parametrize("tile", [GroupTile(128, 2), GroupTile(128, 3), GroupTile(64, 4)], ids=str)
BATCHES = {
    "one row": ([1], [1]),
    "ends of blocks and tiles": ([15, 16, 17, 127, 128, 129, 256, 257], [15, 16, 17, 127, 128, 129, 256, 257]),
    "behind prefixes": ([1500, 700, 300, 3000, 129], [512, 1, 300, 700, 2]),
}


@TILES
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(
    ("heads", "block_size", "dtype"),
    [
        (Heads(32, 8, 128), 16, torch.bfloat16),
        (Heads(32, 8, 128), 16, torch.float16),
        (Heads(9, 3, 64), 16, torch.bfloat16),
        (Heads(8, 8, 128), 32, torch.bfloat16),
        (Heads(7, 1, 64), 8, torch.float16),
    ],
    ids=str,
)
def test_prompts_of_several_sequences(
    heads: Heads, block_size: int, dtype: torch.dtype, name: str, tile: GroupTile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are NaN past the end of each sequence. Rows before the first sequence of two stay as they are."""
    monkeypatch.setattr(prompts, "choose_group_tile", lambda *_: tile)
    device = torch.device("cuda")
    context_lens, query_lens = BATCHES[name]
    batch = make_paged_batch(heads, [5, *context_lens], block_size, dtype, device)
    query = batch.random_query(1 + sum(query_lens))
    starts = torch.tensor([0, 1, *query_lens], device=device).cumsum(0, dtype=torch.int32)
    assert choose_groups(query, batch.pages, batch.variant()) is not None
    twice = []
    for _ in range(2):
        out = torch.full_like(query, 7.0, memory_format=torch.contiguous_format)
        tables = batch.block_tables, batch.context_lens, starts
        twice.append(paged_prefill_attention(query, batch.pages, *tables, batch.variant(), None, out, 1))
    rows = zip(query.split([1, *query_lens])[1:], batch.keys[1:], batch.values[1:], strict=True)
    expected = torch.cat([dense_attention(*one, batch.variant()) for one in rows])
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(twice[0][1:], expected.to(dtype), atol=tolerance, rtol=tolerance)
    assert torch.equal(*twice)
    assert bool(twice[0][0].eq(7.0).all())
