"""A model whose rows all have windows: pages behind the window are given up, and hits need the window's blocks only.

The same with sinks, whose blocks are needed, too.
"""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import EngineCore
from engine.events import Failed
from engine.model.batch import Batch
from engine.model.hash_model import HashModel
from engine.schedule.continuous_batcher import ContinuousBatcher
from engine.speculation.speculator import NgramProposer, Speculator
from kernels.backend import KVPages
from kv_store.tiers.memory_tier import MemoryTier
from tests.harness.engines import ROOT, drive, make_core, prefill, request, rest_of, resume, serve
from tests.harness.node import Node
from tests.pairs import RUNS_ALL
from wire.block_names import cover
from wire.errors import InvalidRequest
from wire.ids import BlockKey
from wire.layout import KVLayout, Window
from wire.sampling import SamplingParams

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32", window=50)
PROMPT = tuple(range(1, 201))
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=30)
NUM_NEEDED = {0: 5, 20: 7}
"""Blocks that 49 tokens may touch, and the one that the next token goes to; and those of so many sinks."""


class Spoilt(HashModel):
    """A model without numbers behind token 199."""

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        logits = super().forward(batch, kv)
        if 199 in batch.token_ids.tolist():
            logits[:] = torch.nan
        return logits


@pytest.fixture(params=NUM_NEEDED)
def model(request: pytest.FixtureRequest) -> HashModel:
    return HashModel(replace(LAYOUT, num_sinks=request.param), 997, max_context_len=32_768)


@pytest.fixture
def num_needed(model: HashModel) -> int:
    return NUM_NEEDED[model.layout.num_sinks]


def keys(prompt: tuple[int, ...] = PROMPT) -> list[BlockKey]:
    return [name.key for name in cover(ROOT, prompt, LAYOUT.block_size)]


def forget(core: EngineCore, node: Node, places: range, prompt: tuple[int, ...] = PROMPT) -> None:
    """Loses blocks of a prompt, on the device and in the node's arena."""
    lost = [keys(prompt)[place] for place in places]
    assert node.directory.delete(lost) == len(lost)
    for key in lost:
        page = core.pool.ledger.find(key)
        assert page is not None
        core.pool.ledger.unindex(page)


def test_most_needed_is_reached_and_never_passed(model: HashModel, num_needed: int) -> None:
    """However chunks cut the prompt, a pool of the window's size is enough, and one page fewer is refused."""
    for chunk_len in (1, 7, 16, 48, 500):
        core = make_core(model, None, num_needed, ContinuousBatcher(max_step_tokens=chunk_len + 1, max_running=1))
        assert serve(core, PROMPT, GREEDY).outputs[0] == model.oracle(PROMPT, 30)
    with pytest.raises(InvalidRequest):
        make_core(model, num_blocks=num_needed - 1).add(request(PROMPT, GREEDY))


def test_thousands_of_tokens_in_a_pool_of_the_windows_size(model: HashModel, num_needed: int) -> None:
    num_tokens = 20_000 if RUNS_ALL else 2_000
    sampling = replace(GREEDY, max_tokens=num_tokens)
    outputs = serve(make_core(model, num_blocks=num_needed), PROMPT, sampling).outputs
    assert outputs[0] == model.oracle(PROMPT, num_tokens)


def test_many_share_a_pool(model: HashModel, num_needed: int) -> None:
    """Sequences take one another's pages in turn; each gets the oracle's tokens."""
    prompts = [(number, *PROMPT) for number in range(8)]
    runs = drive(make_core(model, num_blocks=3 * num_needed), [request(prompt, GREEDY) for prompt in prompts])
    assert [run.outputs[0] for run in runs] == [model.oracle(prompt, 30) for prompt in prompts]


def test_choices_share_a_prompt(model: HashModel) -> None:
    core = make_core(model, num_blocks=16)
    run = serve(core, PROMPT, replace(GREEDY, n=3))
    assert list(run.outputs.values()) == [model.oracle(PROMPT, 30)] * 3
    assert core.stats().computed_prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("is_on_device", [True, False])
def test_a_hit_needs_nothing_before_the_window(model: HashModel, is_on_device: bool) -> None:
    node = Node(model.layout)
    core = make_core(model, node)
    serve(core, PROMPT, GREEDY)
    forget(core, node, range(Window(model.layout).num_sink_blocks, 8))
    run = serve(core if is_on_device else make_core(model, node), PROMPT, GREEDY)
    assert run.outputs[0] == model.oracle(PROMPT, 30)
    assert run.fetched[0].num_found == 12 * 16


