"""Decode steps captured as CUDA graphs, against the same steps launch by launch; and rows that know no batch."""

from pathlib import Path

import pytest
import torch

from engine.model.decoder import Decoder
from engine.schedule.continuous_batcher import ContinuousBatcher
from engine.speculation.draft_proposer import DraftProposer
from engine.speculation.speculator import Speculator
from engine.warm.warming import limits_of, make_programs
from kernels.accelerator import CudaGraph
from kernels.attention.decode import paged_decode_attention
from kernels.attention.prompts import paged_prefill_attention
from kernels.quantized.device_layout import CodedWeight
from kernels.triton_backend import ExactBackend
from tests.harness.checkpoints import choose_prompt, make_checkpoint
from tests.harness.engines import drive, make_core, request
from tests.harness.oracle_proposer import oracle_drafts
from tests.kernels.paged_batch import Heads, make_paged_batch
from tests.kernels.quantized_matrices import DRAWS
from wire.sampling import SamplingParams

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda")
LENGTHS = (1, 16, 17, 100, 700, 33, 250, 90, 14, 500)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_give_the_tokens_of_their_launches(
    dtype: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come and go, so that graphs of several sizes have rows that they do not fill."""
    folder = make_checkpoint("llama-gqa", tmp_path / "llama")
    prompts = [choose_prompt(folder, length).prompt_ids for length in LENGTHS]

    def run() -> list[list[int]]:
        model = Decoder.load(folder, dtype, DEVICE, 16, kv_dtype=kv_dtype)
        lengths = [GREEDY.max_tokens or 0] * len(prompts)
        asked = [
            request(prompt, SamplingParams(temperature=0, max_tokens=length - 3 * place, ignore_eos=True))
            for place, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        return [one.outputs[0] for one in drive(make_core(model, num_blocks=512), asked)]

    captured = run()
    monkeypatch.setattr(Decoder, "_program_for", lambda *_: None)
    launched = run()
    if dtype == "float32":
        assert captured == launched
    else:  # products of more rows may round otherwise
        equal = sum(one == other for one, other in zip(captured, launched, strict=True))
        assert equal >= len(prompts) // 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_of_chunks_give_the_tokens_of_their_launches(dtype: str, tmp_path: Path) -> None:
    """Prompts in chunks of what 128 tokens leave, beside rows that decode; every step is a graph."""
    folder = make_checkpoint("llama-gqa", tmp_path / "llama")
    asked = [choose_prompt(folder, length).prompt_ids for length in LENGTHS]

    def run(is_captured: bool) -> list[list[int]]:
        model = Decoder.load(folder, dtype, DEVICE, 16)
        core = make_core(model, None, 512, ContinuousBatcher(max_step_tokens=128, max_running=8))
        with pytest.MonkeyPatch.context() as patch:
            if is_captured:
                assert make_programs(model, core.pool.kv, limits_of(model, core.pool.kv, 8, 128)) == []
                patch.setattr(Decoder, "run", None)
            return [one.outputs[0] for one in drive(core, [request(prompt, GREEDY) for prompt in asked])]

    captured, launched = run(True), run(False)
    if dtype == "float32":
        assert captured == launched
    else:  # products of more rows may round otherwise
        assert sum(one == other for one, other in zip(captured, launched, strict=True)) >= len(asked) // 2


def test_steps_with_guesses_beside_graphs_of_as_many_rows(tmp_path: Path) -> None:
    """A third of the guesses are wrong; the tokens are those of an engine without any."""
    folder = make_checkpoint("llama-gqa", tmp_path / "llama")
    prompts = [choose_prompt(folder, 17).prompt_ids * 5, choose_prompt(folder, 33).prompt_ids]

    def run(speculator: Speculator | None) -> list[list[int]]:
        core = make_core(Decoder.load(folder, "float32", DEVICE, 16), speculator=speculator)
        runs = [one.outputs[0] for one in drive(core, [request(prompt, GREEDY) for prompt in prompts])]
        assert speculator is None or core.stats().num_guessed_tokens > 0
        return runs

    plain = run(None)
    assert run(oracle_drafts({prompt: [output] for prompt, output in zip(prompts, plain, strict=True)}, 0.3)) == plain


def test_a_draft_model_guesses_on_a_gpu_too(tmp_path: Path) -> None:
    """A draft with the target's own weights guesses right."""
    model = Decoder.load(make_checkpoint("llama-gqa", tmp_path / "llama"), "float32", DEVICE, 16)
    prompts = [choose_prompt(tmp_path / "llama", length).prompt_ids for length in (17, 33)]
    proposer = DraftProposer(model, 64)
    core = make_core(model, speculator=Speculator(proposer))
    plain = drive(make_core(model), [request(prompt, GREEDY) for prompt in prompts])
    guessed = drive(core, [request(prompt, GREEDY) for prompt in prompts])
    assert [one.outputs for one in guessed] == [one.outputs for one in plain]
    assert core.stats().num_accepted_tokens > 0


def test_a_capture_that_fails_leaves_nothing_behind() -> None:
    """Neither its stream nor the generator's state, without which earlier graphs cannot be replayed."""
    values, stream, made = torch.ones(4, device=DEVICE), torch.cuda.current_stream(), list[torch.Tensor]()
    before, after = CudaGraph(DEVICE), CudaGraph(DEVICE)
    before.capture(lambda: made.append(values * 2))
    with pytest.raises(RuntimeError):
        CudaGraph(DEVICE).capture(lambda: made.append(values * values.sum().item()))
    assert torch.cuda.current_stream() == stream
    assert torch.randn(3, device=DEVICE).isfinite().all()
    after.capture(lambda: made.append(values * 3))
    for graph in (before, after):
        graph.replay()
    assert [one.tolist() for one in made] == [[2.0] * 4, [3.0] * 4]


def test_a_graph_is_captured_after_all_others_have_gone_and_left_a_result() -> None:
    values = torch.ones(4, device=DEVICE)

    def double() -> torch.Tensor:
        graph, made = CudaGraph(DEVICE), list[torch.Tensor]()
        graph.capture(lambda: made.append(values * 2))
        graph.replay()
        torch.cuda.synchronize()
        return made[0]

    assert [one.tolist() for one in (double(), double())] == [[2.0] * 4] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_decoding_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    lens = [1, 100, 128, 129, 1000, 5000, 20_000]
    batch = make_paged_batch(Heads(32, 8, 128), lens, 16, dtype, DEVICE)
    query, variant = batch.random_query(len(lens)), batch.variant()
    together = paged_decode_attention(query, batch.pages, batch.block_tables, batch.context_lens, variant)
    for row, length in enumerate(lens):
        one = slice(row, row + 1)
        table = batch.block_tables[one, : -(-length // 16)]
        alone = paged_decode_attention(query[one], batch.pages, table, batch.context_lens[one], variant)
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_of_a_prompt_has_the_same_bits_in_any_chunk(dtype: torch.dtype) -> None:
    length = 700
    batch = make_paged_batch(Heads(32, 8, 128), [length], 16, dtype, DEVICE)
    query, variant = batch.random_query(length), batch.variant()

    def attend(start: int, end: int) -> torch.Tensor:
        lens = torch.tensor([end], dtype=torch.int32, device=DEVICE)
        starts = torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE)
        return paged_prefill_attention(query[start:end], batch.pages, batch.block_tables, lens, starts, variant)

    whole = attend(0, length)
    for start, end in [(0, 1), (0, 333), (333, 340), (340, 341), (341, 700)]:
        assert torch.equal(attend(start, end), whole[start:end])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q5_1", "Q6_K", "Q8_0", "FP8 of blocks"])
def test_a_row_of_a_packed_product_has_the_same_bits_among_any_number_of_rows(name: str) -> None:
    """The depth is cut into splits; few, some and many rows have tiles of their own."""
    backend = ExactBackend()
    weight = backend.pack_codes([DRAWS[name](1000, 4096).to(DEVICE)], torch.bfloat16)
    assert isinstance(weight, CodedWeight)
    states = torch.randn(600, 4096, device=DEVICE).bfloat16()
    together = backend.linear(states, weight, None)
    for num_rows in (1, 2, 16, 17, 64, 65, 129):
        assert torch.equal(backend.linear(states[:num_rows], weight, None), together[:num_rows])
