"""Products of one order on a device: bits of a row alone and among others, in graphs, on two streams, in an engine."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.core import EngineCore
from engine.model.decoder import Decoder
from kernels.accelerator import CudaGraph
from kernels.products import ordered
from kernels.products.ordered import Counters
from kernels.triton_backend import ExactBackend
from tests.harness.checkpoints import choose_prompt, make_checkpoint
from tests.harness.engines import drive, make_core, request, rest_of
from wire.sampling import SamplingParams

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda")
SHAPES_8B = ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336))
SHAPES_135M = ((960, 576), (576, 576), (3072, 576), (576, 1536))
NUM_ROWS = (1, 2, 3, 16, 17, 64, 65, 128, 129, 512, 513, 2048)
MOST_ROWS = 4096
LENGTHS = (1, 16, 17, 100, 700, 33, 250, 90)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=48, ignore_eos=True)


def draw(dtype: torch.dtype, num_rows: int, columns: int, depth: int) -> tuple[Tensor, Tensor]:
    states = torch.randn(num_rows, depth, device=DEVICE, dtype=dtype)
    return states, torch.randn(columns, depth, device=DEVICE, dtype=dtype) * depth**-0.5


def multiply(states: Tensor, matrix: Tensor, counters: Counters) -> Tensor:
    return ordered.linear(states, matrix, None, None, states.new_empty(len(states), len(matrix)), counters)


@pytest.mark.parametrize(
    ("columns", "depth", "dtype"),
    [
        *((*shape, torch.bfloat16) for shape in (*SHAPES_8B, *SHAPES_135M)),
        (4096, 14_336, torch.float16),
        (1000, 4001, torch.bfloat16),
        *((*shape, torch.float32) for shape in (SHAPES_8B[1], SHAPES_135M[3])),
    ],
)
def test_a_row_has_the_same_bits_alone_and_among_others(columns: int, depth: int, dtype: torch.dtype) -> None:
    """Also the last rows, in tiles of their own; 4,001 numbers are no descriptor's row."""
    (states, matrix), counters = draw(dtype, MOST_ROWS, columns, depth), Counters()
    together = multiply(states, matrix, counters)
    torch.testing.assert_close(together[:64].double(), states[:64].double() @ matrix.double().T, rtol=2e-2, atol=2e-2)
    for num_rows in NUM_ROWS:
        assert torch.equal(multiply(states[:num_rows], matrix, counters), together[:num_rows]), num_rows
        assert torch.equal(multiply(states[-num_rows:], matrix, counters), together[-num_rows:]), num_rows
    assert not counters.here(states.device).any()


@pytest.mark.parametrize("num_rows", [1, 64, 128])
def test_graphs_replay_the_same_bits(num_rows: int) -> None:
    (states, matrix), counters, made = draw(torch.bfloat16, num_rows, 4096, 14_336), Counters(), list[Tensor]()
    expected, graph = multiply(states, matrix, counters), CudaGraph(DEVICE)
    graph.capture(lambda: made.append(multiply(states, matrix, counters)))
    for _ in range(50):
        made[0].fill_(torch.nan)
        graph.replay()
        assert torch.equal(made[0], expected)


def test_two_streams_at_once_share_no_sums() -> None:
    (states, matrix), counters = draw(torch.bfloat16, 64, 4096, 14_336), Counters()
    halves = states, states.flip(0).contiguous()
    expected = [multiply(one, matrix, counters) for one in halves]
    streams, found = [torch.cuda.Stream() for _ in halves], [list[Tensor]() for _ in halves]
    torch.cuda.synchronize()
    for _ in range(40):
        for one, stream, outs in zip(halves, streams, found, strict=True):
            with torch.cuda.stream(stream):
                outs.append(multiply(one, matrix, counters))
    torch.cuda.synchronize()
    for outs, right in zip(found, expected, strict=True):
        assert all(torch.equal(one, right) for one in outs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose last matrix has four splits."""
    return make_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama"), intermediate_size=4096)


def load(folder: Path, dtype: str) -> EngineCore:
    return make_core(Decoder.load(folder, dtype, DEVICE, 16, ExactBackend()), num_blocks=4096)


def run(core: EngineCore, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [one.outputs[0] for one in drive(core, [request(one, SEEDED) for one in prompts])]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_sequence_alone_and_among_64_has_the_same_tokens(folder: Path, dtype: str) -> None:
    """Drawn tokens, so that logits that differ by a bit show; and again once KV of a prompt is a hit."""
    prompts = [choose_prompt(folder, LENGTHS[place % len(LENGTHS)]).prompt_ids for place in range(64)]
    prompts = [(*prompt, place) for place, prompt in enumerate(prompts)]
    together, core = run(load(folder, dtype), prompts), load(folder, dtype)
    for place in (0, 3, 4, 20, 63):
        for _ in range(2):
            assert run(core, [prompts[place]]) == [together[place]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_answer_that_goes_on_elsewhere_has_the_same_tokens(folder: Path, dtype: str) -> None:
    """The other engine computes the prompt and what was emitted, beside other requests, and goes on."""
    prompts = [choose_prompt(folder, length).prompt_ids for length in LENGTHS]
    runs = drive(load(folder, dtype), [request(one, SEEDED) for one in prompts])
    for num_emitted in (1, 2, 17, 40):
        cut = [replace(one, outputs={0: one.outputs[0][:num_emitted]}, ended=set()) for one in runs]
        resumed = drive(load(folder, dtype), [rest_of(one) for one in cut])
        assert [one.outputs for one in resumed] == [one.outputs for one in runs]
