"""Block events on their way from nodes to the index, to placement, and to subscribers over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest

from baton import AsyncClient, Client
from baton.results import BlockCursor, BlockPage
from kv_store.node.directory import Directory
from router.block_index import BlockIndex, mark_of
from router.config import RouterConfig
from router.ports.operator import MAX_CURSORS, MAX_SUBSCRIBERS
from tests.harness.cluster import WAIT_S, role_of, until
from tests.harness.fake_cluster import CONFIG, PROMPT, FakeCluster, request
from tests.harness.fake_worker import LAYOUT, FakeWorker
from tests.kv_store.names import committed
from tests.router.test_keys import LISTED, OPERATOR_TEXT, PLAIN_TEXT, shows
from tests.router.test_router_api import TOKEN, Service, serving
from wire.block_names import BlockName, cover
from wire.errors import DeadlineExceeded, InvalidRequest, Overloaded, PermissionDenied, Unauthenticated
from wire.ids import DEFAULT_TENANT, NamespaceRoot, WorkerId
from wire.pb import cluster_pb2, worker_pb2
from wire.pb.cluster_pb2_grpc import ClusterStub
from wire.pools import WorkerState
from wire.rpc import LINE_OPTIONS

NUM_SLOTS = 64
NODES = {"p0": "a", "d0": "a", "p1": "b", "d1": "b"}


def names_of(num_blocks: int, first: int = 0) -> list[BlockName]:
    return cover(NamespaceRoot(b"r" * 32), range(first, first + num_blocks * LAYOUT.block_size), LAYOUT.block_size)


def store(directory: Directory, names: list[BlockName]) -> None:
    directory.commit("w", committed(directory.reserve("w", names, None).slots, names), None)


class EventCluster(FakeCluster):
    """Fake workers on two nodes, which tell the events of their node's directory."""

    def __init__(self, config: RouterConfig = CONFIG) -> None:
        super().__init__(config)
        self.directories = {node_id: Directory(NUM_SLOTS) for node_id in ("a", "b")}

    async def _start_worker(self, name: str) -> FakeWorker:
        node_id = NODES[name]
        return FakeWorker(WorkerId(name), role_of(name), node_id=node_id, directory=self.directories[node_id])

    @property
    def index(self) -> BlockIndex:
        return self.router.index

    def prompt_names(self) -> list[BlockName]:
        """Names the full blocks of `PROMPT`."""
        root = self.router.dispatcher.root_of(DEFAULT_TENANT)
        return cover(root, PROMPT.encode(), LAYOUT.block_size)

    def is_exact(self, node_id: str) -> bool:
        blocks = self.directories[node_id].state.blocks()
        return self.index.marks(node_id) == {mark_of(block.name.key) for block in blocks}

    def restart(self, node_id: str) -> Directory:
        """Puts a new directory in the place of a node's."""
        self.directories[node_id] = Directory(NUM_SLOTS)
        for worker in self.workers.values():
            if worker.node_id == node_id:
                worker.directory = self.directories[node_id]
        return self.directories[node_id]


@pytest.fixture
async def cluster() -> AsyncIterator[EventCluster]:
    cluster = EventCluster()
    await cluster.start(2, 2)
    await until(lambda: all(cluster.is_exact(node_id) for node_id in cluster.directories))
    yield cluster
    await cluster.come_to_rest()
    await cluster.stop()


async def test_the_index_follows_each_nodes_directory(cluster: EventCluster) -> None:
    store(cluster.directories["a"], names_of(6))
    store(cluster.directories["b"], names_of(9))
    await until(lambda: cluster.is_exact("a") and cluster.is_exact("b"))
    assert cluster.index.match([name.key for name in names_of(7)]) == {"a": 6, "b": 7}
    cluster.directories["b"].delete([name.key for name in names_of(9)])
    await until(lambda: cluster.is_exact("b"))
    assert [worker.num_asked_events > 0 for worker in cluster.workers.values()].count(True) == 2, "one of each node"


async def test_a_request_goes_where_its_prefix_is_and_not_where_it_was_sent(cluster: EventCluster) -> None:
    names = cluster.prompt_names()
    for node_id, prefill in (("b", "p1"), ("a", "p0"), ("b", "p1")):
        for one in cluster.directories.values():
            one.delete([name.key for name in names])
        store(cluster.directories[node_id], names)
        await until(lambda: cluster.is_exact("a") and cluster.is_exact("b"))
        output = await cluster.generate(request(max_tokens=2))
        assert output.complete.timeline.prefill_worker == prefill


async def test_a_prompt_that_is_under_way_draws_others_with_its_prefix(cluster: EventCluster) -> None:
    for worker in cluster.workers.values():
        worker.may_go.clear()
    with cluster.router.members[WorkerId("p1")].assigned(1, 5):
        first = asyncio.create_task(cluster.generate(request(max_tokens=2)))
        await until(lambda: cluster.workers["p0"].prefills)
        second = asyncio.create_task(cluster.generate(request(max_tokens=2)))
        await until(lambda: sum(len(worker.prefills) for worker in cluster.workers.values()) == 2)
    assert len(cluster.workers["p0"].prefills) == 2, "else p1 had less to do"
    for worker in cluster.workers.values():
        worker.may_go.set()
    await asyncio.gather(first, second)


