"""`baton roll` on a real Ray under streams: none is lost, refused or changed, and workers have the new settings."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.engine import Engine
from tests.cluster.served_cluster import SHARED_MEMORY, ServedCluster, wait_until
from tests.cluster.test_scaling_under_load import LENGTHS, NUM_CLIENTS, NUM_TOKENS, Load
from tests.harness.checkpoints import choose_prompt, make_checkpoint
from wire.sampling import SamplingParams

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@contextmanager
def scaled(cluster: ServedCluster) -> Iterator[None]:
    """The cluster has two workers of each role meanwhile."""
    cluster.do("scale", "--prefill", "2", "--decode", "2")
    yield
    cluster.do("scale", "--prefill", "1", "--decode", "1")


def pids(cluster: ServedCluster) -> set[int]:
    return {worker["pid"] for role in ("prefill", "decode") for worker in cluster.workers(role).values()}


def test_workers_are_rolled_under_streams_and_go_back_where_the_first_does_not_start(
    on_ray: ServedCluster, checkpoint: Path, tmp_path: Path
) -> None:
    cluster = on_ray
    load = Load(cluster.status()["address"], [choose_prompt(checkpoint, length, NUM_TOKENS) for length in LENGTHS])
    settings = tmp_path / "new.toml"
    settings.write_text("[batch]\nmax_running = 5\n[worker]\ndrain_grace_s = 20\n")
    with scaled(cluster):
        before = pids(cluster)
        with load.running():
            load.wait_for_more(NUM_CLIENTS)
            assert "all workers have revision 1" in cluster.do("roll", "--config", str(settings), "--threads", "1")
            load.wait_for_more(2 * NUM_CLIENTS)
            after = pids(cluster)
            refused = cluster.run("roll", "--grpc-port", "1")
            assert (refused.returncode, "--grpc-port: a roll does not change it" in refused.stderr) == (78, True)
            failed = cluster.run("roll", "--pool-bytes", "1")
            assert failed.returncode != 0, failed.stdout
            assert pids(cluster) == after
            load.wait_for_more(NUM_CLIENTS)
        assert [answer.choices[0].token_ids for _, answer in load.answers] == [
            prompt.token_ids for prompt, _ in load.answers
        ]
        assert (len(before), len(after), before & after) == (4, 4, set())
        assert not any(map(psutil.pid_exists, before))
        assert {worker["release"] for worker in cluster.workers("decode").values()} != {""}
        wait_until(cluster.is_sound, "all invariants hold")


def test_answers_amid_a_roll_to_other_weights_are_whole_of_the_old_or_of_the_new_model(
    cluster: ServedCluster, checkpoint: Path, tmp_path: Path
) -> None:
    """One worker a pool: for a while the old version has the decode worker, and the new one the prefill worker."""
    other = make_checkpoint("llama-gqa", tmp_path / "other", seed=1)
    prompts = [choose_prompt(checkpoint, length, NUM_TOKENS) for length in LENGTHS]
    load, before, right = Load(cluster.status()["address"], prompts), pids(cluster), choose_prompt(other, 33)
    with load.running():
        load.wait_for_more(NUM_CLIENTS)
        assert "all workers have revision" in cluster.do("roll", "--model", str(other))
        load.wait_for_more(2 * NUM_CLIENTS)
    assert not before & pids(cluster)
    answer = cluster.generate(right.prompt_ids, "--max-tokens", "64", "--ignore-eos")
    assert tuple(answer["token_ids"]) == right.token_ids
    for prompt in prompts:
        told = [answer.choices[0].token_ids for asked, answer in load.answers if asked is prompt]
        assert prompt.token_ids != told[-1], "it is the new model's"
        assert set(told) == {prompt.token_ids, told[-1]}
    wait_until(cluster.is_sound, "all invariants hold")
    cluster.do("roll", "--model", str(checkpoint))
    assert cluster.generate(prompts[0].prompt_ids, "--max-tokens", str(NUM_TOKENS), "--ignore-eos")[
        "token_ids"
    ] == list(prompts[0].token_ids)


@pytest.mark.parametrize(("setting", "value", "before"), [("kv_dtype", "int4", "auto"), ("dtype", "bfloat16", "auto")])
def test_answers_amid_a_roll_to_another_kv_layout_and_back_are_whole_of_one_version_and_one_arena_is_left(
    cluster: ServedCluster, checkpoint: Path, setting: str, value: str, before: str
) -> None:
    flag = f"--{setting.replace('_', '-')}"
    prompts = [choose_prompt(checkpoint, length, NUM_TOKENS) for length in LENGTHS]
    served: dict[str, Any] = {setting: value}
    alone = Engine.load(str(checkpoint), num_blocks=64, **served)
    asked = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    right = [tuple(one.choices[0].token_ids) for one in alone.generate([one.prompt_ids for one in prompts], asked)]
    load, processes = Load(cluster.status()["address"], prompts), pids(cluster)
    (arena,) = arenas(cluster)
    with load.running():
        load.wait_for_more(NUM_CLIENTS)
        cluster.do("roll", flag, value)
        load.wait_for_more(NUM_CLIENTS)
        wait_until(lambda: len(arenas(cluster)) == 1, "one arena")
        assert arena not in arenas(cluster)
        load.wait_for_more(NUM_CLIENTS)
        refused = cluster.run("roll", "--block-size", "32")
        assert (refused.returncode, "the model's block size of KV (model.block_size)" in refused.stderr) == (78, True)
        cluster.do("roll", flag, before)
        load.wait_for_more(NUM_CLIENTS)
    assert not processes & pids(cluster)
    assert [one.token_ids for one in prompts] != right
    for prompt, other in zip(prompts, right, strict=True):
        told = [answer.choices[0].token_ids for one, answer in load.answers if one is prompt]
        assert set(told) == {prompt.token_ids, other}
    wait_until(lambda: arenas(cluster) == [arena], "the arena of before")
    wait_until(cluster.is_sound, "all invariants hold")


def arenas(cluster: ServedCluster) -> list[Path]:
    return sorted(SHARED_MEMORY.glob(f"baton-{cluster.name}-*"))
