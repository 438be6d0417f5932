"""Prefixes of which the back is read while the front is computed: the same tokens, whatever becomes of the reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core import EngineCore
from engine.events import ChoiceId, Jumped
from engine.kv.retention import retention_of
from engine.model.batch import Batch, CausalModel
from engine.model.decoder import Decoder
from engine.model.hash_model import HashModel
from engine.request import EngineRequest
from engine.schedule.continuous_batcher import ContinuousBatcher
from engine.step.prefill_meter import PrefillMeter
from kernels.backend import KVPages
from kv_store.device_pool import DevicePool
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.node_store import NodeStore
from kv_store.transfers import Done, Fetch, NoStore, Transfer
from tests.harness.checkpoints import make_checkpoint
from tests.harness.engines import ROOT, Run, gained, make_core, request, serve
from tests.harness.fake_clock import FakeClock
from tests.harness.node import Node
from tests.harness.paced_tier import PacedTier
from wire.block_names import cover
from wire.kv_policy import Dropping, parse_kv_policy
from wire.layout import KVLayout
from wire.sampling import SamplingParams

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
LAYOUTS = [LAYOUT, replace(LAYOUT, dtype="bfloat16"), replace(LAYOUT, quantization="int8")]
NUM_BLOCKS = 40
PROMPT = tuple((7 * place + place // 5) % 250 for place in range(NUM_BLOCKS * 16 + 5))
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
NAMES = cover(ROOT, PROMPT, 16)
COMPUTE_S = 0.016
READ_S = 0.016
LATENCY_S = 0.004


class PacedModel(HashModel):
    """A model whose tokens take time of a clock."""

    def __init__(self, layout: KVLayout, clock: FakeClock, token_s: float) -> None:
        super().__init__(layout, 997)
        self._clock, self._token_s = clock, token_s

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        self._clock.now += len(batch.token_ids) * self._token_s
        return super().forward(batch, kv)


class PacedDecoder:
    """A decoder whose tokens take time of a clock, too."""

    def __init__(self, decoder: Decoder, clock: FakeClock) -> None:
        self._decoder, self._clock = decoder, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        self._clock.now += len(batch.token_ids) * COMPUTE_S / 16
        return self._decoder.forward(batch, kv)


class Lane(NoStore):
    """Transfers beside an engine: each takes time of the store's clock, after the one before it."""

    def __init__(self, store: NodeStore, engine: FakeClock, lane: FakeClock) -> None:
        super().__init__()
        self._store, self._engine, self._lane = store, engine, lane
        self._ends_s: list[float] = []
        self.orders: list[Transfer] = []

    def begin(self, transfer: Transfer) -> None:
        self._lane.now = max(self._lane.now, self._engine.now)
        self.orders.append(transfer)
        self._done.append(transfer.run(self._store))
        self._ends_s.append(self._lane.now)

    def poll(self) -> list[Done]:
        num = sum(end_s <= self._engine.now for end_s in self._ends_s)
        done, self._done, self._ends_s = self._done[:num], self._done[num:], self._ends_s[num:]
        return done

    def wait(self) -> None:
        """Moves the engine's clock on to the next end."""
        self._engine.now = max(self._engine.now, self._ends_s[0])


@dataclass
class Outcome:
    """What one engine has done with its requests."""

    runs: list[Run]
    jumps: list[Jumped]
    ttft_s: list[float]


