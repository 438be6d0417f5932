"""Chunks of prompts beside decoding sequences of an engine whose steps take time of a clock."""

from dataclasses import dataclass, replace
from functools import cache

import torch

from decode_worker.behaviour import decode_behaviour
from engine.core import EngineCore
from engine.model.batch import Batch
from engine.model.hash_model import HashModel
from engine.step.prefill_meter import PrefillMeter
from kernels.backend import KVPages
from kv_store.device_pool import DevicePool
from kv_store.prefix.costs import Costs
from kv_store.transfers import NoStore
from tests.harness.engines import gained, request
from tests.harness.fake_clock import FakeClock
from wire.ids import AttemptId
from wire.layout import KVLayout
from wire.sampling import SamplingParams
from worker.config import BatchSettings

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
GREEDY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
NUM_PROMPTS = 8
PROMPT_LEN = 3000
GAP_S = 0.05
BY_TIME = BatchSettings(max_gap_ms=1000 * GAP_S)


@dataclass(frozen=True)
class Device:
    """Seconds of a step of decoding sequences, and of each token of a chunk beside them."""

    decode_s: float
    token_s: float


GPU, CPU, BUSY_GPU = Device(0.005, 40e-6), Device(0.005, 0.002), Device(0.03, 40e-6)


class TimedModel(HashModel):
    """A model on a device of a clock; notes the tokens of chunks and the seconds of steps that also decode."""

    def __init__(self, device: Device, clock: FakeClock) -> None:
        super().__init__(LAYOUT, 997)
        self._timing, self._clock = device, clock
        self.chunks: list[int] = []
        self.gaps_s: list[float] = []

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        num_tokens = len(batch.token_ids) - batch.num_decodes
        took_s = self._timing.decode_s + num_tokens * self._timing.token_s
        self._clock.now += took_s
        if batch.num_decodes and num_tokens:
            self.chunks.append(num_tokens)
            self.gaps_s.append(took_s)
        return super().forward(batch, kv)


@dataclass
class Served:
    """An engine that has decoded while prompts came, one after the other; output: token ids of each request."""

    model: TimedModel
    output: list[list[int]]

    @property
    def last_chunks(self) -> list[int]:
        """The chunks of the last prompts, without their ends, which are no whole blocks."""
        last = self.model.chunks[-len(self.model.chunks) // 3 :]
        return [one for one in last if one % 16 == 0]


@cache
def serve(device: Device, batch: BatchSettings) -> Served:
    clock = FakeClock()
    model = TimedModel(device, clock)
    pool, meter = DevicePool(LAYOUT, 512, model.device), PrefillMeter(Costs(16), clock)
    core = EngineCore(model, pool, decode_behaviour(batch, 16).batcher, NoStore(), meter=meter)
    asked = [request((1, 2, 3), replace(GREEDY, max_tokens=4000))]
    asked += [
        request([(number * 7 + place) % 250 for place in range(PROMPT_LEN)], GREEDY) for number in range(NUM_PROMPTS)
    ]
    output = {one.attempt_id: list[int]() for one in asked}
    core.add(asked[0])
    for _ in range(20):
        _step(core, output)
    for one in asked[1:]:
        core.add(one)
        while not output[one.attempt_id]:
            _step(core, output)
    core.abort(asked[0].attempt_id)
    return Served(model, [*output.values()])


def _step(core: EngineCore, output: dict[AttemptId, list[int]]) -> None:
    for choice, _, token_id in gained(core.step()):
        output[choice.attempt_id].append(token_id)


def test_a_fast_device_takes_a_prompt_in_few_steps_within_the_bound() -> None:
    served = serve(GPU, BY_TIME)
    assert served.model.chunks[0] == 256, "nothing is learned yet"
    assert min(served.last_chunks) >= 1024
    assert max(served.model.gaps_s) <= GAP_S


def test_a_slow_device_takes_few_tokens_so_that_the_bound_holds() -> None:
    served = serve(CPU, BY_TIME)
    assert set(served.last_chunks) == {16}
    assert max(served.model.gaps_s[len(served.model.gaps_s) // 2 :]) <= GAP_S


def test_decoding_that_takes_most_of_the_bound_is_not_taken_for_the_cost_of_tokens() -> None:
    served = serve(BUSY_GPU, BY_TIME)
    assert min(served.last_chunks) >= 400, "500 have time"
    assert max(served.model.gaps_s) <= GAP_S


def test_a_bound_of_tokens_holds_beside_a_bound_of_time() -> None:
    assert set(serve(GPU, replace(BY_TIME, max_chunk_tokens=512)).last_chunks) == {512}


def test_without_a_bound_of_time_chunks_are_as_long_on_any_device() -> None:
    chunks = [serve(device, BatchSettings()).model.chunks for device in (GPU, CPU)]
    assert chunks[0] == chunks[1]
    assert max(chunks[0]) == 256


def test_no_token_depends_on_the_bound() -> None:
    plain, by_time, slow = serve(GPU, BatchSettings()), serve(GPU, BY_TIME), serve(CPU, BY_TIME)
    assert plain.output[1:] == by_time.output[1:] == slow.output[1:]
    num_tokens = min(len(one.output[0]) for one in (plain, by_time, slow))
    assert plain.output[0][:num_tokens] == by_time.output[0][:num_tokens] == slow.output[0][:num_tokens]