def serve_without(model: HashModel, lost: int, is_on_device: bool) -> tuple[EngineCore, Node]:
    """Serves the prompt, loses a block of it, and serves it again: the blocks before that one are found."""
    node = Node(model.layout)
    core = make_core(model, node)
    serve(core, PROMPT, GREEDY)
    forget(core, node, range(lost, lost + 1))
    run = serve(core if is_on_device else make_core(model, node), PROMPT, GREEDY)
    assert run.outputs[0] == model.oracle(PROMPT, 30)
    assert run.fetched[0].num_found == lost * 16
    return core, node


@pytest.mark.parametrize("lost", [9, 10, 11])
@pytest.mark.parametrize("is_on_device", [True, False])
def test_no_hit_without_a_block_of_the_window(model: HashModel, is_on_device: bool, lost: int) -> None:
    """The position before the hole serves, if its window is here; else all is computed."""
    core, node = serve_without(model, lost, is_on_device)
    forget(core, node, range(lost - 1, lost))
    forget(core, node, range(2))
    forget(core, node, range(4, 6))
    other = serve(make_core(model, node), PROMPT, GREEDY)
    assert other.outputs[0] == model.oracle(PROMPT, 30)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("is_on_device", [True, False])
def test_no_hit_without_a_block_of_the_sinks(is_on_device: bool, lost: int) -> None:
    serve_without(HashModel(replace(LAYOUT, num_sinks=20), 997), lost, is_on_device)


def test_sinks_come_from_the_store_for_a_window_on_the_device() -> None:
    model = HashModel(replace(LAYOUT, num_sinks=20), 997)
    node = Node(model.layout)
    core = make_core(model, node)
    serve(core, PROMPT, GREEDY)
    for key in keys()[:8]:
        page = core.pool.ledger.find(key)
        assert page is not None
        core.pool.ledger.unindex(page)
    run = serve(core, PROMPT, GREEDY)
    assert run.outputs[0] == model.oracle(PROMPT, 30)
    assert run.fetched[0].num_found == 12 * 16
    assert {str(tier) for tier in run.fetched[0].found} == {"device", "host"}


def test_sinks_outlive_what_follows_them() -> None:
    """An arena much smaller than the answer still has the sinks, and the latest blocks, for the next turn."""
    model = HashModel(replace(LAYOUT, num_sinks=20), 997)
    node = Node(model.layout, num_slots=24)
    output = serve(make_core(model, node, num_blocks=8), PROMPT, replace(GREEDY, max_tokens=1000)).outputs[0]
    run = serve(make_core(model, node), (*PROMPT, *output), GREEDY)
    assert run.fetched[0].num_found == 1199 // 16 * 16
    assert run.outputs[0] == model.oracle((*PROMPT, *output), 30)


def test_a_window_is_partly_on_the_device_and_partly_in_the_store(model: HashModel) -> None:
    node = Node(model.layout)
    first, second = make_core(model, node), make_core(model, node)
    serve(first, PROMPT[:176], GREEDY)
    serve(second, PROMPT, GREEDY)
    node.directory.delete(keys()[Window(model.layout).num_sink_blocks : 10])
    run = serve(first, PROMPT, GREEDY)
    assert run.outputs[0] == model.oracle(PROMPT, 30)
    assert run.fetched[0].num_found == 12 * 16
    assert {str(tier) for tier in run.fetched[0].found} == {"device", "host"}


