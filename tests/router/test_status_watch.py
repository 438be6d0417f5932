import asyncio

import pytest

from router.observe.status_watch import changes
from tests.router.fake_cluster import WAIT_S, request, running, until
from wire.pb import cluster_pb2, worker_pb2


def status(redis: str = "up", epoch: str = "e1", silent_s: float = 0.0) -> cluster_pb2.ClusterStatus:
    blocks = worker_pb2.BlockCounts(total=1)
    made = cluster_pb2.ClusterStatus()
    made.workers.add(worker_id="decode-0", blocks=blocks, engine_silent_s=silent_s)
    made.workers.add(worker_id="decode-1", blocks=blocks, engine_silent_s=0.5)
    made.tiers.add(tier="host", epoch=epoch)
    made.tiers.add(tier="redis", state=redis)
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
        (status(redis="broken"), status(), ["tier redis answers again"]),
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


async def test_the_last_status_is_there_without_asking_anybody() -> None:
    async with running(1, 1) as cluster:
        watch = cluster.router.watch
        await until(lambda: len(watch.last.workers) == 2)
        await cluster.generate(request(max_tokens=3))
        await cluster.enlist("d0")
        await watch.read()
        assert [worker.worker_id for worker in watch.last.workers] == ["d0"]


async def test_changes_are_remembered_with_their_age() -> None:
    async with running(1, 1) as cluster:
        watch = cluster.router.watch
        watch.last = status(epoch="e1")
        cluster.workers["p0"].epoch = "e2"
        async with asyncio.timeout(WAIT_S):
            await watch.read()
        (event,) = watch.events
        assert event.text.startswith("the directory of tier host")
        assert 0 <= event.age_s < WAIT_S
