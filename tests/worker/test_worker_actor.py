"""Both roles as processes on a checkpoint: a request goes through them, and SIGTERM lets them finish what they do."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deploy.actors.worker import PoolWorker
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.fingerprint import DigestCache
from engine.model.loading import load_model
from kernels.selection import select_backend
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.node.directory_server import DirectoryServer
from router.workers.grpc_transport import GrpcTransport
from router.workers.line import Line
from tests.harness.checkpoints import choose_prompt, make_checkpoint
from tests.harness.one_worker import Attempt, begin_of, greedy, prompt_source, tokens_of
from tests.harness.served import served_model
from wire.convert import tiers_from_pb
from wire.errors import ModelError, Unavailable
from wire.pools import Role
from wire.typed_reader import to_json
from worker.config import (
    MIN_SILENCE_S,
    CheckpointSettings,
    ServerSettings,
    StoreSettings,
    WorkerConfig,
)

TOKEN = "the cluster's"
TIMEOUT_S = 90.0
NUM_SLOTS = 256
NUM_TOKENS = 64
ROLES = ("prefill", "decode")


class WorkerProcess:
    """One worker; `line` speaks to it."""

    def __init__(self, config: WorkerConfig, module: str, class_name: str) -> None:
        command = [sys.executable, "-m", "tests.worker.worker_process", module, class_name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None
        self.process.stdin.write(to_json(config) + "\n")
        self.process.stdin.flush()

    @asynccontextmanager
    async def line(self) -> AsyncIterator[Line]:
        """A line to the worker, once it says where it listens."""
        assert self.process.stdout is not None
        address = json.loads(await asyncio.to_thread(self.process.stdout.readline))["public"]
        line = Line(GrpcTransport(address, TOKEN))
        yield line
        await line.close(Unavailable("it is over"))

    def kill(self) -> None:
        with self.process as process:
            process.kill()


@pytest.fixture
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return make_checkpoint(getattr(request, "param", "llama-gqa"), tmp_path / "model")


@pytest.fixture
def directory_path(tmp_path: Path, checkpoint: Path) -> Iterator[str]:
    layout = load_model(checkpoint, None, torch.device("cpu"), 16).layout
    arena = Arena.create(str(tmp_path / "arena"), layout.block_bytes, NUM_SLOTS)
    directory = Directory(NUM_SLOTS, arena_path=str(arena.path), block_bytes=layout.block_bytes)
    server = DirectoryServer(directory, str(tmp_path / "socket"))
    server.start()
    yield str(tmp_path / "socket")
    server.stop()
    arena.close()


@pytest.fixture
def workers(checkpoint: Path, directory_path: str) -> Iterator[dict[str, WorkerProcess]]:
    configs = {role: config_of(role, checkpoint, directory_path, fingerprint_of(checkpoint)) for role in ROLES}
    workers = {role: WorkerProcess(configs[role], "deploy.actors.worker", "PoolWorker") for role in ROLES}
    yield workers
    for worker in workers.values():
        worker.kill()


def fingerprint_of(checkpoint: Path) -> str:
    version = select_backend(torch.device("cpu")).version
    return Checkpoint(checkpoint).fingerprint("float32", version, DigestCache.of_user()).hex()


def config_of(role: str, checkpoint: Path, directory_path: str, fingerprint_hex: str = "ab" * 32) -> WorkerConfig:
    return WorkerConfig(
        worker_id=f"{role}-0",
        role=Role(role),
        model=CheckpointSettings(served_model(folder=str(checkpoint), fingerprint_hex=fingerprint_hex)),
        num_blocks=64,
        store=StoreSettings(directory_path, "00" * 32),
        server=ServerSettings(TOKEN),
    )


@pytest.mark.parametrize("checkpoint", ["llama-gqa", "gpt-neox"], indirect=True)
async def test_processes_serve_a_request_between_them_and_end_well_when_told(
    workers: dict[str, WorkerProcess], checkpoint: Path
) -> None:
    oracle = choose_prompt(checkpoint, 60, NUM_TOKENS)
    sampling = greedy(NUM_TOKENS)
    async with workers["prefill"].line() as prefill, workers["decode"].line() as decode:
        first = tokens_of(await Attempt(prefill, begin_of(oracle.prompt_ids, sampling)).end())
        attempt = Attempt(decode, begin_of(oracle.prompt_ids, sampling, outputs=[first]))
        await attempt.first()
        for worker in workers.values():
            worker.process.send_signal(signal.SIGTERM)
        updates = await attempt.end()
    assert first + tokens_of(updates) == list(oracle.token_ids)
    source = prompt_source(updates)
    assert (tiers_from_pb(source.cached_tokens), source.computed_tokens) == ({"host": 60}, 0)
    codes = [await asyncio.to_thread(worker.process.wait, TIMEOUT_S) for worker in workers.values()]
    assert codes == [0, 0]


async def test_a_worker_whose_engine_hangs_says_so_and_ends_itself(checkpoint: Path, directory_path: str) -> None:
    config = config_of("decode", checkpoint, directory_path, fingerprint_of(checkpoint))
    config = replace(config, max_silence_s=MIN_SILENCE_S)
    worker = WorkerProcess(config, "tests.worker.hanging_actor", "HangingActor")
    try:
        async with worker.line() as line:
            with pytest.raises(Unavailable, match="hangs"):
                await Attempt(line, begin_of()).end()
            assert await asyncio.to_thread(worker.process.wait, TIMEOUT_S) == 1
    finally:
        worker.kill()


async def test_a_model_folder_that_has_changed_is_not_served(checkpoint: Path, directory_path: str) -> None:
    config = config_of("decode", checkpoint, directory_path, fingerprint_of(checkpoint))
    weights = checkpoint / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ModelError, match="has changed"):
        await PoolWorker(to_json(config)).start()


async def test_nothing_can_be_asked_of_a_worker_before_it_has_started() -> None:
    actor = PoolWorker(to_json(config_of("decode", Path("model"), "")))
    with pytest.raises(Unavailable):
        await actor.drain(1)
