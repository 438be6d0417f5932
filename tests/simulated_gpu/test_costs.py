"""Waits, launches and copies of steps and of hand-offs, counted."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core import EngineCore
from engine.events import Fetched
from engine.grammar.grammars import Grammars
from engine.model.decoder import Decoder
from engine.request import BlocksAhead, EngineRequest
from engine.schedule.continuous_batcher import ContinuousBatcher
from engine.warm.warming import limits_of, make_programs
from kernels.triton_backend import TritonBackend
from kv_store.device_pool import DevicePool
from kv_store.node import arena
from kv_store.node_store import NodeStore
from kv_store.transfers import Fetch, ThreadTransfers, WriteThrough
from prefill_worker.behaviour import PrefillBatcher
from tests.harness.checkpoints import choose_prompt, make_checkpoint
from tests.harness.engines import ROOT, drive, hand_off_of, make_core, request, rest_of, serve
from tests.harness.node import Node
from tests.kv_store.names import LAYOUT, names_of
from tests.simulated_gpu.device import SIM, Counts, commands, counts, exposed
from tests.simulated_gpu.triton_kernels import triton_kernels
from text.byte_tokenizer import NUM_BYTES, ByteTokenizer
from wire.block_names import cover
from wire.ids import PageId
from wire.sampling import FormatKind, ResponseFormat, SamplingParams
from wire.tier import Tier

NUM_BLOCKS = 256
NUM_LAYERS = 2
NUM_DRAWN = 3
DRAWN = [
    SamplingParams(max_tokens=NUM_DRAWN, ignore_eos=True, **settings)
    for settings in (
        {"temperature": 0},
        {"temperature": 0.9, "seed": 1},
        {"temperature": 1.2, "seed": 2, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1},
        {"temperature": 1, "seed": 4, "logprobs": 3},
        {"temperature": 0, "logprobs": 5, "logit_bias": ((5, 2.0), (7, -100.0)), "min_tokens": 2},
    )
]
VOCAB_SIZE = 300
LAUNCHES_OF_SAMPLING = 1
LAUNCHES_OF_INPUT = 1
"""Of the tokens that a step ahead takes."""
LAUNCHES_OF_A_LAYER = 9
LAUNCHES_BESIDE_LAYERS = 7
"""Of embedding, angles (2), the last row, its norm, head and sampling."""
NUM_EXPOSED = 4
"""Blocks of a prompt that is handed over."""
LAUNCHES_BEHIND = 4
"""Of the last row, its norm, the head and the choice of a token, behind the last product of the last layer."""
BYTES_OF_A_TOKEN = 8


def costs_of_steps(core: EngineCore, asked: Sequence[EngineRequest]) -> Iterator[Counts]:
    """Runs requests to their end; yields what each step has asked of the device, steps without a launch left out."""
    for one in asked:
        core.add(one)
    while core.has_requests:
        before = counts()
        core.step()
        if (asked_for := counts() - before).launches:
            yield asked_for


def test_steps_wait_once(tmp_path: Path) -> None:
    """A chunk, which is a whole prompt here, reads its first token, a decoding step its next one.

    The next decoding step is launched before that: but for the last, each returns while the device is at the next one.
    """
    folder = make_checkpoint("llama-gqa", tmp_path / "llama")
    with triton_kernels():
        core = make_core(Decoder.load(folder, "float32", SIM, 16, TritonBackend()))
        sampling = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        serve(core, choose_prompt(folder, 1).prompt_ids, sampling)  # makes angles, captures a graph
        commands().set_lazy(True)
        asked, is_done = [], []
        for one in costs_of_steps(core, [request(choose_prompt(folder, 17).prompt_ids, sampling)]):
            asked.append(one)
            is_done.append(torch.accelerator.current_stream(SIM).query())
    chunk, first, *ahead, last = asked
    assert is_done == [True, *[False] * (len(ahead) + 1), True]
    assert (chunk.synchronizations, chunk.to_host) == (1, 1)
    assert chunk.launches == LAUNCHES_OF_A_LAYER * NUM_LAYERS + LAUNCHES_BESIDE_LAYERS
    assert len(ahead) == 2
    for one in ahead:
        assert (one.synchronizations, one.to_device, one.within, one.to_host) == (1, 1, 1, 1)
        assert one.launches == 1 + LAUNCHES_OF_SAMPLING + LAUNCHES_OF_INPUT
    assert first.launches - last.launches == 1 + ahead[0].launches - LAUNCHES_OF_SAMPLING
    assert (last.synchronizations, last.to_device, last.launches) == (1, 0, LAUNCHES_OF_SAMPLING)


def test_a_step_with_chunks_is_one_launch(tmp_path: Path) -> None:
    """A prompt in two chunks, alone at first and beside a row that decodes: the columns of a step go up in one copy."""
    folder = make_checkpoint("llama-gqa", tmp_path / "llama")
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with triton_kernels():
        model = Decoder.load(folder, "float32", SIM, 16, TritonBackend())
        core = make_core(model, batcher=ContinuousBatcher(max_step_tokens=16, max_running=4))
        assert make_programs(model, core.pool.kv, limits_of(model, core.pool.kv, 4, 16)) == []
        prompts = [choose_prompt(folder, length).prompt_ids for length in (1, 17)]
        asked = [*costs_of_steps(core, [request(one, sampling) for one in prompts])]
    assert [one.launches for one in asked[:2]] == [1 + LAUNCHES_OF_SAMPLING] * 2
    assert {(one.synchronizations, one.to_device, one.within, one.to_host) for one in asked[:2]} == {(1, 1, 0, 1)}


def test_steps_that_draw_wait_once(tmp_path: Path) -> None:
    """One read brings all tokens and log-probabilities, whatever the rows ask for; a plain one is among them."""
    folder = make_checkpoint("llama-gqa", tmp_path / "llama", num_hidden_layers=1)
    with triton_kernels():
        core = make_core(Decoder.load(folder, "float32", SIM, 16, TritonBackend()))
        prompts = [choose_prompt(folder, length).prompt_ids for length in range(2, 2 + len(DRAWN))]
        serve(core, prompts[0], DRAWN[0])  # makes angles, captures a graph
        requests = [request(one, settings) for one, settings in zip(prompts, DRAWN, strict=True)]
        ran = [*costs_of_steps(core, requests)]
    assert len(ran) >= NUM_DRAWN
    assert {(one.synchronizations, one.to_host, one.synchronous) for one in ran} == {(1, 1, 0)}


def test_steps_with_grammars_wait_once(tmp_path: Path) -> None:
    """Masks go up from pinned memory, and are applied on the device: to all rows, and to some of them."""
    folder = make_checkpoint("llama-gqa", tmp_path / "llama", vocab_size=VOCAB_SIZE, num_hidden_layers=1)
    form = ResponseFormat(FormatKind.REGEX, "[a-d]+")
    greedy = SamplingParams(temperature=0, max_tokens=3, response_format=form)
    seeded = SamplingParams(temperature=1, seed=3, max_tokens=3, response_format=form, logprobs=2)
    grammars = Grammars(lambda: ByteTokenizer().definition, VOCAB_SIZE, (NUM_BYTES,))
    with triton_kernels():
        core = make_core(Decoder.load(folder, "float32", SIM, 16, TritonBackend()))
        serve(core, [5, 6], DRAWN[0])  # makes angles, captures a graph
        for settings in ([greedy, seeded], [greedy, DRAWN[0]]):
            asked = [*costs_of_steps(core, [grammars.prepare(request([1, 2], one)) for one in settings])]
            assert len(asked) >= 3
            assert {(one.synchronizations, one.to_host, one.synchronous) for one in asked} == {(1, 1, 0)}


def test_chunks_with_scores_wait_once(tmp_path: Path) -> None:
    """The scores of prompts come with the token ids, in one read; a chunk's, too, that chooses none."""
    folder = make_checkpoint("llama-gqa", tmp_path / "llama", num_hidden_layers=1)
    scored = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=3, logprobs=1)
    with triton_kernels():
        model = Decoder.load(folder, "float32", SIM, 16, TritonBackend())
        core = make_core(model, batcher=ContinuousBatcher(max_step_tokens=16, max_running=4))
        serve(core, choose_prompt(folder, 2).prompt_ids, DRAWN[0])  # makes angles, captures a graph
        one = replace(request(choose_prompt(folder, 20).prompt_ids, scored), num_scored=1)
        asked = [*costs_of_steps(core, [one])]
    assert len(asked) >= 3
    assert {(one.synchronizations, one.to_host, one.synchronous) for one in asked} == {(1, 1, 0)}


