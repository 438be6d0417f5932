"""The numbers of candidate kernels, interpreted where there is no GPU."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from benchmarks.gpu_candidates import PROMPT_TILES
from benchmarks.gpu_lab import describe_layers
from benchmarks.gpu_prototypes import NUM_KEYS, PromptTile, attend_contiguous, gather, sum_and_copy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("num_before", "num_rows"), [(0, 256), (77, 200)])
@pytest.mark.parametrize("tile", PROMPT_TILES.values(), ids=PROMPT_TILES)
def test_prompts_over_contiguous_keys(tile: PromptTile, num_before: int, num_rows: int) -> None:
    num_keys = num_before + num_rows
    query, key, value = (
        torch.randn(length, heads, 64, device=DEVICE).half()
        for length, heads in ((num_rows, 4), (num_keys, 2), (num_keys, 2))
    )
    heads = [one.float().transpose(0, 1) for one in (query, key, value)]
    seen = torch.ones(num_rows, num_keys, dtype=torch.bool, device=DEVICE).tril(num_before)
    expected = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=seen, enable_gqa=True)
    out = attend_contiguous(query, key, value, tile, num_before)
    torch.testing.assert_close(out.float(), expected.transpose(0, 1), rtol=2e-2, atol=2e-3)


def test_pages_are_gathered_in_the_order_of_their_tokens() -> None:
    pages = torch.randn(7, 3, 2, 2, 8, 16, device=DEVICE)[:, 1]
    table = torch.tensor([4, 0, 6], dtype=torch.int32, device=DEVICE)
    for plane, gathered in enumerate(gather(pages, table)):
        assert torch.equal(gathered, pages[table.long(), plane].transpose(1, 2).reshape(24, 2, 16))


def test_sums_of_blocks_equal_a_hosts() -> None:
    words, num_blocks = 1024, 3
    blocks = torch.randint(-(2**63), 2**63 - 1, (8, words), dtype=torch.int64)
    keys = torch.randint(-(2**31), 2**31 - 1, (NUM_KEYS,), dtype=torch.int32)
    sources, targets = torch.tensor([5, 0, 7], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32)
    on_device = [one.to(DEVICE) for one in (blocks, keys.view(torch.uint32), sources, targets)]
    copied = torch.zeros(num_blocks, words, dtype=torch.int64, device=DEVICE)
    sums = torch.zeros(num_blocks, words // 128, 2, dtype=torch.int64, device=DEVICE)
    memory, own_keys, places, slots = on_device
    sum_and_copy[(2,)](memory, copied, sums, own_keys, places, slots, 2 * num_blocks, words, 2, 2)
    assert torch.equal(copied[targets.long()].cpu(), blocks[sources.long()])
    assert np.array_equal(sums.cpu().numpy(), _sums(blocks[sources.long()].numpy(), keys.numpy()))
    sums.zero_()
    sum_and_copy[(6,)](memory, None, sums, own_keys, places, slots, 2 * num_blocks, words, 2, 4)
    assert np.array_equal(sums.cpu().numpy(), _sums(blocks[sources.long()].numpy(), keys.numpy()))


def test_kernels_of_a_step_are_told_by_their_places_in_a_layer() -> None:
    events: list[dict[str, object]] = [{"cat": "cpu_op", "name": "attend", "ts": 0, "dur": 9}]
    time = 0.0
    for _ in range(5):
        for name, took in (*[("attend", 8.0), ("product", 20.0)] * 4, ("choose", 5.0)):
            events.append({"cat": "kernel", "name": name, "ts": time, "dur": took})
            time += took + 0.5
    lines = list(describe_layers(events[::-1]))
    assert lines[:3] == [
        "     8.00 us, then  0.50 idle  attend",
        "    20.00 us, then  0.50 idle  product",
        "  a layer: 29.0 us",
    ]
    assert lines[3] == "  from the last layer of a step to the first of the next: 34.5 us"
    assert lines[4:] == ["       5.00 us, then  0.50 idle  choose"]


def _sums(blocks: np.ndarray, keys: np.ndarray) -> np.ndarray:
    words = blocks.view(np.uint64).reshape(len(blocks), -1, 128)
    low, high = words & np.uint64(2**32 - 1), words >> np.uint64(32)
    even, odd = keys.view(np.uint32).astype(np.uint64).reshape(2, 2, 128).transpose(1, 0, 2)

    def halves(part: np.ndarray, own: np.ndarray) -> Any:
        return (part + own) & np.uint64(2**32 - 1)

    pairs = [(halves(low, even[i]) * halves(high, odd[i])).sum(-1, dtype=np.uint64) for i in range(2)]
    sums: np.ndarray = np.stack(pairs, -1).view(np.int64)
    return sums