class Worker:
    """An engine over a store with one cold tier, on two clocks."""

    def __init__(
        self, layout: KVLayout = LAYOUT, num_pages: int = 256, has_tier: bool = True, decoder: Decoder | None = None
    ) -> None:
        self.engine_clock, self.lane_clock = FakeClock(), FakeClock()
        self.plain: CausalModel = decoder or HashModel(layout, 997)
        layout = self.plain.layout
        self.model: Any = PacedModel(layout, self.engine_clock, COMPUTE_S / 16)
        if decoder is not None:
            self.model = PacedDecoder(decoder, self.engine_clock)
        self.tier = PacedTier(layout, self.lane_clock, LATENCY_S, READ_S)
        self.arena = Arena.anonymous(layout.block_bytes, 1)
        pool = DevicePool(layout, num_pages, self.model.device)
        cold = [self.tier] if has_tier else []
        self.store = NodeStore(layout, self.arena, Directory(1, self.lane_clock), cold, pool, self.lane_clock)
        self.lane = Lane(self.store, self.engine_clock, self.lane_clock)
        meter = PrefillMeter(self.store.costs, self.engine_clock)
        self.core = EngineCore(self.model, pool, ContinuousBatcher(), self.lane, meter=meter)

    def teach(self) -> "Worker":
        costs = self.store.costs
        for _ in range(20):
            costs.note_prefill(160, 10 * COMPUTE_S)
            costs.of(self.tier).ask.learn(LATENCY_S)
            costs.of(self.tier).note_reads([LATENCY_S + READ_S, READ_S])
        return self

    def fill(self, prompt: Sequence[int] = PROMPT) -> "Worker":
        """Puts the blocks of a prompt into the tier, as another worker computes them."""
        node = Node(self.model.layout, cold=self.tier)
        serve(make_core(self.plain, node), prompt, replace(GREEDY, max_tokens=1))
        node.write_all_cold()
        node.arena.close()
        return self

    def serve(self, *requests: EngineRequest, amid: Callable[[int], None] = lambda _: None) -> Outcome:
        """Runs requests to their end, with the books checked after each step; `amid` gets the number of each step."""
        began_s = self.engine_clock.now
        runs = {one.attempt_id: Run(one, {choice.index: [] for choice in one.choices}) for one in requests}
        jumps: list[Jumped] = []
        ttft_s: dict[ChoiceId, float] = {}
        for one in requests:
            self.core.add(one)
        number = 0
        while self.core.has_requests:
            output = self.core.step()
            for choice, _, token_id in gained(output):
                runs[choice.attempt_id].outputs[choice.index].append(token_id)
                ttft_s.setdefault(choice, self.engine_clock.now - began_s)
            for event in output.events:
                runs[event.attempt_id].take(event)
            jumps += [event for event in output.events if isinstance(event, Jumped)]
            assert self.core.check() == []
            amid(number)
            number += 1
            if self.core.has_requests and not self.core.can_step:
                self.lane.wait()
        self.settle()
        return Outcome([*runs.values()], jumps, [*ttft_s.values()])

    def settle(self) -> None:
        """Lets all transfers end."""
        while self.lane.pending:
            self.lane.wait()
            self.core.step()
            assert self.core.check() == []
        counts = self.core.stats().blocks
        assert counts.owned == counts.published == counts.draining == 0

    @property
    def groups(self) -> list[Fetch]:
        return [one for one in self.lane.orders if isinstance(one, Fetch) and one.step is not None]


def asked(prompt: Sequence[int] = PROMPT, **settings: Any) -> EngineRequest:
    return request(prompt, replace(GREEDY, **settings))


def oracle(prompt: Sequence[int] = PROMPT, num_tokens: int = 20, layout: KVLayout = LAYOUT) -> list[int]:
    return HashModel(layout, 997).oracle(prompt, num_tokens)


def num_jumped(outcome: Outcome) -> int:
    return sum(jump.num_found for jump in outcome.jumps)


@pytest.fixture
def worker() -> Worker:
    return Worker().fill().teach()


@pytest.mark.parametrize("layout", LAYOUTS, ids=["float32", "bfloat16", "int8"])
def test_tokens_equal_an_engine_without_a_store(layout: KVLayout) -> None:
    worker = Worker(layout).fill().teach()
    outcome = worker.serve(asked())
    assert outcome.runs[0].outputs[0] == oracle(layout=layout)
    assert len(worker.groups) > 1
    stats = worker.core.stats()
    assert 10 * 16 < num_jumped(outcome) < 30 * 16
    assert stats.cached_prompt_tokens == num_jumped(outcome)
    assert stats.cached_prompt_tokens + stats.computed_prompt_tokens == len(PROMPT)
    assert {tier for jump in outcome.jumps for tier in jump.tokens.found} == {"redis"}


