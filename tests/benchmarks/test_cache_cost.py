"""The engine without its cache gives the same tokens and keeps no block; the loss, computed by hand."""

from copy import copy
from pathlib import Path

import pytest

from benchmarks.cache_cost import describe_loss, no_cache, take_turns
from benchmarks.peer_engines import Baton, make_prompts
from tests.harness.checkpoints import make_checkpoint
from tests.harness.engines import make_core, serve
from tests.harness.known_model import MODEL
from wire.sampling import SamplingParams

PROMPT = tuple(range(50))
SAMPLING = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def test_nothing_is_kept_and_nothing_found_without_the_cache() -> None:
    cores = [make_core(MODEL) for _ in range(2)]
    runs = [serve(cores[0], PROMPT, SAMPLING) for _ in range(2)]
    with no_cache():
        others = [serve(cores[1], PROMPT, SAMPLING) for _ in range(2)]
    assert [run.outputs for run in others] == [run.outputs for run in runs]
    assert [run.fetched[0].num_found for run in (*runs, *others)] == [0, 48, 0, 0]
    assert cores[0].pool.ledger.counts().cached > 0
    assert cores[1].pool.ledger.counts().cached == 0
    assert [core.check() for core in cores] == [[], []]


def test_both_engines_of_a_round_give_the_same_tokens(tmp_path: Path) -> None:
    cached = Baton(make_checkpoint("llama-gqa", tmp_path), 1, "float32")
    uncached = copy(cached)
    uncached.renew()
    asked = [make_prompts(2, 20, seed, vocab_size=256) for seed in range(2)]
    one = take_turns(cached, uncached, asked, 3)
    assert [len(turn.token_ids) for turn in one.with_cache] == [2, 2]
    assert all(turn.wall_s > 0 for turn in (*one.with_cache, *one.without))


def test_tokens_that_differ_end_the_benchmark(tmp_path: Path) -> None:
    folders = [make_checkpoint("llama-gqa", tmp_path / str(seed), seed) for seed in range(2)]
    cached, other = (Baton(folder, 1, "float32") for folder in folders)
    with pytest.raises(RuntimeError, match="changed tokens"):
        take_turns(cached, other, [make_prompts(2, 20, 1, vocab_size=256)] * 2, 8)


def test_loss_is_the_share_of_time_that_the_cache_took() -> None:
    with_s, without_s = [(1.0, 1.0), (2.0, 2.0), (2.0, 3.0)], [(0.5, 0.5), (2.0, 2.0), (2.0, 2.0)]
    described = describe_loss(with_s, without_s)
    assert described == "20.00 (quartiles 10.00 .. 35.00); of the fastest turns 50.00"
