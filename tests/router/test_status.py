"""What the router learns of its workers from their statuses, what it tells of that, and chooses workers by."""

import asyncio

import pytest

from router.operate.status import _summed, changes
from router.workers.members import LONG_STEP_S
from tests.harness.cluster import WAIT_S, until
from tests.harness.fake_cluster import FakeCluster, request, running
from wire.errors import DeadlineExceeded
from wire.pb import cluster_pb2, worker_pb2
from wire.pb import inference_pb2 as pb
from wire.pools import PoolSizes
from wire.tier import Tier


def status(
    redis: str = "up", epoch: str = "e1", silent_s: float = 0.0, num_forged: int = 0, files: str = "up"
) -> cluster_pb2.ClusterStatus:
    blocks = worker_pb2.BlockCounts(total=1)
    made = cluster_pb2.ClusterStatus()
    made.workers.add(worker_id="decode-0", blocks=blocks, engine_silent_s=silent_s)
    made.workers.add(worker_id="decode-1", blocks=blocks, engine_silent_s=0.5)
    for worker in made.workers:
        worker.tiers.add(tier="host", epoch=epoch)
    made.tiers.add(tier="redis", state=redis, counts={"forged": num_forged})
    made.tiers.add(tier="files", state=files)
    return made


NOTHING = cluster_pb2.ClusterStatus()


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (NOTHING, status(), []),
        (status(), status(), []),
        (status(), NOTHING, []),
        (status(), status(redis="broken"), ["tier redis does not answer"]),
        (status(redis="broken"), status(redis="broken"), []),
        (status(redis="broken"), status(), ["tier redis is up again"]),
        (status(), status(redis="full"), ["tier redis is full and refuses blocks: set its maxmemory-policy"]),
        (status(redis="full"), status(redis="full"), []),
        (status(), status(files="full"), ["tier files is full and refuses blocks: its disk or quota has no room"]),
        (status(), status(files="broken"), ["tier files does not answer, workers go on without it: look at its mount"]),
        (status(redis="full"), status(redis="broken"), ["tier redis does not answer"]),
        (status(redis="full"), status(), ["tier redis is up again"]),
        (status(num_forged=2), status(num_forged=2), []),
        (status(num_forged=2), status(num_forged=5), ["tier redis had forged blocks (3), not used"]),
        (status(), status(redis="read-only"), ["tier redis refuses blocks"]),
        (status(redis="off"), status(redis="off"), []),
        (status(epoch="e1"), status(epoch="e2"), ["the directory of tier host is a new one"]),
        (status(), status(silent_s=9.0), []),
        (status(silent_s=9.0), status(silent_s=11.0), ["decode-0 is silent for 11 s"]),
        (NOTHING, status(silent_s=23.0), ["decode-0 is silent for 23 s"]),
        (status(silent_s=11.0), status(silent_s=13.0), []),
        (status(silent_s=11.0), status(), ["decode-0 is not silent any more"]),
        (status(silent_s=11.0), NOTHING, []),
    ],
)
def test_what_an_operator_is_told(
    before: cluster_pb2.ClusterStatus, after: cluster_pb2.ClusterStatus, told: list[str]
) -> None:
    texts = list(changes(before, after))
    assert len(texts) == len(told)
    assert all(text.startswith(start) for text, start in zip(texts, told, strict=True))


async def test_the_last_status_is_there_without_asking_a_worker() -> None:
    async with running(1, 1) as cluster:
        watch = cluster.router.watch
        await until(lambda: len(watch.last.workers) == 2)
        await cluster.generate(request(max_tokens=3))
        await cluster.enlist("d0")
        await watch.read()
        assert [worker.worker_id for worker in watch.last.workers] == ["d0"]


def account(node: str, tier: str, total: int = 0, **counts: int) -> worker_pb2.WorkerStatus:
    """A worker's account of a tier."""
    blocks = worker_pb2.BlockCounts(free=total, total=total) if total else None
    told = worker_pb2.TierStatus(tier=tier, state="up", blocks=blocks, counts=counts)
    return worker_pb2.WorkerStatus(worker_id="d0", node_id=node, tiers=[told], blocks=worker_pb2.BlockCounts(total=1))


def test_arenas_of_nodes_are_added_up_each_once() -> None:
    workers = [account(node, "host", 100, holds=holds) for node, holds in (("a", 2), ("a", 2), ("b", 3))]
    summed = _summed(Tier.HOST, [account("b", "host"), *workers])
    assert (summed.blocks.total, summed.blocks.free, summed.counts["holds"]) == (200, 200, 5)


