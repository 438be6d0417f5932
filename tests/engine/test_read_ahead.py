"""Blocks that a decode engine reads while a prefill engine computes the rest: device hits, or misses, and no trace."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.core import EngineCore
from engine.model.hash_model import HashModel
from engine.pages import prefix_reads
from engine.request import BlocksAhead, EngineRequest, HandOff
from engine.schedule.continuous_batcher import ContinuousBatcher
from kv_store.device_pool import DevicePool
from kv_store.node_store import NodeStore
from kv_store.transfers import Prefetch, ThreadTransfers, Transfer, WriteThrough
from tests.harness.engines import ROOT, Run, drive, make_core, request, rest_of
from tests.harness.fake_clock import FakeClock
from tests.harness.node import Node
from wire.block_names import cover
from wire.ids import AttemptId, SlotId
from wire.layout import KVLayout
from wire.sampling import SamplingParams

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
MODEL = HashModel(LAYOUT, 997)
PROMPT = tuple((7 * place + place // 5) % 250 for place in range(6 * 16 + 5))
NAMES = cover(ROOT, PROMPT, 16)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
CHUNK = ContinuousBatcher(max_step_tokens=32, max_running=8)
ATTEMPT = AttemptId("ahead")


class Hand(ThreadTransfers):
    """Transfers that a test carries out by hand, in the order of their thread."""

    def __init__(self, node: Node, pool: DevicePool) -> None:
        store = NodeStore(LAYOUT, node.arena, node.directory, [], pool, FakeClock())
        super().__init__(store, lambda: None)
        self.orders: list[Transfer] = []

    def begin(self, transfer: Transfer) -> None:
        self.orders.append(transfer)
        super().begin(transfer)

    def carry_out(self) -> None:
        while not self._orders.empty():
            self.run_one()

    @property
    def num_prefetches(self) -> int:
        return sum(isinstance(one, Prefetch) for one in self.orders)


class Decode:
    """A decode engine, whose transfers end by hand."""

    def __init__(self, node: Node, num_pages: int = 64, layout: KVLayout = LAYOUT) -> None:
        self.pool = DevicePool(layout, num_pages, MODEL.device)
        self.transfers = Hand(node, self.pool)
        self.core = EngineCore(MODEL, self.pool, ContinuousBatcher(), self.transfers)

    def step(self) -> None:
        self.transfers.carry_out()
        self.core.step()
        assert self.core.check() == []

    def answer(self, asked: EngineRequest) -> Run:
        """Runs a request to its end, and all transfers."""
        run = Run(asked, {one.index: list(one.output_ids) for one in asked.choices})
        self.core.add(asked)
        while self.core.has_requests:
            self.transfers.carry_out()
            output = self.core.step()
            assert self.core.check() == []
            for choice, token_id in zip(output.choices, output.token_ids, strict=True):
                run.outputs[choice.index].append(token_id)
            for event in output.events:
                run.take(event)
        self.step()
        self.require_rest()
        return run

    def require_rest(self) -> None:
        counts = self.core.stats().blocks
        assert counts.owned == counts.published == counts.draining == 0


def ahead(num_blocks: int, start: int = 0, attempt: AttemptId = ATTEMPT) -> BlocksAhead:
    return BlocksAhead(attempt_id=attempt, names=NAMES[start:num_blocks])


def handed_off(node: Node, on_stored: Callable[[int], None] | None = None, max_tokens: int = 20) -> Run:
    """Prefills the prompt in chunks of two blocks."""
    asked = HandOff(
        attempt_id=ATTEMPT,
        root=ROOT,
        prompt_ids=PROMPT,
        sampling=replace(GREEDY, max_tokens=max_tokens),
        on_stored=on_stored,
    )
    [run] = drive(make_core(MODEL, node, batcher=CHUNK), [asked])
    return run


def oracle() -> list[int]:
    return MODEL.oracle(PROMPT, 20)


def test_prefill_tells_of_blocks_that_are_stored_amid_its_prompt() -> None:
    told: list[int] = []
    handed_off(Node(LAYOUT), told.append)
    assert told == [2, 4, 6]


def test_prefill_tells_of_nothing_where_the_arena_has_no_room() -> None:
    told: list[int] = []
    handed_off(Node(LAYOUT, num_slots=1), told.append)
    assert told == []


def test_blocks_read_amid_the_prompt_are_device_hits() -> None:
    node = Node(LAYOUT)
    decode, num_sent = Decode(node), [0]

    def pass_on(num_blocks: int) -> None:
        decode.core.prefetch(ahead(num_blocks, num_sent[0]))
        decode.step()
        num_sent[0] = num_blocks

    run = decode.answer(rest_of(handed_off(node, pass_on)))
    assert run.outputs[0] == oracle()
    assert run.fetched[0].found == {"device": 96, "host": 5}
    assert decode.transfers.num_prefetches == 3


def test_blocks_read_for_an_attempt_that_has_not_begun_are_not_found_by_another() -> None:
    """The first attempt's prefill may have ended with logits that are no numbers: its blocks are deleted elsewhere."""
    node = Node(LAYOUT)
    rest = rest_of(handed_off(node))
    decode = Decode(node)
    decode.core.prefetch(ahead(6, attempt=AttemptId("other")))
    decode.step()
    run = decode.answer(rest)
    assert run.outputs[0] == oracle()
    assert run.fetched[0].found == {"host": 101}