async def test_another_worker_of_the_node_goes_on_where_one_no_longer_tells(cluster: EventCluster) -> None:
    asked = next(worker for worker in cluster.workers.values() if worker.node_id == "a" and worker.num_asked_events)
    asked.directory = None
    store(cluster.directories["a"], names_of(3))
    await until(lambda: cluster.is_exact("a"))
    cluster.transports[asked.worker_id].kill()
    store(cluster.directories["a"], names_of(5))
    await until(lambda: cluster.is_exact("a"))
    cluster.faults[asked.worker_id].is_dead = False


async def test_a_node_is_left_to_the_map_while_no_worker_of_it_tells(cluster: EventCluster) -> None:
    for worker in cluster.workers.values():
        worker.directory = None
        cluster.transports[worker.worker_id].kill()
        cluster.faults[worker.worker_id].is_dead = False
    await until(lambda: cluster.index.match([]) == {})
    members = cluster.router.members
    # A worker that is lost is no member of a pool, though its line is open again, until a probe finds it ready.
    await until(lambda: all(one.line.is_open and one.state is WorkerState.READY for one in members))
    output = await cluster.generate(request(max_tokens=2))
    first = output.complete.timeline.prefill_worker
    await cluster.come_to_rest()
    store(cluster.directories["b" if NODES[first] == "a" else "a"], cluster.prompt_names())
    output = await cluster.generate(request(max_tokens=2))
    assert output.complete.timeline.prefill_worker == first, "it was sent there"


async def test_a_new_directory_empties_the_index_of_its_node_alone(cluster: EventCluster) -> None:
    for directory in cluster.directories.values():
        store(directory, names_of(4))
    await until(lambda: cluster.is_exact("a") and cluster.is_exact("b"))
    store(cluster.restart("a"), names_of(2))
    await until(lambda: cluster.is_exact("a"))
    assert cluster.index.match([name.key for name in names_of(4)]) == {"a": 2, "b": 4}


async def test_a_node_that_is_gone_is_forgotten(cluster: EventCluster) -> None:
    store(cluster.directories["b"], names_of(4))
    await until(lambda: cluster.is_exact("b"))
    await cluster.enlist("p0", "d0")
    await until(lambda: cluster.index.marks("b") is None)
    assert cluster.index.match([]) == {"a": 0}
    await cluster.enlist("p0", "d0", "p1")
    await until(lambda: cluster.is_exact("b"))


async def test_the_feed_goes_on_after_a_bug(cluster: EventCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: BlockIndex, page: worker_pb2.EventPage) -> None:
        monkeypatch.undo()
        raise RuntimeError("a bug")

    monkeypatch.setattr(BlockIndex, "take", fail)
    store(cluster.directories["a"], names_of(4))
    await until(lambda: cluster.is_exact("a") and cluster.is_exact("b"))


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    """One node, of which p0 and d0 tell the events."""
    async with serving(replace(CONFIG, keys=LISTED)) as service:
        directory = Directory(4 * NUM_SLOTS, num_events=2 * NUM_SLOTS)
        for worker in service.cluster.workers.values():
            worker.directory = directory
        yield service


def directory_of(service: Service) -> Directory:
    directory = service.cluster.workers["p0"].directory
    assert directory is not None
    return directory


def client_of(service: Service, key: str = OPERATOR_TEXT, timeout_s: float = WAIT_S) -> AsyncClient:
    return AsyncClient(service.addresses.operator, api_key=key, timeout_s=timeout_s)


def keys(page: BlockPage) -> list[tuple[str, str, list[bytes]]]:
    return [(one.kind, one.tier, list(one.keys)) for one in page.events]


async def test_a_subscriber_gets_a_snapshot_then_events_and_resumes_behind_the_last(service: Service) -> None:
    names = names_of(6)
    store(directory_of(service), names[:2])
    async with client_of(service) as client:
        async with aclosing(client.watch_blocks()) as pages:
            snapshot = await anext(pages)
            cleared = [page.kind for page in snapshot.events[:3]]
            assert (cleared, {page.tier for page in snapshot.events[:3]}) == (
                ["cleared"] * 3,
                {"host", "redis", "files"},
            )
            assert keys(snapshot)[3:] == [("stored", "host", [name.key for name in names[:2]])]
            store(directory_of(service), names[2:5])
            page = await anext(pages)
        assert keys(page) == [("stored", "host", [name.key for name in names[2:5]])]
        assert (page.node_id, page.after, page.cursor.number) == ("", snapshot.cursor, 5)
        assert page.cursor.epoch == directory_of(service).attach().epoch
        directory_of(service).delete([names[0].key])
        async with aclosing(client.watch_blocks({"": page.cursor})) as pages:
            assert keys(await anext(pages)) == [("removed", "host", [names[0].key])]
        async with aclosing(client.watch_blocks({"": replace(page.cursor, epoch="another")})) as pages:
            assert keys(await anext(pages))[0] == ("cleared", "host", [])


