"""What must hold once nothing is under way."""

import asyncio
from collections.abc import Callable, Iterator

from kv_store.frame import checksum_of
from kv_store.node_store import HOLD_TTL_S
from router.block_index import mark_of
from tests.harness.cluster import WAIT_S
from tests.harness.faulty_cluster import FaultyCluster
from wire.ids import BlockKey
from worker.assembly import Assembly


async def at_rest(cluster: FaultyCluster) -> None:
    """Returns when every invariant holds; AssertionError with those that do not come to hold.

    Holds whose release was lost with a worker may stay until they run out, which their clock is told at once.
    """
    await cluster.settle()
    await _no_more(lambda: [*_in_router(cluster), *_in_workers(cluster), *_in_flight(cluster)])
    cluster.clock.now += HOLD_TTL_S
    await _no_more(lambda: [*_in_arena(cluster), *_contents(cluster), *_in_index(cluster)])
    async with asyncio.timeout(WAIT_S):
        while await _in_status(cluster):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def _in_status(cluster: FaultyCluster) -> list[str]:
    """What the operator would be told, but for the silence of those who are dead."""
    return [problem for problem in (await cluster.status()).problems if problem.split(":")[0] not in cluster.dead]


async def _no_more(problems: Callable[[], list[str]]) -> None:
    try:
        async with asyncio.timeout(WAIT_S):
            while problems():  # noqa: ASYNC110
                await asyncio.sleep(0.002)
    except TimeoutError:
        assert problems() == []


def _in_router(cluster: FaultyCluster) -> Iterator[str]:
    """I5, I8 and I10: nothing of a request that is over."""
    dispatcher = cluster.router.dispatcher
    if dispatcher.num_queued + dispatcher.num_running:
        yield f"router: {dispatcher.num_queued + dispatcher.num_running} requests queued or running"
    yield from cluster.router.check()
    num_tasks = sum("Flow.serve" in repr(task.get_coro()) for task in asyncio.all_tasks())
    if num_tasks:
        yield f"router: {num_tasks} tasks of requests"


def _in_workers(cluster: FaultyCluster) -> Iterator[str]:
    """I1 and I5 on every device that is alive: no calls, no sequences, no references, no transfers."""
    for name, worker in _alive(cluster):
        blocks, stats = worker.engine.pool.ledger.counts(), worker.engine.stats()
        counts = {
            "sequences": stats.num_running + stats.num_waiting,
            "transfers": worker.transfers.pending,
            "pages in use": blocks.owned + blocks.published + blocks.draining,
        }
        yield from (f"{name}: {problem}" for problem in worker.service.check())
        yield from (f"{name}: {what}: {count}" for what, count in counts.items() if count)
        if blocks.free + blocks.cached != blocks.total:
            yield f"{name}: pages do not sum up: {blocks}"


def _in_flight(cluster: FaultyCluster) -> Iterator[str]:
    """I5 in the arena: nobody reads or writes."""
    status = cluster.directory.records.status()
    if status.num_leases or status.counts.draining:
        yield f"arena: {status.num_leases} leases, {status.counts.draining} slots written to"


def _in_arena(cluster: FaultyCluster) -> Iterator[str]:
    """I1 and I5 in the arena."""
    status = cluster.directory.records.status()
    if status.num_holds or status.counts.free + status.counts.cached != status.counts.total:
        yield f"arena: {status.num_holds} holds, {status.counts}"
    yield from cluster.directory.records.check()


def _in_index(cluster: FaultyCluster) -> Iterator[str]:
    """I12: where workers are left, the router's index has the arena's blocks and no others."""
    there = {mark_of(block.name.key) for block in cluster.directory.state.blocks() if not block.name.is_tail}
    known = cluster.router.index.marks("")
    if known != there and cluster.listed:
        yield f"router: its index has {None if known is None else len(known)} blocks, the arena {len(there)}"


def _contents(cluster: FaultyCluster) -> Iterator[str]:
    """I3 and I4: wherever a block is found by its key, it has the same bytes; or others than its checksum says."""
    found: dict[BlockKey, bytes] = {}
    for where, key, checksum in _blocks(cluster):
        if found.setdefault(key, checksum) != checksum:
            yield f"{where}: {key.hex()[:8]} has other bytes than elsewhere"


def _blocks(cluster: FaultyCluster) -> Iterator[tuple[str, BlockKey, bytes]]:
    payload_bytes = cluster.payload_bytes
    for block in cluster.blocks():
        if checksum_of(cluster.arena.slot(block.slot)[:payload_bytes]) == block.checksum:
            yield "arena", block.name.key, block.checksum
    for name, worker in _alive(cluster):
        pool = worker.engine.pool
        for page in pool.ledger.pages:
            key = pool.ledger.key_of(page)
            if key is not None:
                yield name, key, checksum_of(pool.page_bytes(page).numpy().data)


def _alive(cluster: FaultyCluster) -> Iterator[tuple[str, Assembly]]:
    return ((name, cluster.workers[name]) for name in cluster.listed)
