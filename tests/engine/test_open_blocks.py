"""KV in int4 in an engine: blocks are open while they fill, and there are fewer of them than pages."""

from dataclasses import replace

import pytest
import torch

from engine.core import EngineCore
from engine.model.decoder import Decoder
from engine.schedule.continuous_batcher import ContinuousBatcher
from kv_store.device_pool import DevicePool
from kv_store.transfers import NoStore
from tests.engine.test_decoder import Checkpoints
from tests.harness.engines import drive, make_core, prefill, request, rest_of
from tests.harness.node import Node
from wire.errors import ConfigError
from wire.sampling import SamplingParams

PROMPTS = [
    tuple((7 * number + place * place) % 256 for place in range(length)) for number, length in enumerate((90, 33, 5))
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoints) -> Decoder:
    return Decoder.load(checkpoint("llama-gqa"), "bfloat16", torch.device("cpu"), 16, kv_dtype="int4")


@pytest.fixture(scope="module")
def expected(model: Decoder) -> list[list[int]]:
    return [drive(make_core(model), [request(prompt, GREEDY)])[0].outputs[0] for prompt in PROMPTS]


def core_with(model: Decoder, num_open: int, num_pages: int = 64, max_running: int = 3) -> EngineCore:
    batcher = ContinuousBatcher(max_step_tokens=512, max_running=max_running)
    return EngineCore(model, DevicePool(model.layout, num_pages, model.device, num_open), batcher, NoStore())


@pytest.mark.parametrize(("num_open", "max_running"), [(1, 1), (4, 3), (9, 3)])
def test_few_open_blocks_make_smaller_steps_of_the_same_tokens(
    model: Decoder, expected: list[list[int]], num_open: int, max_running: int
) -> None:
    """A chunk is cut to the blocks that may be open; a sequence that finds none waits for the next step."""
    core = core_with(model, num_open, max_running=max_running)
    assert [run.outputs[0] for run in drive(core, [request(prompt, GREEDY) for prompt in PROMPTS])] == expected
    assert core.pool.num_openable == num_open


def test_sequences_that_go_leave_their_open_blocks(model: Decoder) -> None:
    core = core_with(model, 16)
    requests = [request(prompt, GREEDY) for prompt in PROMPTS]
    for one in requests:
        core.add(one)
    for _ in range(4):
        core.step()
    assert core.pool.num_open == 3
    core.abort(requests[0].attempt_id)
    assert core.pool.num_open == 2
    for one in requests[1:]:
        core.abort(one.attempt_id)
    assert (core.pool.num_open, core.check()) == (0, [])


def test_choices_compute_the_unfilled_block_of_their_prompt_each(model: Decoder, expected: list[list[int]]) -> None:
    node = Node(model.layout)
    asked = replace(GREEDY, n=3)
    assert [*drive(make_core(model, node), [request(PROMPTS[0], asked)])[0].outputs.values()] == [expected[0]] * 3
    runs = prefill(make_core(model, node), [PROMPTS[0]], asked)
    [again] = drive(make_core(model, node), [rest_of(run) for run in runs])
    assert [*again.outputs.values()] == [expected[0]] * 3
    assert {tokens.num_found for tokens in again.fetched.values()} == {80}


def test_a_head_that_int4_does_not_fit_is_refused(model: Decoder) -> None:
    attention = replace(model.config.attention, head_dim=6)
    with pytest.raises(ConfigError, match=r"model.kv_dtype: int4 takes heads of a multiple of 4 numbers, not 6"):
        replace(model.config, attention=attention).kv_layout("bfloat16", 16, "int4")
