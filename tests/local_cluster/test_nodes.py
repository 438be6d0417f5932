"""A cluster of two nodes: each has an arena and a directory, and reads the blocks of the other."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from engine.model.hash_model import HashModel
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.peers.block_reader import BlockReader, LocalBlocks
from kv_store.peers.block_server import BlockServer
from kv_store.tiers.cold_tier import BlockSource
from router.block_index import mark_of
from tests.faults.toxic_proxy import Line, toxic_proxy
from tests.harness.assembled_worker import TOKEN
from tests.harness.cluster import until
from tests.harness.local_cluster import LocalCluster, Parts, Sizes
from tests.local_cluster.test_local_cluster import LAYOUT, PROMPT, ask, worker
from wire.block_names import cover
from wire.convert import tiers_from_pb
from wire.ids import DEFAULT_TENANT
from worker.assembly import PEER_TIMEOUT_S, Tiers

MODEL = HashModel(LAYOUT, vocab_size=300)
SIZES = Sizes()


@dataclass
class Node:
    """The memory of a node."""

    directory: Directory = field(default_factory=lambda: Directory(SIZES.num_slots, block_bytes=LAYOUT.block_bytes))
    arena: Arena = field(default_factory=lambda: Arena.anonymous(LAYOUT.block_bytes, SIZES.num_slots))
    server: BlockServer | None = None


class Nodes(LocalCluster):
    """Prefill workers are on node "a", decode workers on node "b"; `ports` tells the node at each address."""

    def __init__(self, model: HashModel, over_tcp: bool, sizes: Sizes | None = None) -> None:
        super().__init__(model, sizes or SIZES)
        self.nodes = {"a": Node(), "b": Node()}
        self.readers: list[BlockReader] = []
        self.addresses = {name: self._serve(node) if over_tcp else name for name, node in self.nodes.items()}

    def _parts(self, name: str) -> Parts:
        node_id = "a" if name.startswith("p") else "b"
        node = self.nodes[node_id]
        return Parts(self._model, Tiers(node.arena, node.directory, (), self._source), self.addresses[node_id])

    def _serve(self, node: Node) -> str:
        node.server = BlockServer(node.directory, node.arena, LAYOUT.payload_bytes, TOKEN.encode())
        return node.server.start("127.0.0.1")

    def _source(self, address: str) -> BlockSource:
        [node] = [node for name, node in self.nodes.items() if self.addresses[name] == address]
        if node.server is not None:
            self.readers.append(BlockReader(address, LAYOUT.payload_bytes, TOKEN.encode(), PEER_TIMEOUT_S))
            return self.readers[-1]
        return LocalBlocks(node.directory, node.arena, LAYOUT.payload_bytes)

    async def stop(self) -> None:
        await super().stop()
        for reader in self.readers:
            reader.close()
        for node in self.nodes.values():
            if node.server is not None:
                node.server.stop()
            assert node.directory.records.check() == []

    @property
    def is_held(self) -> bool:
        return any(node.directory.records.status().num_holds for node in self.nodes.values())


@pytest.fixture(params=["twin", "tcp"])
async def nodes(request: pytest.FixtureRequest) -> AsyncIterator[Nodes]:
    cluster = Nodes(MODEL, over_tcp=request.param == "tcp")
    await cluster.start(1, 1)
    yield cluster
    await until(lambda: not cluster.is_held)
    await cluster.stop()


@pytest.mark.parametrize("num_prompt", [1, 16, 100, 700])
async def test_decode_fetches_the_prompt_from_the_node_that_prefilled_it(nodes: Nodes, num_prompt: int) -> None:
    prompt = tuple(number % 300 for number in range(num_prompt))
    output = await nodes.generate(ask(prompt))
    status = await nodes.status()
    assert output.token_ids[0] == MODEL.oracle(prompt, 40)
    assert worker(status, "d0").computed_prompt_tokens == 0, "with the tail"
    assert worker(status, "p0").computed_prompt_tokens == num_prompt
    [peers] = [tier for tier in worker(status, "d0").tiers if tier.tier == "peers"]
    assert (peers.state, peers.counts["hits"], peers.counts["errors"]) == ("up", -(-num_prompt // 16), 0)


async def test_the_next_turn_finds_the_answer_on_the_other_node(nodes: Nodes) -> None:
    first = await nodes.generate(ask())
    prompt = (*PROMPT, *first.token_ids[0], 5, 6)
    second = await nodes.generate(ask(prompt))
    cached = tiers_from_pb(second.complete.usage.cached_tokens)
    assert second.token_ids[0] == MODEL.oracle(prompt, 40)
    assert (cached["device"], cached["peers"]) == (96, 32)


async def test_blocks_spoilt_on_the_other_node_are_computed_again(nodes: Nodes) -> None:
    first = await nodes.generate(ask())
    there = nodes.nodes["b"].directory.state
    await until(lambda: len(there.blocks()) == 9)  # seven of the prompt, two of the answer, which may be on their way
    for block in there.blocks():
        nodes.nodes["b"].arena.slot(block.slot)[3] ^= 1
    prompt = (*PROMPT, *first.token_ids[0], 5, 6)
    second = await nodes.generate(ask(prompt))
    cached = tiers_from_pb(second.complete.usage.cached_tokens)
    assert second.token_ids[0] == MODEL.oracle(prompt, 40)
    assert "peers" not in cached


async def test_the_routers_index_comes_to_have_the_blocks_of_each_node(nodes: Nodes) -> None:
    names = cover(nodes.router.dispatcher.root_of(DEFAULT_TENANT), PROMPT, LAYOUT.block_size)
    await nodes.generate(ask())
    index, addresses = nodes.router.index, nodes.addresses
    for name, address in addresses.items():
        there = nodes.nodes[name].directory
        await until(lambda there=there, address=address: index.marks(address) == full_marks(there))  # type: ignore[misc]
    assert index.match([name.key for name in names]) == dict.fromkeys(addresses.values(), 6)
    nodes.nodes["a"].directory.delete([names[2].key])
    await until(lambda: index.match([name.key for name in names]) == {addresses["a"]: 2, addresses["b"]: 6})


def full_marks(directory: Directory) -> set[int]:
    return {mark_of(block.name.key) for block in directory.state.blocks() if not block.name.is_tail}


async def test_a_node_whose_port_is_gone_is_a_miss() -> None:
    nodes = Nodes(MODEL, over_tcp=True)
    await nodes.start(1, 1)
    server = nodes.nodes["a"].server
    assert server is not None
    server.stop()
    output = await nodes.generate(ask())
    status = await nodes.status()
    assert output.token_ids[0] == MODEL.oracle(PROMPT, 40)
    assert worker(status, "d0").computed_prompt_tokens > 0
    nodes.nodes["a"].server = None
    await until(lambda: not nodes.is_held)
    await nodes.stop()


LINES: dict[str, tuple[Line, bool]] = {
    "5 ms late": (Line(delay_s=(0.005, 0.005)), True),
    "jitter": (Line(delay_s=(0.0, 0.005)), True),
    "seven bytes at a time": (Line(max_piece_bytes=7), True),
    "2 kB a second": (Line(bytes_per_s=2000.0), False),
    "half a second late": (Line(delay_s=(0.5, 0.5)), False),
    "reset in the midst of a block": (Line(bytes_to_reset=1500), False),
    "cut one way": (Line(loses_answers=True), False),
}


@pytest.mark.parametrize(("line", "is_read"), LINES.values(), ids=LINES)
async def test_a_bad_line_between_nodes_costs_time_only(line: Line, is_read: bool) -> None:
    """Where the prompt does not come in time, decode computes it."""
    nodes = Nodes(MODEL, over_tcp=True)
    async with toxic_proxy(nodes.addresses["a"], line) as address:
        nodes.addresses["a"] = address
        await nodes.start(1, 1)
        output = await nodes.generate(ask())
        status = await nodes.status()
        assert output.token_ids[0] == MODEL.oracle(PROMPT, 40)
        assert (worker(status, "d0").computed_prompt_tokens == 0) is is_read
        assert (worker(status, "p0").computed_prompt_tokens, worker(status, "d0").generated_tokens) == (len(PROMPT), 39)
        await until(lambda: not nodes.is_held)
        await nodes.stop()
