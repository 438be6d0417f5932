"""The memory of graphs, without a device."""

from itertools import count

import pytest
import torch

from kernels.accelerator import GraphMemory


def test_living_graphs_of_a_device_share_memory_and_later_ones_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses a capture into a pool that was left by all of its graphs."""
    handles = count()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(handles)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    one, other = torch.device("cuda", 0), torch.device("cuda", 1)
    first, second = GraphMemory.shared(one), GraphMemory.shared(one)
    assert first is second
    assert GraphMemory.shared(other).handle != first.handle
    GraphMemory.leave(one)
    third = GraphMemory.shared(one)
    assert third is not first
    left = third.handle
    del third
    assert GraphMemory.shared(one).handle != left