def test_reads_of_workers_and_writes_of_nodes_are_added_up() -> None:
    told = (("a", 1, 10), ("a", 2, 11), ("b", 4, 5))
    summed = _summed(Tier.REDIS, [account(node, "redis", hits=hits, written=written) for node, hits, written in told])
    assert (summed.counts["hits"], summed.counts["written"]) == (7, 16)


@pytest.mark.parametrize("node", ["", "b"])
def test_a_new_directory_is_told_with_its_node(node: str) -> None:
    before = cluster_pb2.ClusterStatus(workers=[account("a", "host", 1), account(node, "host", 1)])
    for worker in before.workers:
        worker.tiers[0].epoch = "e1"
    after = cluster_pb2.ClusterStatus()
    after.CopyFrom(before)
    after.workers[1].tiers[0].epoch = "e2"
    (event,) = changes(before, after)
    assert event.startswith(f"the directory of tier host{' of node b' if node else ''} is a new one")


@pytest.mark.parametrize(
    ("sizes", "draining", "told"),
    [
        (PoolSizes(1, 2), "", []),
        (PoolSizes(1, 3), "", ["the decode pool has 2 of 3 workers: the last events tell why"]),
        (PoolSizes(1, 1), "d1", []),
        (PoolSizes(1, 2), "d1", ["the decode pool has 1 of 2 workers: the last events tell why"]),
        (PoolSizes(0, 0), "", []),
    ],
)
async def test_a_pool_below_its_size_is_a_problem(sizes: PoolSizes, draining: str, told: list[str]) -> None:
    async with running(1, 2) as cluster:
        cluster.router.members.sizes = sizes
        await cluster.enlist("p0", "d0", "d1", draining=draining)
        status = await cluster.router.statuses.read(cluster_pb2.GetStatusRequest())
        assert status.problems == told
        assert [pool.size for pool in status.pools] == [sizes.prefill, sizes.decode]
        assert [pool.num_ready for pool in status.pools] == [1, 1 if draining else 2]
        cluster.router.members.sizes = PoolSizes(0, 0)


async def test_changes_are_remembered_with_their_age() -> None:
    async with running(1, 1) as cluster:
        watch = cluster.router.watch
        watch.last = status(epoch="e1")
        for worker in cluster.workers.values():
            worker.epoch = "e2"
        async with asyncio.timeout(WAIT_S):
            await watch.read()
        (event,) = watch.events
        assert event.text.startswith("the directory of tier host")
        assert 0 <= event.age_s < WAIT_S


async def chosen(cluster: FakeCluster, text: str = "hello") -> tuple[str, str]:
    """Workers that serve a new request: the first of each role, unless another has the prompt or one is silent."""
    timeline = (await cluster.generate(pb.GenerateRequest(text=text))).complete.timeline
    return timeline.prefill_worker, timeline.decode_worker


@pytest.mark.parametrize(("silent", "others"), [("p0", ("p1", "d0")), ("d0", ("p0", "d1"))])
async def test_a_silent_engine_is_avoided_from_one_status_to_the_next(silent: str, others: tuple[str, str]) -> None:
    async with running(2, 2) as cluster:
        cluster.workers[silent].engine_silent_s = LONG_STEP_S
        await cluster.router.watch.read()
        assert await chosen(cluster) == others
        cluster.workers[silent].engine_silent_s = 0.0
        await cluster.router.watch.read()
        assert await chosen(cluster, "good-bye") == ("p0", "d0")


async def test_a_member_has_the_time_of_a_token_that_its_worker_learned_last() -> None:
    async with running(1, 1) as cluster:
        found = []
        for token_s in (None, 0.5, None):
            cluster.workers["p0"].prefill_token_s = token_s
            await cluster.router.watch.read()
            found.append([member.prefill_token_s for member in cluster.router.members])
        assert found == [[None, None], [0.5, None], [0.5, None]], "a status without it takes nothing back"


async def test_a_worker_that_does_not_tell_its_status_counts_as_silent_until_it_does() -> None:
    async with running(1, 2) as cluster:
        cluster.workers["d0"].status_refusal = DeadlineExceeded("too busy to answer")
        await cluster.router.watch.read()
        assert await chosen(cluster) == ("p0", "d1")
        cluster.workers["d0"].status_refusal = None
        await cluster.router.watch.read()
        assert await chosen(cluster) == ("p0", "d0")