def test_a_hand_off_of_many_blocks_waits_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "GPU_CONTROLS", (Path("/dev/null"),))
    names, pages = names_of(NUM_BLOCKS * LAYOUT.block_size)[:NUM_BLOCKS], [PageId(one) for one in range(NUM_BLOCKS)]
    node = Node(LAYOUT)
    prefill, decode = (DevicePool(LAYOUT, NUM_BLOCKS, torch.device("sim", index)) for index in range(2))
    before = counts()
    node.transfers(prefill).begin(WriteThrough(names, pages))
    fetching = node.transfers(decode)
    fetching.begin(Fetch(names, pages))
    (fetched,) = fetching.poll()
    asked = counts() - before
    assert fetched.reading.blocks == [Tier.HOST] * NUM_BLOCKS
    assert (asked.to_host, asked.to_device) == (NUM_BLOCKS, NUM_BLOCKS)
    assert asked.synchronizations == 2


def test_copies_wait_for_no_work_behind_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that is launched before its predecessor's blocks are copied does not hold them up."""
    monkeypatch.setattr(arena, "GPU_CONTROLS", (Path("/dev/null"),))
    names, pages = names_of(2 * LAYOUT.block_size)[:2], [PageId(0), PageId(1)]
    pool, node = DevicePool(LAYOUT, 2, SIM), Node(LAYOUT)
    transfers = ThreadTransfers(NodeStore(LAYOUT, node.arena, node.directory, [], pool), lambda: None)
    for place in range(2):
        pool.page_bytes(pages[place]).fill_(place)
        commands().mark(0)
        transfers.begin(WriteThrough(names[place : place + 1], pages[place : place + 1]))
    transfers.run_one()
    assert exposed().bytes_to_host == 0
    transfers.run_one()
    assert exposed().bytes_to_host == LAYOUT.payload_bytes


