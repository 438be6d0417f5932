"""What the router learns of its workers from their statuses, and chooses them by."""

import pytest

from router.placement.policies import LONG_STEP_S
from tests.router.fake_cluster import FakeCluster, running
from wire.errors import DeadlineExceeded
from wire.pb import inference_pb2 as pb


async def chosen(cluster: FakeCluster, text: str = "hello") -> tuple[str, str]:
    """Who serves a request that comes now: the first of each role, unless another has the prompt or one is silent."""
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


async def test_who_does_not_tell_its_status_is_taken_to_be_silent_until_it_does() -> None:
    async with running(1, 2) as cluster:
        cluster.workers["d0"].status_refusal = DeadlineExceeded("too busy to answer")
        await cluster.router.watch.read()
        assert await chosen(cluster) == ("p0", "d1")
        cluster.workers["d0"].status_refusal = None
        await cluster.router.watch.read()
        assert await chosen(cluster) == ("p0", "d0")
