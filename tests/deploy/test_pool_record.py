from pathlib import Path

from deploy.pool_record import PoolRecord
from deploy.pools import Pools, Stage, Start
from wire.ids import WorkerId
from wire.pools import PoolSizes, Role


def test_there_is_none_at_first(tmp_path: Path) -> None:
    assert PoolRecord(tmp_path / "pools.json").read() is None


def test_pools_are_what_they_were(tmp_path: Path) -> None:
    pools = Pools(PoolSizes(1, 2))
    pools.plan(0.0)
    pools.became_ready(WorkerId("decode-0"))
    pools.became_ready(WorkerId("decode-1"))
    pools.release(WorkerId("decode-1"))
    pools.lost(WorkerId("decode-0"), 0.0)
    record = PoolRecord(tmp_path / "pools.json")
    record.write(Pools(PoolSizes(0, 1)))
    record.write(pools)
    read = record.read()
    assert read is not None
    assert read.sizes == PoolSizes(1, 1)
    assert {worker.worker_id: worker.stage for worker in read} == {
        "prefill-0": Stage.STARTING,
        "decode-1": Stage.DRAINING,
    }
    assert read.plan(0.0) == [Start(WorkerId("decode-2"), Role.DECODE)], "no name is given twice"
