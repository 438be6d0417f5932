"""The numbers of candidate kernels, interpreted where there is no GPU."""

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu_lab import ATTENTION, describe_layers
from benchmarks.gpu_prototypes import NUM_KEYS, sum_and_copy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


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


@pytest.mark.parametrize("attention", ATTENTION)
def test_kernels_of_a_step_are_told_by_their_places_in_a_layer(attention: str) -> None:
    events: list[dict[str, object]] = [{"cat": "cpu_op", "name": "attend", "ts": 0, "dur": 9}]
    time = 0.0
    for _ in range(5):
        for name, took in (*[(attention, 8.0), ("product", 20.0)] * 4, ("choose", 5.0)):
            events.append({"cat": "kernel", "name": name, "ts": time, "dur": took})
            time += took + 0.5
    lines = list(describe_layers(events[::-1]))
    assert lines[:3] == [
        f"     8.00 us, then  0.50 idle  {attention}",
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