def test_a_page_that_has_another_block_since_is_found() -> None:
    """Pages that were read ahead are evicted, and get blocks of another prompt."""
    node = Node(LAYOUT)
    handed_off(node)
    decode = Decode(node, num_pages=9)
    decode.core.prefetch(ahead(6, attempt=AttemptId("other")))
    decode.step()
    filled = tuple((5 * place) % 250 for place in range(8 * 16 + 3))
    for number in range(2):
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        asked = EngineRequest(attempt_id=AttemptId(f"filled-{number}"), root=ROOT, prompt_ids=filled, sampling=sampling)
        run = decode.answer(asked)
    assert run.fetched[0].found.get("device", 0) == 8 * 16


def test_the_end_of_a_prompt_and_its_tail_are_one_transfer() -> None:
    node = Node(LAYOUT)
    pool = DevicePool(LAYOUT, 64, MODEL.device)
    transfers = Hand(node, pool)
    core = EngineCore(MODEL, pool, ContinuousBatcher(), transfers)
    core.add(HandOff(attempt_id=ATTEMPT, root=ROOT, prompt_ids=PROMPT, sampling=GREEDY))
    while core.has_requests:
        transfers.carry_out()
        core.step()
    writes = [one for one in transfers.orders if isinstance(one, WriteThrough)]
    assert [len(one.names) for one in writes] == [7]
    assert node.directory.records.exists([name.key for name in NAMES]) == [True] * 7


def test_a_prompt_that_ends_with_its_first_token_is_stored_nonetheless() -> None:
    node = Node(LAYOUT)
    handed_off(node, max_tokens=1)
    assert node.directory.records.exists([name.key for name in NAMES]) == [*[True] * 6, False]


def test_a_fetch_takes_over_what_is_not_read_yet() -> None:
    """Orders of a prefetch that have not begun read nothing any more, and their pages are free."""
    node = Node(LAYOUT)
    rest = rest_of(handed_off(node))
    decode = Decode(node)
    decode.core.prefetch(ahead(6))
    decode.core.add(rest)
    decode.core.step()
    run = Run(rest, {0: list(rest.choices[0].output_ids)})
    while decode.core.has_requests:
        decode.transfers.carry_out()
        output = decode.core.step()
        assert decode.core.check() == []
        run.outputs[0] += output.token_ids
        for event in output.events:
            run.take(event)
    decode.require_rest()
    assert run.outputs[0] == oracle()
    assert run.fetched[0].found == {"host": 101}


def test_blocks_without_a_request_are_cached_and_evicted() -> None:
    node = Node(LAYOUT)
    handed_off(node)
    decode = Decode(node, num_pages=8)
    decode.core.prefetch(ahead(6, attempt=AttemptId("another")))
    decode.step()
    decode.require_rest()
    assert decode.core.stats().blocks.cached == 6
    other = tuple(token + 1 for token in PROMPT)
    assert decode.answer(request(other, GREEDY)).outputs[0] == MODEL.oracle(other, 20)


def test_a_prefetch_takes_only_pages_that_no_sequence_needs() -> None:
    node = Node(LAYOUT)
    handed_off(node)
    decode = Decode(node, num_pages=9)
    other = tuple(token + 1 for token in PROMPT[:70])
    decode.core.add(request(other, GREEDY))
    for _ in range(4):
        decode.step()
    assert decode.core.stats().num_running == 1
    decode.core.prefetch(ahead(6))
    decode.step()
    [order] = [one for one in decode.transfers.orders if isinstance(one, Prefetch)]
    assert [name.key for name in order.names] == [name.key for name in NAMES[: len(order.names)]]
    assert len(order.names) == 9 - 5
    while decode.core.has_requests:
        decode.step()
    assert decode.core.stats().num_preemptions == 0


