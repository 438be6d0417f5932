"""A cluster in this process, each worker on a simulated GPU of its own: threads of transfers, and devices that fail."""

import asyncio
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from engine.model.decoder import Decoder
from kv_store.node import arena
from tests.harness.checkpoints import choose_prompt, make_checkpoint
from tests.harness.local_cluster import LocalCluster, Parts, Sizes
from tests.pairs import RUNS_ALL
from tests.simulated_gpu.device import commands, leave_room
from wire.errors import ConfigError
from wire.pb import inference_pb2 as pb

LENGTHS = (1, 17, 40, 100, 17)
NUM_TOKENS = 24
MOST_REQUESTS = 20
TIME_LEFT_S = 300.0
ROOM_BYTES = 8 * 4096
WORKER_TO_DEVICE = {"p0": 0, "d0": 1, "d1": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama-gqa"))


@pytest.fixture(autouse=True)
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes arenas look for a GPU."""
    monkeypatch.setattr(arena, "GPU_CONTROLS", (Path("/dev/null"),))


class DeviceCluster(LocalCluster):
    """Workers with the same checkpoint, each on its own device; a worker that breaks is dead to the router."""

    def __init__(self, folder: Path) -> None:
        self._models = {
            name: Decoder.load(folder, "float32", torch.device("sim", device), 16)
            for name, device in WORKER_TO_DEVICE.items()
        }
        self._loop = asyncio.get_running_loop()
        self.broken: list[str] = []
        super().__init__(self._models["p0"], Sizes(num_blocks=64, num_slots=128))

    def _parts(self, name: str) -> Parts:
        return Parts(self._models[name], super()._parts(name).tiers)

    def _broke(self, name: str) -> None:
        self.broken.append(name)
        self._loop.call_soon_threadsafe(self.transports[name].kill)


def no_fault(_: DeviceCluster) -> None:
    """Does nothing."""


FAULTS: list[Callable[[DeviceCluster], None]] = [
    lambda cluster: cluster.transports["p0"].kill(),
    lambda cluster: cluster.transports["d0"].kill(),
    lambda _: leave_room(WORKER_TO_DEVICE["d0"], ROOM_BYTES),
]
"""The prefill worker or a decode worker is killed between two steps; a device has no memory left amid one."""


def ask(folder: Path, length: int) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=choose_prompt(folder, length).prompt_ids), sampling_params=sampling
    )


def expected(folder: Path) -> list[list[int]]:
    return [list(choose_prompt(folder, length).token_ids[:NUM_TOKENS]) for length in LENGTHS]


async def test_workers_on_devices_of_their_own_give_transformers_tokens(folder: Path) -> None:
    cluster = DeviceCluster(folder)
    await cluster.start(1, 2)
    try:
        outputs = await asyncio.gather(*(cluster.generate(ask(folder, length), TIME_LEFT_S) for length in LENGTHS))
    finally:
        await cluster.stop()
    assert [output.token_ids[0] for output in outputs] == expected(folder)
    assert cluster.broken == []


async def test_requests_of_a_device_that_fails_go_on_elsewhere_token_for_token(folder: Path) -> None:
    """A worker gives up after a few failed steps; until then each of its requests goes to another worker."""
    cluster = DeviceCluster(folder)
    await cluster.start(1, 2)
    try:
        sessions = [cluster.router.dispatcher.open(ask(folder, length), TIME_LEFT_S) for length in LENGTHS]
        tokens: list[list[int]] = [[] for _ in LENGTHS]
        for own, session in zip(tokens, sessions, strict=True):
            async for response in session.outbox:
                own += response.chunk.token_ids
                if len(own) >= 4:
                    commands().fail(WORKER_TO_DEVICE["d0"], "an uncorrectable error of its memory")
        for _ in range(MOST_REQUESTS):
            outputs = await asyncio.gather(*(cluster.generate(ask(folder, length), TIME_LEFT_S) for length in LENGTHS))
            assert [output.token_ids[0] for output in outputs] == expected(folder)
            if cluster.broken:
                break
    finally:
        await cluster.stop()
        commands().repair(WORKER_TO_DEVICE["d0"])
    assert tokens == expected(folder)
    assert cluster.broken == ["d0"]


async def test_requests_of_a_device_without_memory_go_on_elsewhere(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = DeviceCluster(folder)
    await cluster.start(1, 2)
    try:
        leave_room(WORKER_TO_DEVICE["d0"], ROOM_BYTES)
        outputs = await asyncio.gather(*(cluster.generate(ask(folder, length), TIME_LEFT_S) for length in LENGTHS))
    finally:
        await cluster.stop()
    assert [output.token_ids[0] for output in outputs] == expected(folder)
    assert "out of memory on sim:1" in caplog.text


@pytest.mark.parametrize("seed", range(20 if RUNS_ALL else 2))
async def test_drawn_faults_change_no_token(folder: Path, seed: int) -> None:
    """Two faults strike once drawn numbers of tokens have come; a second wave of requests meets what they have left."""
    draw = random.Random(seed)
    strikes = {draw.randrange(1, len(LENGTHS) * NUM_TOKENS): fault for fault in draw.sample(FAULTS, 2)}
    cluster, num_tokens = DeviceCluster(folder), count(1)

    async def answer(length: int) -> list[int]:
        tokens: list[int] = []
        async for response in cluster.router.dispatcher.open(ask(folder, length), TIME_LEFT_S).outbox:
            tokens += response.chunk.token_ids
            for _ in response.chunk.token_ids:
                strikes.pop(next(num_tokens), no_fault)(cluster)
        return tokens

    await cluster.start(1, 2)
    try:
        for _ in range(2):
            assert await asyncio.gather(*map(answer, LENGTHS)) == expected(folder)
    finally:
        await cluster.stop()
    assert not strikes


async def test_pages_that_do_not_fit_are_refused_at_start(folder: Path) -> None:
    cluster = DeviceCluster(folder)
    leave_room(WORKER_TO_DEVICE["d0"], ROOM_BYTES)
    with pytest.raises(ConfigError, match=r"worker d0: .* 64 blocks of KV do not fit .*: lower worker\.pool_bytes"):
        await cluster.enlist("d0")
    await cluster.stop()
