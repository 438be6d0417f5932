"""Waits, launches and copies of steps and of hand-offs, counted."""

from pathlib import Path

import pytest
import torch

from engine.model.decoder import Decoder
from kernels.triton_backend import TritonBackend
from kv_store.device_pool import DevicePool
from kv_store.node import arena
from kv_store.transfers import Fetch, WriteThrough
from tests.harness.checkpoints import choose_prompt, make_checkpoint
from tests.harness.engines import make_core, request, serve
from tests.harness.node import Node
from tests.kv_store.names import LAYOUT, names_of
from tests.simulated_gpu.device import SIM, Counts, counts
from tests.simulated_gpu.triton_kernels import triton_kernels
from wire.ids import PageId
from wire.sampling import SamplingParams
from wire.tier import Tier

NUM_BLOCKS = 256
NUM_LAYERS = 2
LAUNCHES_OF_SAMPLING = 7
LAUNCHES_BESIDE_LAYERS = 11
"""Of embedding, angles, last norm, head and sampling."""


def test_steps_wait_once(tmp_path: Path) -> None:
    """A chunk, which is a whole prompt here, reads its first token, a decoding step its next one."""
    folder = make_checkpoint("llama-gqa", tmp_path / "llama")
    with triton_kernels():
        core = make_core(Decoder.load(folder, "float32", SIM, 16, TritonBackend()))
        sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        serve(core, choose_prompt(folder, 1).prompt_ids, sampling)  # makes angles, captures a graph
        core.add(request(choose_prompt(folder, 17).prompt_ids, sampling))
        asked: list[Counts] = []
        while core.has_requests:
            before = counts()
            core.step()
            asked.append(counts() - before)
    chunk, *decodes = [one for one in asked if one.launches]
    assert (chunk.synchronizations, chunk.to_host) == (1, 1)
    assert chunk.launches == 10 * NUM_LAYERS + LAUNCHES_BESIDE_LAYERS
    for one in decodes:
        assert (one.synchronizations, one.to_device, one.to_host) == (1, 1, 1)
        assert one.launches == 1 + LAUNCHES_OF_SAMPLING


def test_a_hand_off_of_many_blocks_waits_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "GPU_CONTROLS", (Path("/dev/null"),))
    names, pages = names_of(NUM_BLOCKS * LAYOUT.block_size)[:NUM_BLOCKS], [PageId(one) for one in range(NUM_BLOCKS)]
    node = Node(LAYOUT)
    prefill, decode = (DevicePool(LAYOUT, NUM_BLOCKS, torch.device("sim", index)) for index in range(2))
    before = counts()
    node.transfers(prefill).begin(WriteThrough(names, pages))
    fetching = node.transfers(decode)
    fetching.begin(Fetch(names, pages))
    (fetched,) = fetching.poll()
    asked = counts() - before
    assert fetched.tiers == [Tier.HOST] * NUM_BLOCKS
    assert (asked.to_host, asked.to_device) == (NUM_BLOCKS, NUM_BLOCKS)
    assert asked.synchronizations == 2
