import random
from dataclasses import replace

import pytest
import torch

from engine.model.batch import Batch
from engine.model.hash_model import HashModel
from kernels.backend import KVPages
from tests.harness.model_alone import PagedRun, generate
from wire.layout import KVLayout

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")
MODEL = HashModel(LAYOUT, vocab_size=1000)
PROMPTS = [[random.Random(length).randrange(1000) for _ in range(length)] for length in (1, 3, 4, 5, 30, 61)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk_len", [100, 7])
def test_generates_what_its_oracle_says(dtype: str, chunk_len: int) -> None:
    model = HashModel(replace(LAYOUT, dtype=dtype), vocab_size=1000)
    assert generate(model, PROMPTS, 20, chunk_len) == [model.oracle(prompt, 20) for prompt in PROMPTS]


def test_pages_may_stand_apart() -> None:
    run = PagedRun(MODEL, PROMPTS, 20)
    pool = torch.zeros(len(run.kv), LAYOUT.block_bytes // 4)
    run.kv = pool[:, : LAYOUT.payload_bytes // 4].view(-1, *LAYOUT.shape)
    run.prefill(100)
    assert run.decode(20) == [MODEL.oracle(prompt, 20) for prompt in PROMPTS]


def test_what_is_stored_is_a_function_of_the_prefix() -> None:
    first, second = PagedRun(MODEL, PROMPTS, 20), PagedRun(MODEL, PROMPTS[::-1], 20)
    for run, chunk_len in ((first, 100), (second, 5)):
        run.prefill(chunk_len)
    pages, others = first.rows[-1].pages[:15], second.rows[0].pages[:15]
    assert torch.equal(first.kv[pages].view(torch.int64), second.kv[others].view(torch.int64))


@pytest.mark.parametrize("layer", range(LAYOUT.num_layers))
@pytest.mark.parametrize("position", [0, 17, 60])
def test_one_changed_bit_changes_the_next_token(layer: int, position: int) -> None:
    run = prefilled()
    page, offset = run.rows[-1].pages[position // 4], position % 4
    run.kv.view(torch.int32)[page, layer, 1, 0, offset, 3] ^= 1
    assert run.decode(2)[-1][1] != MODEL.oracle(PROMPTS[-1], 2)[1]


def test_swapping_two_blocks_changes_the_next_token() -> None:
    run = prefilled()
    first, second = run.rows[-1].pages[2:4]
    run.kv[[first, second]] = run.kv[[second, first]]
    assert run.decode(2)[-1][1] != MODEL.oracle(PROMPTS[-1], 2)[1]


def test_what_stands_after_the_context_does_not_matter() -> None:
    run = prefilled()
    run.kv[run.rows[-1].pages[15], :, :, :, 2:] = 7
    run.kv[run.rows[-1].pages[16:]] = 7
    assert run.decode(20)[-1] == MODEL.oracle(PROMPTS[-1], 20)


def prefilled() -> PagedRun:
    run = PagedRun(MODEL, PROMPTS, 20)
    run.prefill(100)
    return run


def test_a_step_in_the_wrong_place_shows() -> None:
    run = prefilled()
    batch = run.batch([(row, 1) for row in run.rows])
    misplaced = replace(batch, positions=batch.positions - 1)
    assert not torch.equal(next_tokens(batch, run), next_tokens(misplaced, run))


def next_tokens(batch: Batch, run: PagedRun) -> torch.Tensor:
    return MODEL.forward(batch, KVPages(run.kv.clone())).argmax(-1)


def test_logits_leave_samplers_a_choice() -> None:
    run = PagedRun(MODEL, PROMPTS, 1)
    logits = MODEL.forward(run.batch([(run.rows[0], 1)]), KVPages(run.kv))
    assert logits.dtype == torch.float32
    best = logits.softmax(-1).max()
    assert 0.01 < best < 0.5


def test_models_of_other_seeds_say_other_things() -> None:
    assert HashModel(LAYOUT, 1000, seed=1).oracle(PROMPTS[0], 8) != MODEL.oracle(PROMPTS[0], 8)


def test_heads_that_fill_no_whole_word_are_refused() -> None:
    with pytest.raises(ValueError, match="64-bit"):
        HashModel(replace(LAYOUT, head_dim=3), 1000)