def test_holes_in_a_cold_tier(model: HashModel) -> None:
    """Whatever is lost, tokens stay; the longest position whose window is there is what is found."""
    for lost in ([0, 1, 2, 3], [11], [5, 10], [3, 8, 11], [2, 5, 8, 11], list(range(12))):
        cold = MemoryTier(LAYOUT)
        node = Node(model.layout, cold=cold)
        serve(make_core(model, node), PROMPT, GREEDY)
        node.write_all_cold()
        cold.delete([keys()[place] for place in lost])
        run = serve(make_core(model, Node(model.layout, cold=cold)), PROMPT, GREEDY)
        assert run.outputs[0] == model.oracle(PROMPT, 30)
        sinks = range(Window(model.layout).num_sink_blocks)
        needed = [{*sinks[:end], *range(max(0, end * 16 - 49) // 16, end)} for end in range(13)]
        ends = [end for end in range(13) if not needed[end] & {*lost}]
        assert run.fetched[0].num_found == 16 * max(ends)


def test_a_hand_off_holds_the_window_only(model: HashModel) -> None:
    node = Node(model.layout, num_slots=20)
    runs = prefill(make_core(model, node), [PROMPT], GREEDY)
    assert node.directory.records.status().num_holds == 1
    assert {block.name.key for block in node.directory.state.blocks()} >= {*keys()}
    prefill(make_core(model, node), [tuple(range(300, 480))], GREEDY)
    here, behind = (
        {block.name.key for block in node.directory.state.blocks()},
        Window(model.layout).behind(len(PROMPT)),
    )
    assert {*keys()[: behind.start], *keys()[behind.stop :]} <= here
    assert not {*keys()} <= here
    [run] = resume(make_core(model, node), runs)
    assert run.outputs[0] == model.oracle(PROMPT, 30)
    assert run.fetched[0].num_found == len(PROMPT)


def test_preempted_and_resumed_elsewhere(model: HashModel, num_needed: int) -> None:
    node = Node(model.layout)
    runs = prefill(make_core(model, node), [(number, *PROMPT) for number in range(6)], GREEDY)
    core = make_core(model, node, num_blocks=2 * num_needed + 1)
    outputs = [run.outputs[0] for run in drive(core, [rest_of(run) for run in runs])]
    assert outputs == [model.oracle((number, *PROMPT), 30) for number in range(6)]


def test_a_failed_request_leaves_nothing_behind(model: HashModel) -> None:
    """Blocks that a sequence has left behind its window are withdrawn with the rest."""
    node = Node(model.layout)
    core = make_core(Spoilt(model.layout, 997), node, 64, ContinuousBatcher(max_step_tokens=32, max_running=4))
    core.add(request(PROMPT, GREEDY))
    events = [event for _ in range(20) for event in core.step().events]
    assert any(isinstance(event, Failed) for event in events)
    assert [key for key in keys() if core.pool.ledger.find(key) is not None] == []
    assert not any(node.directory.records.exists(keys()))


def test_a_tail_is_not_copied_from_a_page_that_was_given_up(model: HashModel, num_needed: int) -> None:
    """A choice that waits for a slot while its sibling decodes past the window computes its tail again."""
    batcher = ContinuousBatcher(max_step_tokens=64, max_running=1)
    sampling = replace(GREEDY, n=2, max_tokens=120)
    runs = drive(
        make_core(model, None, num_needed + 1, batcher), [request(PROMPT, sampling), request(PROMPT[:90], GREEDY)]
    )
    assert list(runs[0].outputs.values()) == [model.oracle(PROMPT, 120)] * 2


@settings(max_examples=16, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_window_any_pool(seed: int) -> None:
    """Rounds of requests on two engines of a node: small pools, choices, guesses; each gets the oracle's tokens."""
    draw = random.Random(seed)
    block_size = draw.choice([1, 2, 4, 16])
    window = draw.choice([1, 2, block_size, block_size + 1, 3 * block_size - 1, 5 * block_size, 50])
    num_sinks = draw.choice([0, 0, 1, block_size, block_size + 1, 40])
    layout = replace(LAYOUT, block_size=block_size, window=window, num_sinks=min(num_sinks, window - 1))
    model = HashModel(layout, draw.choice([3, 997]), max_context_len=512)
    node = Node(model.layout, draw.choice([8, 40, 300])) if draw.random() < 0.8 else None
    most = Window(layout).most_needed
    assert most is not None
    cores = [
        make_core(
            model,
            node,
            draw.randrange(most, 6 * most + 2),
            ContinuousBatcher(draw.choice([8, 33, 500]), draw.choice([1, 2, 5, 8])),
            draw.choice([None, Speculator(NgramProposer())]),
        )
        for _ in range(2)
    ]
    base = [draw.randrange(model.vocab_size) for _ in range(150)]
    for _ in range(3):
        asked = []
        for _ in range(draw.randrange(1, 6)):
            prompt = base[: draw.randrange(1, 150)] + [
                draw.randrange(model.vocab_size) for _ in range(draw.choice([0, 3]))
            ]
            asked.append(
                request(prompt, replace(GREEDY, max_tokens=draw.randrange(1, 80), n=draw.choice([1, 1, 2, 3])))
            )
        for run in drive(draw.choice(cores), asked):
            expected = model.oracle(run.request.prompt_ids, run.request.sampling.max_tokens)
            assert all(output == expected for output in run.outputs.values())


def test_the_start_of_a_prefix_is_evicted_first(model: HashModel) -> None:
    """And the sinks last."""
    core = make_core(model, num_blocks=16)
    serve(core, PROMPT, GREEDY)
    serve(core, tuple(range(500, 580)), GREEDY)
    num_sinks = Window(model.layout).num_sink_blocks
    here = [core.pool.ledger.find(key) is not None for key in keys()[:12]]
    assert here[num_sinks:] == sorted(here[num_sinks:])
    assert 0 < sum(here[num_sinks:]) < 12 - num_sinks
    assert all(here[:num_sinks])
