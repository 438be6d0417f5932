"""The index of nodes' blocks: exact while pages continue one another, and silent about nodes that it does not know."""

import random
from dataclasses import replace

import pytest

from kv_store.node.directory import Directory
from kv_store.node.event_log import EventCursor
from router.block_index import BlockIndex, mark_of
from tests.kv_store.names import LAYOUT, committed, names_of
from wire.block_names import BlockName
from wire.ids import BlockKey
from wire.pb import worker_pb2
from worker.convert import cursor_from_pb, events_to_pb

NAMES = names_of(24)
KEYS = [name.key for name in NAMES]
WINDOWED = replace(LAYOUT, window=6, num_sinks=2)
"""Blocks of four tokens: of the sinks the first, of the window at most three."""


class Node:
    """A directory whose pages an index takes."""

    def __init__(self, index: BlockIndex, node_id: str = "a", num_events: int = 100) -> None:
        self.index = index
        self.id = node_id
        self.directory = Directory(32, num_events=num_events)

    def store(self, names: list[BlockName]) -> None:
        self.directory.commit("w", committed(self.directory.reserve("w", names, None).slots, names), None)

    def page(self, after: worker_pb2.EventCursor | None = None) -> worker_pb2.EventPage:
        page = events_to_pb(self.directory.records.events(cursor_from_pb(after or self.index.cursor(self.id))))
        page.node_id = self.id
        return page

    def follow(self) -> None:
        while (page := self.page()).cursor != page.after:
            self.index.take(page)


@pytest.fixture
def index() -> BlockIndex:
    return BlockIndex(LAYOUT)


def test_a_node_is_unknown_until_its_snapshot_has_come(index: BlockIndex) -> None:
    node = Node(index)
    node.store(NAMES[:3])
    assert index.match(KEYS) == {}
    node.follow()
    assert index.match(KEYS) == {"a": 3}
    assert index.match([BlockKey(bytes(32)), *KEYS]) == {"a": 0}
    assert index.match([]) == {"a": 0}


def test_half_a_snapshot_places_nothing(index: BlockIndex) -> None:
    node = Node(index)
    node.store(NAMES)
    page = node.page()
    page.cursor.slot = 5
    index.take(page)
    assert index.match(KEYS) == {}
    node.follow()
    assert index.match(KEYS) == {"a": len(KEYS)}


def test_each_node_counts_its_own_leading_blocks(index: BlockIndex) -> None:
    nodes = [Node(index, "a"), Node(index, "b"), Node(index, "c")]
    nodes[0].store(NAMES[:2])
    nodes[1].store(NAMES)
    nodes[1].directory.delete([KEYS[4]])
    for node in nodes:
        node.follow()
    assert index.match(KEYS) == {"a": 2, "b": 4, "c": 0}
    nodes[1].store(NAMES[4:5])
    nodes[1].follow()
    assert index.match(KEYS)["b"] == len(KEYS)


@pytest.mark.parametrize("fault", ["lost", "doubled", "of a dead epoch"])
def test_a_page_that_does_not_continue_the_last_leads_to_a_snapshot(index: BlockIndex, fault: str) -> None:
    node = Node(index)
    node.follow()
    node.store(NAMES[:3])
    page = node.page()
    if fault == "lost":
        node.store(NAMES[3:])
        page = node.page(after=page.cursor)
    elif fault == "doubled":
        index.take(page)
    else:
        node.directory = Directory(32)
        node.follow()
    index.take(page)
    assert (index.match(KEYS), index.cursor("a").epoch) == ({}, "")
    node.follow()
    assert index.match(KEYS)["a"] == len(node.directory.state.blocks())


def test_a_new_epoch_takes_all_blocks_of_the_old_one_away(index: BlockIndex) -> None:
    node = Node(index)
    node.store(NAMES)
    node.follow()
    node.directory = Directory(32)
    node.store(NAMES[:1])
    node.follow()
    assert index.match(KEYS) == {"a": 1}


def test_a_node_whose_events_do_not_come_is_left_out_until_they_do(index: BlockIndex) -> None:
    node = Node(index)
    node.store(NAMES[:2])
    node.follow()
    index.break_off("a")
    index.break_off("unknown")
    assert (index.match(KEYS), index.marks("a")) == ({}, None)
    node.store(NAMES[2:4])
    index.take(node.page())
    assert index.match(KEYS) == {"a": 4}, "nothing is lost by that"
    index.take(worker_pb2.EventPage(node_id="a", after=index.cursor("a")))
    assert (index.match(KEYS), index.cursor("a")) == ({}, worker_pb2.EventCursor()), "the node is gone"


def test_copies_in_cold_tiers_are_no_blocks_of_the_node(index: BlockIndex) -> None:
    page = worker_pb2.EventPage(node_id="a", cursor=worker_pb2.EventCursor(epoch="e", number=2))
    page.events.add(kind="stored", tier="redis", keys=KEYS)
    index.take(page)
    assert index.match(KEYS) == {"a": 0}


def test_the_index_equals_the_directory_after_any_changes(index: BlockIndex) -> None:
    draw = random.Random(3)
    node = Node(index, num_events=8)
    names = [*NAMES, *names_of(60, first=900)]
    for _ in range(400):
        first = draw.randrange(len(names))
        if draw.random() < 0.5:
            node.store(names[first : first + draw.randint(1, 4)])
        else:
            node.directory.delete([names[first].key])
        if draw.random() < 0.2:
            index.take(node.page())
        if draw.random() < 0.2:
            node.follow()
            full = {mark_of(block.name.key) for block in node.directory.state.blocks() if not block.name.is_tail}
            assert index.marks("a") == full


@pytest.mark.parametrize(
    ("there", "usable"),
    [
        (range(6), 6),
        ([0, 4, 5], 6),
        ([0, 5], 1),
        ([4, 5], 0),
        ([0, 2, 3, 5], 4),
        ([0, 1], 2),
        ([0], 1),
        ([], 0),
    ],
)
def test_with_a_window_blocks_that_no_token_reads_may_be_missing(there: list[int], usable: int) -> None:
    index = BlockIndex(WINDOWED)
    node = Node(index)
    node.store([NAMES[place] for place in there])
    node.follow()
    assert index.match(KEYS) == {"a": usable}


def test_a_place_survives_the_message() -> None:
    cursor = EventCursor("epoch", 1 << 40, 7)
    assert cursor_from_pb(events_to_pb(Directory(8).records.events(cursor)).after) == cursor