@pytest.mark.parametrize("num_in_tail", [0, 5])
@pytest.mark.parametrize(("least_tokens", "num_hidden"), [(None, 0), (16, 3)])
def test_work_behind_the_last_product_of_a_prompt_and_its_hand_off_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least_tokens: int | None, num_hidden: int, num_in_tail: int
) -> None:
    """Blocks of all chunks but the last are published and read by the other device before it."""
    monkeypatch.setattr(arena, "GPU_CONTROLS", (Path("/dev/null"),))
    linear, folder = TritonBackend.linear, make_checkpoint("llama-gqa", tmp_path / "llama")

    def marked(backend: TritonBackend, states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = linear(backend, states, *args, **kwargs)
        if states.device.index == 0 and len(args) > 2:  # a product that is added to states ends half a layer
            commands().mark(0)
        return rows

    monkeypatch.setattr(TritonBackend, "linear", marked)
    sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    chosen = choose_prompt(folder, NUM_EXPOSED * 16 + num_in_tail)
    names, num_last = cover(ROOT, chosen.prompt_ids, 16), NUM_EXPOSED - num_hidden + (num_in_tail > 0)
    with triton_kernels():
        models = [Decoder.load(folder, "float32", torch.device("sim", one), 16, TritonBackend()) for one in range(2)]
        block_bytes, node = models[0].layout.payload_bytes, Node(models[0].layout)
        batcher = PrefillBatcher(least_chunk_tokens=least_tokens)
        core, decode = make_core(models[0], node, batcher=batcher), make_core(models[1], node)

        def pass_on(num_blocks: int) -> None:
            with torch.accelerator.device_index(1):
                decode.prefetch(BlocksAhead(attempt_id=asked.attempt_id, names=names[:num_blocks]))

        asked = replace(hand_off_of(request(chosen.prompt_ids, sampling)), on_stored=pass_on)
        [run] = drive(core, [asked])
        published = exposed()
        decode.add(rest_of(run))
        with torch.accelerator.device_index(1):
            while not any(isinstance(event, Fetched) for event in decode.step().events):
                pass
        fetched = exposed()
    assert published.bytes_to_host <= num_last * block_bytes + BYTES_OF_A_TOKEN
    assert published.bytes_to_device == 0
    assert published.launches <= LAUNCHES_BEHIND
    assert published.waits <= 2
    assert fetched.bytes_to_host == published.bytes_to_host
    assert fetched.bytes_to_device <= num_last * block_bytes
    assert fetched.launches <= published.launches + 1
    assert fetched.waits <= 3
