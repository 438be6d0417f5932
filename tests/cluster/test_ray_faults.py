"""Ray's own services fail: requests do not need them."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from deploy.local import run_dir
from tests.cluster.served_cluster import ServedCluster, wait_until
from tests.harness.checkpoints import choose_prompt
from tests.harness.fork_server import ON_RAY, ForkServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
NUM_TOKENS = 64
MAX_STORE_BYTES = 64 << 10
"""Of the store's own books. The KV of 700 tokens takes many times as much."""


def ray_process(on_ray: ServedCluster, program: str) -> psutil.Process:
    """The one of that program that Ray's head has started."""
    children = psutil.Process(on_ray.state()["head"]["pid"]).children(recursive=True)
    [found] = [child for child in children if child.name() == program]
    return found


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def test_requests_go_on_while_rays_control_store_is_stopped(on_ray: ServedCluster, checkpoint: Path) -> None:
    before = on_ray.workers("prefill") | on_ray.workers("decode")
    with on_ray.started("generate", "It was a dark night", "--max-tokens", "600", "--ignore-eos") as running:
        assert running.stdout is not None
        assert running.stdout.read(1)
        with stopped(ray_process(on_ray, "gcs_server")):
            expected = choose_prompt(checkpoint, 17)
            answer = on_ray.generate(expected.prompt_ids, "--max-tokens", str(NUM_TOKENS), "--ignore-eos")
            assert tuple(answer["token_ids"]) == expected.token_ids
            _, told = running.communicate(timeout=60)
            assert running.returncode == 0, told
            assert "600 generated" in told
            on_ray.do("status")
    wait_until(on_ray.is_sound, "all invariants hold")
    after = on_ray.workers("prefill") | on_ray.workers("decode")
    assert {name: worker["pid"] for name, worker in after.items()} == {
        name: worker["pid"] for name, worker in before.items()
    }


@pytest.mark.parametrize("program", ["gcs_server", "raylet"])
def test_the_end_of_ray_is_told_at_once_and_cleaned_up(
    program: str, tmp_path: Path, checkpoint: Path, forks: ForkServer
) -> None:
    other = ServedCluster(f"g{os.getpid()}", tmp_path, forks=forks, target=ON_RAY)
    try:
        other.do("up", "--model", str(checkpoint), "--prefill", "0", "--grpc-port", "0")
        ray_process(other, program).kill()
        wait_until(lambda: (Path(other.state()["run_dir"]) / run_dir.CRASH).exists(), "it is recorded")
        for command in (["status"], ["generate", "x"], ["scale", "--decode", "2"], ["drain", "decode-0"]):
            told = other.run(*command)
            assert told.returncode == 1
            assert "crashed at 20" in told.stderr
            assert f" (Ray's {program} ended): `baton down --name {other.name}` cleans up" in told.stderr
    finally:
        other.do("down")
    assert other.left_behind() == []


def test_ray_starts_no_program_that_no_cluster_asks(on_ray: ServedCluster) -> None:
    """Each of its autoscaler, log monitor and dashboard takes half a second of a processor, and 80 MB."""
    head = psutil.Process(on_ray.state()["head"]["pid"])
    assert {child.name() for child in head.children()} == {"gcs_server", "raylet"}


def test_kv_does_not_go_through_rays_object_store(on_ray: ServedCluster) -> None:
    on_ray.generate([number % 200 for number in range(700)], "--max-tokens", "4", "--ignore-eos")
    store = [
        memory.rss for memory in ray_process(on_ray, "raylet").memory_maps(grouped=False) if "plasma" in memory.path
    ]
    assert len(store) == 1
    assert store[0] < MAX_STORE_BYTES
