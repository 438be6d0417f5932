"""The arena's directory dies and comes back empty, with a new arena: what was there is a miss, and no more."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.node.directory_client import DirectoryClient
from kv_store.node.directory_server import DirectoryServer
from tests.faults.load import Load, under_load
from tests.faults.rest import at_rest
from tests.harness.answer import ask
from tests.harness.cluster import until
from tests.harness.directory_gate import DirectoryGate
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.known_model import LAYOUT, MODEL
from tests.harness.local_cluster import Parts, Sizes
from worker.assembly import Tiers

SIZES = Sizes(num_blocks=64, num_slots=64)
PROMPT = tuple(range(100))


class ClusterOverSocket(FaultyCluster):
    """Workers reach the directory over its Unix socket, and map the arena's file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(MODEL, SIZES)
        self._folder = folder
        self._num_epochs = 0
        self._lines: list[DirectoryClient] = []
        self.serve_directory()

    def serve_directory(self) -> None:
        """A new epoch: an empty directory, and an arena of its own."""
        self._num_epochs += 1
        path = str(self._folder / f"arena-{self._num_epochs}")
        self.arena = Arena.create(path, LAYOUT.block_bytes, SIZES.num_slots)
        self.directory = Directory(SIZES.num_slots, self.clock, arena_path=path, block_bytes=LAYOUT.block_bytes)
        self._server = DirectoryServer(self.directory, str(self._folder / "socket"))
        self._server.start()

    def stop_directory(self) -> None:
        self._server.stop()

    async def stop(self) -> None:
        await super().stop()
        for line in self._lines:
            line.close()
        self._server.stop()

    def _parts(self, name: str) -> Parts:
        parts = super()._parts(name)
        line = DirectoryClient(str(self._folder / "socket"))
        self._lines.append(line)
        arena = Arena.open(line.attach().arena_path)
        self.gates[name] = DirectoryGate(line)
        return Parts(parts.model, Tiers(arena, self.gates[name], parts.tiers.cold))


@asynccontextmanager
async def cluster_over_socket(folder: Path, num_prefill: int, num_decode: int) -> AsyncIterator[ClusterOverSocket]:
    cluster = ClusterOverSocket(folder)
    await cluster.start(num_prefill, num_decode)
    try:
        yield cluster
    finally:
        await cluster.stop()


async def test_it_restarts_under_load(tmp_path: Path) -> None:
    """Again and again; after the last time the new arena is in use on both sides."""
    async with cluster_over_socket(tmp_path, 1, 2) as cluster:
        async with under_load(Load(cluster, MODEL, num_clients=6)) as load:
            for _ in range(3):
                cluster.stop_directory()
                cluster.serve_directory()
                await load.goes_on(12)
            await until(lambda: cluster.directory.records.status().hits)
        await at_rest(cluster)


async def test_it_stays_away(tmp_path: Path) -> None:
    """Without a host tier every worker computes for itself; decode what prefill has computed before."""
    async with cluster_over_socket(tmp_path, 1, 1) as cluster:
        cluster.stop_directory()
        for number in range(4):
            [choice] = await cluster.answer(ask((number, *PROMPT), 20))
            assert choice.token_ids == MODEL.oracle((number, *PROMPT), 20)
        assert cluster.workers["d0"].engine.stats().computed_prompt_tokens == 4 * (len(PROMPT) + 1)
        cluster.serve_directory()
        await at_rest(cluster)


@pytest.mark.parametrize("call", ["reserve", "commit", "lease", "release"])
async def test_it_restarts_in_the_midst_of_a_copy(tmp_path: Path, call: str) -> None:
    """A worker has heard of slots of the old arena; in the new one they mean nothing."""
    async with cluster_over_socket(tmp_path, 1, 1) as cluster:
        await cluster.answer(ask(PROMPT, 20))
        restarts = 0

        def restart(called: str, _: object) -> None:
            nonlocal restarts
            if called == call and not restarts:
                restarts += 1
                cluster.stop_directory()
                cluster.serve_directory()

        for gate in cluster.gates.values():
            gate.before = restart
        [choice] = await cluster.answer(ask((1, *PROMPT), 20))
        assert choice.token_ids == MODEL.oracle((1, *PROMPT), 20)
        assert restarts == 1
        await at_rest(cluster)