async def test_the_blocking_client_watches_and_its_leaving_ends_the_call(service: Service) -> None:
    names = names_of(2)
    store(directory_of(service), names)

    def watch() -> BlockPage:
        with Client(service.addresses.operator, api_key=OPERATOR_TEXT, timeout_s=WAIT_S) as client:
            pages = client.watch_blocks()
            page = next(pages)
            pages.close()  # type: ignore[attr-defined]  # a generator's
            return page

    page = await asyncio.to_thread(watch)
    assert keys(page)[-1] == ("stored", "host", [name.key for name in names])


async def test_events_end_at_the_clients_timeout(service: Service) -> None:
    async with client_of(service, timeout_s=0.5) as client, aclosing(client.watch_blocks()) as pages:
        with pytest.raises(DeadlineExceeded):
            async for _ in pages:
                pass


async def test_events_are_for_the_operator_alone(service: Service) -> None:
    for key, error in ((PLAIN_TEXT, PermissionDenied), ("baton-none", Unauthenticated)):
        async with client_of(service, key) as client, aclosing(client.watch_blocks()) as pages:
            with pytest.raises(error):
                await anext(pages)


@pytest.mark.parametrize(
    "after",
    [
        {str(number): BlockCursor("", 0, 0) for number in range(MAX_CURSORS + 1)},
        {"": BlockCursor("e" * 65, 0, 0)},
    ],
)
async def test_places_out_of_bounds_are_refused(service: Service, after: dict[str, BlockCursor]) -> None:
    async with client_of(service) as client, aclosing(client.watch_blocks(after)) as pages:
        with pytest.raises(InvalidRequest, match="after"):
            await anext(pages)


async def test_subscribers_are_bounded_and_room_comes_back(service: Service) -> None:
    calls = [
        service.operate.WatchBlocks(cluster_pb2.WatchBlocksRequest(), metadata=TOKEN) for _ in range(MAX_SUBSCRIBERS)
    ]
    for call in calls:
        await call.read()
    async with client_of(service) as client:
        async with aclosing(client.watch_blocks()) as pages:
            with pytest.raises(Overloaded, match=str(MAX_SUBSCRIBERS)):
                await anext(pages)
        calls.pop().cancel()
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    async with aclosing(client.watch_blocks()) as pages:
                        await anext(pages)
                    break
                except Overloaded:
                    await asyncio.sleep(0.01)
    for call in calls:
        call.cancel()


async def test_a_subscriber_that_reads_nothing_holds_nothing_up_and_gets_a_snapshot(service: Service) -> None:
    directory, worker = directory_of(service), service.cluster.workers["p0"]
    channel = grpc.aio.insecure_channel(service.addresses.operator, options=LINE_OPTIONS)
    call = ClusterStub(channel).WatchBlocks(cluster_pb2.WatchBlocksRequest(), metadata=shows(OPERATOR_TEXT))
    index = service.cluster.router.index
    for number in range(400):
        store(directory, names_of(NUM_SLOTS, first=number << 20))
        await until(lambda: _knows(index, directory))
    assert worker.num_told_pages < 1.5 * 400, "one for the index at each change: the silent one asks no more"
    blocks: set[bytes] = set()
    cursors: list[worker_pb2.EventCursor] = []
    kinds: list[str] = []
    expected = {block.name.key for block in directory.state.blocks()}
    async with asyncio.timeout(WAIT_S):
        while blocks != expected:
            page = await call.read()
            assert isinstance(page, worker_pb2.EventPage)
            assert not cursors or page.after == cursors[-1]
            cursors.append(page.cursor)
            for one in page.events:
                kinds.append(one.kind)
                _apply(one, blocks)
    await channel.close()
    assert kinds.count("cleared") > 3, "it fell out of the ring"


def _knows(index: BlockIndex, directory: Directory) -> bool:
    return index.marks("") == {mark_of(block.name.key) for block in directory.state.blocks()}


def _apply(events: worker_pb2.BlockEvents, blocks: set[bytes]) -> None:
    if events.tier != "host":
        return
    if events.kind == "stored":
        blocks.update(events.keys)
    elif events.kind == "removed":
        blocks.difference_update(events.keys)
    else:
        blocks.clear()


def test_an_events_message_has_names_alone() -> None:
    """A field of token ids would be a leak: keys cannot be turned back without the secret."""
    assert [one.name for one in worker_pb2.BlockEvents.DESCRIPTOR.fields] == ["kind", "tier", "keys"]
    assert len(names_of(1)[0].key) == 32