@pytest.mark.parametrize(("dtype", "kept"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")])
def test_a_decoder_gives_the_tokens_of_an_engine_without_a_store(tmp_path: Path, dtype: str, kept: str) -> None:
    decoder = Decoder.load(make_checkpoint("llama-gqa", tmp_path), dtype, torch.device("cpu"), 16, kv_dtype=kept)
    worker = Worker(decoder=decoder).fill().teach()
    settings: dict[str, Any] = {"temperature": 0.8, "seed": 7, "max_tokens": 20}
    expected = serve(make_core(decoder), PROMPT, replace(GREEDY, **settings)).outputs[0]
    outcome = worker.serve(asked(**settings))
    assert outcome.runs[0].outputs[0] == expected
    assert num_jumped(outcome) > 10 * 16
    assert len({*expected}) > 10


def test_the_tokens_depend_on_the_blocks_that_are_read(worker: Worker) -> None:
    """Another model has written them: else the tests here would show nothing."""
    worker.tier.close()
    node = Node(LAYOUT, cold=worker.tier)
    serve(make_core(HashModel(LAYOUT, 997, seed=1), node), PROMPT, replace(GREEDY, max_tokens=1))
    node.write_all_cold()
    assert worker.serve(asked()).runs[0].outputs[0] != oracle()


@pytest.mark.parametrize("place", [1, 20, 30, NUM_BLOCKS - 1])
@pytest.mark.parametrize("fault", ["corrupt", "gone"])
def test_a_block_that_is_not_right_is_computed(worker: Worker, place: int, fault: str) -> None:
    key = NAMES[place].key

    def strike(number: int) -> None:
        if number == 1:
            frame = worker.tier.frames.pop(key)
            if fault == "corrupt":
                worker.tier.frames[key] = frame[:-1] + bytes([frame[-1] ^ 1])

    outcome = worker.serve(asked(), amid=strike)
    assert outcome.runs[0].outputs[0] == oracle()
    is_struck = any(name.key == key for group in worker.groups for name in group.names)
    assert num_jumped(outcome) < 17 * 16 or not is_struck


def test_blocks_behind_a_hole_are_found_once_it_is_computed(worker: Worker) -> None:
    def strike(number: int) -> None:
        if len(worker.groups) == 1:
            first = [name.key for name in worker.groups[0].names]
            hole = next(place for place, name in enumerate(NAMES) if name.key == first[0]) - 2
            worker.tier.frames.pop(NAMES[hole].key, None)

    outcome = worker.serve(asked(), amid=strike)
    assert outcome.runs[0].outputs[0] == oracle()
    assert len(outcome.jumps) > 1
    assert outcome.jumps[-1].span.stop == NUM_BLOCKS * 16


def test_a_tier_that_becomes_slow_holds_nothing_up(worker: Worker) -> None:
    def strike(number: int) -> None:
        worker.tier.block_s = 1.0

    outcome = worker.serve(asked(), amid=strike)
    assert outcome.runs[0].outputs[0] == oracle()
    assert outcome.ttft_s[0] <= 1.1 * NUM_BLOCKS * COMPUTE_S
    assert len(worker.groups) == 1


@pytest.mark.parametrize("num_groups", [1, 2])
def test_an_abort_gives_all_pages_back(worker: Worker, num_groups: int) -> None:
    one = asked()

    def strike(number: int) -> None:
        if len(worker.groups) == num_groups:
            worker.core.abort(one.attempt_id)

    worker.serve(one, amid=strike)
    assert len(worker.groups) == num_groups
    assert worker.serve(asked()).runs[0].outputs[0] == oracle()


def test_preempted_sequences_go_on_right() -> None:
    """Ten older sequences grow while the youngest prefetches."""
    worker = Worker(num_pages=10 * 3 + NUM_BLOCKS + 16).fill().teach()
    older = [asked(range(number, number + 36), max_tokens=60) for number in range(10)]
    youngest = asked()
    groups: list[Fetch] = []

    def note(number: int) -> None:
        if worker.core.stats().num_preemptions and not groups:
            groups.extend(worker.groups)

    outcome = worker.serve(*older, youngest, amid=note)
    assert groups, "it was preempted once it had read a group"
    assert [run.outputs[0] for run in outcome.runs[:10]] == [oracle(one.prompt_ids, 60) for one in older]
    assert outcome.runs[10].outputs[0] == oracle()


@pytest.mark.parametrize("num_pages", [NUM_BLOCKS + 2, NUM_BLOCKS + 6, NUM_BLOCKS + 20])
def test_a_small_pool_reads_what_it_has_room_for(num_pages: int) -> None:
    worker = Worker(num_pages=num_pages).fill().teach()
    assert worker.serve(asked()).runs[0].outputs[0] == oracle()
    assert all(len(group.names) <= num_pages for group in worker.groups)


def test_sequences_with_one_prefix_both_end_right(worker: Worker) -> None:
    other = (*PROMPT[: 30 * 16], *range(40))
    outcome = worker.serve(asked(), asked(other), asked(), asked(PROMPT, n=2))
    expected = [oracle(), oracle(other), oracle(), oracle()]
    assert [run.outputs[0] for run in outcome.runs] == expected
    assert outcome.runs[-1].outputs[1] == oracle()


def test_prompts_whose_tokens_are_scored_and_requests_that_compute_all_do_not_jump(worker: Worker) -> None:
    for one in (replace(asked(), num_scored=1), replace(asked(), computes_all=True)):
        outcome = worker.serve(one)
        assert outcome.jumps == []
        assert outcome.runs[0].outputs[0] == oracle()


@pytest.mark.parametrize(
    ("layout", "policy", "is_plain"),
    [
        (LAYOUT, "full", True),
        (LAYOUTS[2], "full", True),
        (LAYOUT, "snapkv=50%", False),
        (LAYOUT, "h2o=50%", False),
        (replace(LAYOUT, window=64), "full", False),
        (replace(LAYOUT, quantization="int4"), "full", False),
    ],
)
def test_only_sequences_that_keep_all_kv_jump(layout: KVLayout, policy: str, is_plain: bool) -> None:
    dropping = parse_kv_policy(policy)
    one = replace(asked(), dropping=dropping if isinstance(dropping, Dropping) else None)
    assert retention_of(one, layout).is_plain is is_plain


def mean_ttft_s(worker: Worker, latency_s: float, block_s: float) -> float:
    """Of prompts that the tier has, after the first twenty."""
    worker.tier.latency_s, worker.tier.block_s = latency_s, block_s
    took_s = []
    for number in range(25):
        prompt = (number, *PROMPT[1:])
        worker.fill(prompt)
        worker.lane_clock.now = worker.engine_clock.now
        took_s += worker.serve(asked(prompt, max_tokens=1)).ttft_s
    return sum(took_s[20:]) / 5


@pytest.mark.parametrize(("latency_s", "times"), [(0.004, 1.0), (0.02, 0.6), (0.01, 2.0)])
def test_a_split_prefix_takes_hardly_longer_than_reading_and_computing_at_once(latency_s: float, times: float) -> None:
    block_s = times * COMPUTE_S
    compute_s = len(PROMPT) / 16 * COMPUTE_S
    read_s = 2 * latency_s + NUM_BLOCKS * block_s
    best_s = 1 / (1 / compute_s + 1 / read_s)
    assert mean_ttft_s(Worker(), latency_s, block_s) <= 1.25 * best_s


@pytest.mark.parametrize(("latency_s", "block_s"), [(0.05, 0.128), (0.2, 0.2), (0.5, 0.02)])
def test_a_slow_tier_makes_no_prompt_slower(latency_s: float, block_s: float) -> None:
    alone_s = len(PROMPT) / 16 * COMPUTE_S
    assert mean_ttft_s(Worker(), latency_s, block_s) <= 1.10 * alone_s
