"""Pages of block events that are lost, doubled, old or of a dead epoch: answers stay right, and the index heals."""

import random
from collections.abc import Callable

import pytest

from kv_store.node.directory import Directory
from router.workers import node_events
from tests.faults.load import Load, under_load
from tests.faults.rest import at_rest
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.known_model import LAYOUT, MODEL
from tests.harness.local_cluster import Sizes
from tests.seeds import repeated_by, seeds
from wire.pb import worker_pb2

SIZES = Sizes(num_blocks=64, num_slots=64)
"""So few slots that blocks are evicted all the time."""
Answers = list[worker_pb2.WorkerReply]


class Spoiler:
    """Spoils a third of the pages: in one of these ways, or in any."""

    def __init__(self, draw: random.Random, ways: list[str]) -> None:
        self._draw = draw
        self._ways = ways
        self._pages: list[worker_pb2.EventPage] = []
        self.num_spoilt = 0

    def __call__(self, answers: Answers) -> Answers:
        return [one for answer in answers for one in (self._spoil(answer) if answer.HasField("events") else [answer])]

    def _spoil(self, answer: worker_pb2.WorkerReply) -> Answers:
        earlier = self._pages[:]
        self._pages.append(worker_pb2.EventPage.FromString(answer.events.SerializeToString()))
        if not earlier or self._draw.random() > 1 / 3:
            return [answer]
        self.num_spoilt += 1
        match self._draw.choice(self._ways):
            case "lost":
                return []
            case "doubled":
                return [answer, answer]
            case "old":
                answer.events.CopyFrom(self._draw.choice(earlier))
            case "of a dead epoch":
                answer.events.after.epoch = answer.events.cursor.epoch = "dead"
        return [answer]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_events, "PAGE_TIMEOUT_S", 1.2)
    monkeypatch.setattr(node_events, "PAUSE_S", 0.01)


def small_log(cluster: FaultyCluster) -> Directory:
    """Makes a directory whose ring has a few events."""
    return Directory(SIZES.num_slots, cluster.clock, block_bytes=LAYOUT.block_bytes, num_events=16)


async def serve(draw: random.Random, ways: list[str], new_directory: Callable[[FaultyCluster], Directory]) -> None:
    cluster = FaultyCluster(MODEL, SIZES)
    cluster.directory = new_directory(cluster)
    spoiler = Spoiler(draw, ways)
    await cluster.start(2, 2)
    for faults in cluster.faults.values():
        faults.spoil = spoiler
    try:
        async with under_load(Load(cluster, MODEL, num_clients=6)) as load:
            await load.goes_on(24)
        assert spoiler.num_spoilt
        for faults in cluster.faults.values():
            faults.spoil = list
        await at_rest(cluster)
    finally:
        await cluster.stop()


@pytest.mark.parametrize("way", ["lost", "doubled", "old", "of a dead epoch"])
async def test_pages_are_spoilt_under_load(way: str) -> None:
    await serve(random.Random(1), [way], lambda cluster: cluster.directory)


@pytest.mark.parametrize("seed", seeds(3, ()))
async def test_pages_are_spoilt_in_every_way_while_the_ring_is_short(seed: int) -> None:
    with repeated_by("pytest tests/faults/test_block_events.py", seed):
        await serve(random.Random(seed), ["lost", "doubled", "old", "of a dead epoch"], small_log)
