"""Steps with chunks of prompts as graphs: the tokens of launches, and padding that reaches nothing."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from engine.core import EngineCore
from engine.model.batch import Batch
from engine.model.decoder import Decoder
from engine.model.programs import MAX_CHUNKS, ProgramSize
from engine.schedule.continuous_batcher import ContinuousBatcher
from kernels.triton_backend import TritonBackend
from kv_store.device_pool import DevicePool
from tests.harness.checkpoints import choose_prompt, make_checkpoint
from tests.harness.engines import drive, make_core, request
from tests.simulated_gpu.device import SIM, SimulatedGraph, commands
from tests.simulated_gpu.triton_kernels import triton_kernels
from wire.sampling import SamplingParams

BLOCK_SIZE, NUM_BLOCKS, MAX_RUNNING = 16, 24, 4
SIZES = (ProgramSize(8, NUM_BLOCKS, 64), ProgramSize(8, 64))
LENGTHS = (17, 1, 40)
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with triton_kernels():
        yield


def refuse(*_: object) -> NoReturn:
    raise AssertionError("a step was launched kernel by kernel")


def make_warm_core(folder: Path, max_step_tokens: int) -> EngineCore:
    model = Decoder.load(folder, "float32", SIM, BLOCK_SIZE, TritonBackend())
    core = make_core(model, None, NUM_BLOCKS, ContinuousBatcher(max_step_tokens, MAX_RUNNING))
    assert all(model.prepare(one, core.pool.kv) for one in SIZES)
    return core


def test_chunks_beside_decoding_rows_give_transformers_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks of what 20 tokens leave, alone, with one another, and beside rows that decode."""
    folder = make_checkpoint("llama-gqa", tmp_path / "llama", num_hidden_layers=1)
    chosen = [choose_prompt(folder, length) for length in LENGTHS]
    commands().set_lazy(True)
    core = make_warm_core(folder, 20)
    monkeypatch.setattr(Decoder, "run", refuse)
    runs = drive(core, [request(one.prompt_ids, GREEDY) for one in chosen])
    assert [run.outputs[0] for run in runs] == [list(one.token_ids[: GREEDY.max_tokens]) for one in chosen]


def test_a_graph_is_replayed_once_before_its_first_step_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device uploads a graph at its first replay."""
    num_replays, replay = [0], SimulatedGraph.replay

    def counting(graph: SimulatedGraph) -> None:
        num_replays[0] += 1
        replay(graph)

    monkeypatch.setattr(SimulatedGraph, "replay", counting)
    folder = make_checkpoint("llama-gqa", tmp_path / "llama", num_hidden_layers=1)
    model = Decoder.load(folder, "float32", SIM, BLOCK_SIZE, TritonBackend())
    pool = DevicePool(model.layout, NUM_BLOCKS, SIM)
    pool.kv.data.fill_(3.0)
    assert all(model.prepare(one, pool.kv) for one in SIZES)
    assert num_replays == [len(SIZES)]
    assert torch.all(pool.kv.data.cpu() == 3.0)


def make_batch(decode_lens: Sequence[int], chunk_lens: Sequence[int], first_page: int, seed: int) -> Batch:
    """Makes a step of decoding rows behind so many tokens, and of whole prompts; two pages a sequence."""
    draw, num_decodes = torch.Generator().manual_seed(seed), len(decode_lens)
    lens, num = [*decode_lens, *chunk_lens], [1] * num_decodes + [*chunk_lens]
    positions = torch.cat([torch.arange(end - one, end) for end, one in zip(lens, num, strict=True)])
    tables = first_page + torch.arange(2 * len(lens), dtype=torch.int32).view(-1, 2)
    rows = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(num))
    slots = tables[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = torch.tensor([0, *num]).cumsum(0)
    return Batch(
        token_ids=torch.randint(256, (len(positions),), generator=draw),
        positions=positions,
        slot_mapping=slots,
        block_tables=tables,
        context_lens=torch.tensor(lens, dtype=torch.int32),
        cu_query_lens=starts.int(),
        num_decodes=num_decodes,
        sample_rows=starts[1:] - 1,
    )


def test_padding_changes_no_bit_and_writes_nothing(tmp_path: Path) -> None:
    """A step behind one that filled the graph, whose numbers are in its padding now, and the same step at first."""
    folder = make_checkpoint("llama-gqa", tmp_path / "llama", num_hidden_layers=1)
    small, large = make_batch([9], [5, 17], 0, 1), make_batch([31] * 8, [30, 30], 6, 2)
    found, pages = [], []
    for before in ([], [large]):
        model = Decoder.load(folder, "float32", SIM, BLOCK_SIZE, TritonBackend())
        pool = DevicePool(model.layout, 26, SIM)
        pool.kv.data.zero_()
        assert model.prepare(ProgramSize(8, 4, 64), pool.kv)
        for batch in [*before, small]:
            pool.kv.data.zero_()
            logits = model.forward(batch, pool.kv)
        found.append(logits.cpu())
        pages.append(pool.kv.data.cpu())
    assert model.num_programs == 1
    assert len(found[0]) == 3
    assert found[0].isfinite().all()
    assert torch.equal(*found)
    assert torch.equal(*pages)
    assert pages[0][:6].any()
    assert not pages[0][6:].any()
    launched = model.forward(small.to(SIM), pool.kv).cpu()
    torch.testing.assert_close(found[0], launched, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("decode_lens", "chunk_lens", "fits"),
    [
        ([], [32, 32], True),
        ([1] * 8, [64 // MAX_CHUNKS] * MAX_CHUNKS, True),
        ([1] * 9, [5], False),
        ([], [32, 30, 3], False),
        ([], [2] * (MAX_CHUNKS + 1), False),
        ([1], [], True),
    ],
)
def test_a_size_has_room_for_a_batch(decode_lens: list[int], chunk_lens: list[int], fits: bool) -> None:
    batch = make_batch(decode_lens, chunk_lens, 0, 0)
    assert ProgramSize(8, 4, 64).fits(batch) is fits
    assert not ProgramSize(8, 1, 64).fits(batch)