def test_nothing_is_read_ahead_of_a_sequence_that_waits() -> None:
    decode = Decode(Node(LAYOUT))
    decode.core.add(request(PROMPT, GREEDY))
    decode.core.prefetch(ahead(6))
    assert decode.transfers.num_prefetches == 0


def test_blocks_on_the_device_or_under_way_are_not_ordered_again() -> None:
    node = Node(LAYOUT)
    handed_off(node)
    decode = Decode(node)
    decode.core.prefetch(ahead(2))
    decode.step()
    decode.core.prefetch(ahead(4))
    decode.core.prefetch(ahead(6, attempt=AttemptId("another")))
    orders = [one.names for one in decode.transfers.orders if isinstance(one, Prefetch)]
    assert orders == [NAMES[:2], NAMES[2:4], NAMES[4:6]]


def test_prefetches_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_reads, "MAX_PREFETCHES", 4)
    monkeypatch.setattr(prefix_reads, "GROUP_BYTES", LAYOUT.payload_bytes)
    decode = Decode(Node(LAYOUT))
    decode.core.prefetch(ahead(6))
    assert [len(one.names) for one in decode.transfers.orders] == [1] * 4
    decode.step()
    decode.require_rest()


@pytest.mark.parametrize("layout", [replace(LAYOUT, window=40), replace(LAYOUT, dtype="bfloat16", quantization="int4")])
def test_pages_that_a_prefix_cannot_be_read_into_by_part_are_left_alone(layout: KVLayout) -> None:
    pool = DevicePool(layout, 64, MODEL.device)
    core = EngineCore(MODEL, pool, ContinuousBatcher(), transfers := Hand(Node(LAYOUT), pool))
    core.prefetch(ahead(6))
    assert transfers.orders == []


def spoil(node: Node) -> None:
    """Writes other bytes into each slot of the arena."""
    for number in range(node.arena.num_slots):
        node.arena.slot(SlotId(number))[0] ^= 1


def lose(node: Node) -> None:
    node.directory.delete([name.key for name in NAMES])


@pytest.mark.parametrize("harm", [spoil, lose])
def test_blocks_that_are_spoilt_or_lost_are_computed(harm: Callable[[Node], None]) -> None:
    node = Node(LAYOUT)
    rest = rest_of(handed_off(node))
    harm(node)
    decode = Decode(node)
    decode.core.prefetch(ahead(6))
    decode.step()
    assert decode.core.stats().blocks.cached == 0
    assert decode.answer(rest).outputs[0] == oracle()


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_purge_amid_a_prefetch_leaves_nothing_of_it(is_whole: bool) -> None:
    """What is read by then may be what was deleted."""
    node = Node(LAYOUT)
    rest = rest_of(handed_off(node))
    decode = Decode(node)
    decode.core.prefetch(ahead(6))
    decode.transfers.carry_out()
    decode.core.drop_cached([] if is_whole else [NAMES[0].key])
    decode.step()
    assert decode.core.stats().blocks.cached == 0
    assert decode.answer(rest).outputs[0] == oracle()


def test_a_prefetch_that_fails_costs_its_pages_for_its_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is lost")

    node = Node(LAYOUT)
    rest = rest_of(handed_off(node))
    decode = Decode(node)
    with monkeypatch.context() as patch:
        patch.setattr(decode.pool, "write_pages", fail)
        decode.core.prefetch(ahead(6))
        assert decode.core.stats().blocks.draining == 6
        decode.step()
    assert decode.core.stats().blocks.free == 64
    assert decode.answer(rest).outputs[0] == oracle()


def test_a_request_that_is_aborted_leaves_its_blocks_cached() -> None:
    node = Node(LAYOUT)
    rest = rest_of(handed_off(node))
    decode = Decode(node)
    decode.core.prefetch(ahead(6))
    decode.step()
    decode.core.add(rest)
    decode.core.step()
    decode.core.abort(rest.attempt_id)
    decode.step()
    decode.require_rest()
    assert decode.answer(replace(rest, attempt_id=AttemptId("again"))).outputs[0] == oracle()
