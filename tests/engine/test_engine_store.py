"""An engine in a program, over a store of blocks that outlives it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from baton import Engine, PrefixStore, SamplingParams, tiers
from deploy.plan.config import ModelSettings
from deploy.plan.model import inspect_model
from router.config import ClusterAccess, RouterConfig

SECRET = bytes(range(32))
GREEDY = SamplingParams(temperature=0, max_tokens=40)
PROMPT = [(7 * place + place // 5) % 250 for place in range(150)]
Checkpoints = Callable[[str], Path]


def load(checkpoint: Path, folder: Path, kv_dtype: str = "auto", kv_policy: str = "full") -> Engine:
    in_files = partial(PrefixStore, [tiers.files(str(folder), 64 << 20)], secret=SECRET)
    return Engine.load(str(checkpoint), kv_dtype=kv_dtype, kv_policy=kv_policy, store=in_files)


def store_of(engine: Engine) -> PrefixStore:
    assert engine.store is not None
    return engine.store


def answer(engine: Engine, prompt: list[int] = PROMPT) -> list[int]:
    [completion] = engine.generate([prompt], GREEDY)
    return completion.choices[0].token_ids


@pytest.mark.parametrize(
    ("arch", "kv_dtype", "kv_policy", "num_read"),
    [
        ("llama-gqa", "auto", "full", 9),
        ("llama-gqa", "int8", "full", 9),
        ("qwen2", "auto", "full", 9),
        ("mistral-window", "auto", "full", 4),
        ("llama-gqa", "auto", "sinks=4+60", 5),
        ("llama-gqa", "auto", "snapkv=50%", 8),
    ],
)
def test_a_second_engine_reads_the_blocks_of_the_first_and_says_the_same(
    checkpoint: Checkpoints, tmp_path: Path, arch: str, kv_dtype: str, kv_policy: str, num_read: int
) -> None:
    alone = answer(Engine.load(str(checkpoint(arch)), kv_dtype=kv_dtype, kv_policy=kv_policy))
    for hits in (0, num_read):
        engine = load(checkpoint(arch), tmp_path, kv_dtype, kv_policy)
        with store_of(engine) as store:
            assert answer(engine) == alone
            [files] = store.status()
            assert (files.hits, files.errors, files.corrupt) == (hits, 0, 0)


def test_blocks_of_the_answer_are_read_with_the_next_turn(checkpoint: Checkpoints, tmp_path: Path) -> None:
    with store_of(first := load(checkpoint("llama-gqa"), tmp_path)):
        turn = [*PROMPT, *answer(first), 1, 2, 3]
    with store_of(second := load(checkpoint("llama-gqa"), tmp_path)) as store:
        answer(second, turn)
        assert store.status()[0].hits == (150 + 40 - 1) // 16


def test_the_answer_depends_on_the_blocks_that_are_read(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Blocks are stored with other numbers: else the tests above would show nothing."""
    with store_of(engine := load(checkpoint("llama-gqa"), tmp_path)) as store:
        alone = answer(engine)
        kv = store.get_closest(PROMPT).kv
        store.evict(PROMPT)
        store.put(PROMPT[:144], -kv)
    with store_of(engine := load(checkpoint("llama-gqa"), tmp_path)):
        assert answer(engine) != alone


def test_damaged_blocks_are_computed(checkpoint: Checkpoints, tmp_path: Path) -> None:
    with store_of(engine := load(checkpoint("llama-gqa"), tmp_path)):
        alone = answer(engine)
    for number, path in enumerate(tmp_path.glob("??/*")):
        path.write_bytes([b"", path.read_bytes()[:-1], path.read_bytes()[:-1] + b"?"][number % 3])
    with store_of(engine := load(checkpoint("llama-gqa"), tmp_path)) as store:
        assert answer(engine) == alone
        assert store.status()[0].corrupt > 0


def test_prefixes_of_an_engine_are_in_its_store(checkpoint: Checkpoints, tmp_path: Path) -> None:
    with store_of(engine := load(checkpoint("llama-gqa"), tmp_path)) as store:
        assert not store.contains(PROMPT)
        tokens = [*PROMPT, *answer(engine)]
        assert store.contains(PROMPT)
        prefix = store.get_closest(tokens)
        assert prefix.num_tokens == 176
        assert prefix.kv.shape == (2, 2, 2, 176, 16)
        assert torch.isfinite(prefix.kv).all()


def test_names_are_the_same_as_of_a_cluster_that_serves_the_model(checkpoint: Checkpoints, tmp_path: Path) -> None:
    for kv_dtype in ("auto", "int8"):
        settings = ModelSettings(path=str(checkpoint("llama-gqa")), block_size=16, kv_dtype=kv_dtype)
        router = RouterConfig(model=inspect_model(settings, "cpu").served, cluster=ClusterAccess("token", SECRET.hex()))
        with store_of(load(checkpoint("llama-gqa"), tmp_path, kv_dtype)) as store:
            assert store.root == router.root_of("default")


def test_another_model_or_dtype_of_kv_finds_nothing(checkpoint: Checkpoints, tmp_path: Path) -> None:
    with store_of(engine := load(checkpoint("llama-gqa"), tmp_path)):
        answer(engine)
    for arch, kv_dtype in (("llama-gqa", "int8"), ("llama-mha", "auto")):
        with store_of(engine := load(checkpoint(arch), tmp_path, kv_dtype)) as store:
            assert not store.contains(PROMPT)
            answer(engine)
            assert store.status()[0].hits == 0
