from deploy.controller.pool_record import decode, encode
from deploy.controller.pools import Pools, Stage, Start, Worker
from wire.ids import WorkerId
from wire.pools import PoolSizes, Role


def test_pools_are_what_they_were() -> None:
    pools = Pools(PoolSizes(1, 2))
    pools.plan(0.0)
    pools.became_ready(WorkerId("decode-0"), "a:1")
    pools.became_ready(WorkerId("decode-1"), "a:2")
    pools.release(WorkerId("decode-1"))
    pools.lost(WorkerId("decode-0"), 0.0)
    read = decode(encode(pools))
    assert read.sizes == PoolSizes(1, 1)
    assert list(read) == [
        Worker(WorkerId("prefill-0"), Role.PREFILL),
        Worker(WorkerId("decode-1"), Role.DECODE, Stage.DRAINING, "a:2"),
    ]
    assert read.plan(0.0) == [Start(WorkerId("decode-2"), Role.DECODE)], "no name is given twice"
