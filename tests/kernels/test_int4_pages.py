"""The closing of blocks of int4 in Triton, against torch's."""

import pytest
import torch

from kernels import reference
from kernels.attention import int4_pages
from tests.kernels.paged_batch import Heads, empty_codes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "block_size"), [(Heads(2, 2, 32), 16), (Heads(3, 3, 80), 8), (Heads(1, 1, 128), 64)])
def test_closes_blocks_bit_by_bit(dtype: torch.dtype, heads: Heads, block_size: int, device: torch.device) -> None:
    """Of pages 3 and 0, not of 1, whose last slot is not written; a channel and a token of page 3 have no number."""
    pages = empty_codes(4, heads, block_size, "int4", device, dtype)
    assert pages.int4 is not None
    assert pages.scales is not None
    numbers = torch.randn(pages.int4.open.shape) * torch.logspace(-3, 3, heads.head_dim)
    numbers[:, :, 0, :, 2] = 0
    pages.int4.open.copy_(numbers)
    pages.int4.open[pages.int4.page_to_open[3], 0, 0, 1, 1] = torch.inf
    pages.int4.open[pages.int4.page_to_open[3], 1, 0, 1, 1] = torch.nan
    slots = torch.tensor([4 * block_size - 1, -1, 5, block_size - 1, block_size], device=device)
    before = [one.clone() for one in (pages.data, pages.int4.key_scales, pages.scales)]
    found = []
    for close in (reference.close_blocks, int4_pages.close_blocks):
        for one, old in zip((pages.data, pages.int4.key_scales, pages.scales), before, strict=True):
            one.copy_(old)
        close(pages, slots)
        found.append([reference.unpack_int4(pages.data).float(), pages.int4.key_scales.clone(), pages.scales.clone()])
    (codes, *scales), (triton_codes, *triton_scales) = found
    for expected, actual in zip(scales, triton_scales, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    is_number = torch.stack(
        [
            scales[0].isfinite()[:, :, None].expand_as(codes[:, 0]),
            scales[1].isfinite()[..., None].expand_as(codes[:, 1]),
        ],
        dim=1,
    )
    assert torch.equal(triton_codes[is_number], codes[is_number])
    assert [int(one.isfinite().all(-1).all(-1).sum()) for one in scales] == [1, 1]
