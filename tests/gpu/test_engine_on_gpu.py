"""The engine and the store with pages on a GPU: transformers' tokens, alone and handed over through a pinned arena."""

import mmap
from pathlib import Path

import pytest
import torch

from engine.model.decoder import Decoder
from kv_store.node.arena import Arena
from kv_store.tiers.memory_tier import MemoryTier
from tests.harness.checkpoints import choose_prompt, make_checkpoint
from tests.harness.engines import drive, make_core, prefill, release, request, resume
from tests.harness.node import Node
from wire.ids import SlotId
from wire.sampling import SamplingParams

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

LENGTHS = (1, 16, 17, 100, 700)
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
DEVICE = torch.device("cuda")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama-gqa"))


def prompts(folder: Path) -> list[tuple[int, ...]]:
    return [choose_prompt(folder, length).prompt_ids for length in LENGTHS]


def test_float32_gives_the_tokens_of_transformers(folder: Path) -> None:
    model = Decoder.load(folder, "float32", DEVICE, 16)
    expected = [choose_prompt(folder, length) for length in LENGTHS]
    runs = drive(make_core(model), [request(one.prompt_ids, GREEDY) for one in expected])
    assert [tuple(run.outputs[0]) for run in runs] == [one.token_ids for one in expected]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_handed_over_through_the_arena(folder: Path, dtype: str) -> None:
    """Two decode engines that fetch the same blocks do the same: in half precision, too, where prefill may not."""
    model = Decoder.load(folder, dtype, DEVICE, 16)
    node = Node(model.layout)
    handed = prefill(make_core(model, node), prompts(folder), GREEDY)
    outputs = []
    for _ in range(2):
        decode = make_core(model, node)
        outputs.append([run.outputs for run in resume(decode, handed)])
        assert decode.stats().computed_prompt_tokens == 0
    assert outputs[0] == outputs[1]


def test_hits_in_host_and_cold_tier_change_nothing(folder: Path) -> None:
    pytest.importorskip("cryptography", reason="a cold tier closes its frames with it")
    model = Decoder.load(folder, "float32", DEVICE, 16)
    expected = [choose_prompt(folder, length).token_ids for length in LENGTHS]
    cold = MemoryTier(model.layout)
    node = Node(model.layout, cold=cold)
    computed = prefill(make_core(model, node), prompts(folder), GREEDY)
    in_host = prefill(make_core(model, node), prompts(folder), GREEDY)
    release(node, [*computed, *in_host])
    node.write_all_cold()
    restarted = Node(model.layout, cold=cold)
    in_cold = prefill(make_core(model, restarted), prompts(folder), GREEDY)
    assert [run.fetched[0].found["host"] for run in in_host] == [run.fetched[0].found["redis"] for run in in_cold]
    for where, runs in ((node, in_host), (restarted, in_cold)):
        assert [tuple(run.outputs[0]) for run in resume(make_core(model, where), runs)] == expected


def test_an_arena_that_cannot_be_pinned_leaves_the_device_as_it_was() -> None:
    """A second mapping at the address of one that is pinned is refused by the driver."""
    memory = mmap.mmap(-1, 64 * 4096)
    first, second = (Arena(memory, 4096, 64, None) for _ in range(2))
    assert torch.zeros(3, device=DEVICE).sum() == 0
    second.close()
    assert torch.frombuffer(first.slot(SlotId(3)), dtype=torch.uint8).is_pinned()
    first.close()


def test_arenas_that_were_not_closed_are_unpinned() -> None:
    for _ in range(3):
        arena = Arena.anonymous(1 << 20, 16)
        assert torch.frombuffer(arena.slot(SlotId(3)), dtype=torch.uint8).is_pinned()
        del arena
