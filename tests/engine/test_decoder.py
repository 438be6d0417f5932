"""The decoder over paged KV gives, token by token, what transformers gives."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.model import feed_forward
from engine.model.decoder import Decoder, check_kv_dtype
from engine.model.programs import RECORDED_CHUNKS
from kernels.backend import KVPages
from kernels.cpu.backend import CpuBackend
from kernels.cpu.library import best_isa
from kernels.torch_backend import TorchBackend
from kernels.triton_backend import TritonBackend
from tests.harness.checkpoints import (
    ARCHITECTURES,
    SINKS,
    VOCAB_SIZE,
    choose_prompt,
    make_checkpoint,
    oracle_generate,
    oracle_logits,
    shard,
)
from tests.harness.engines import make_core, serve
from tests.harness.model_alone import PagedRun, generate, logits_of
from tests.kernels.backends import make_backend
from wire.errors import ConfigError
from wire.layout import KV_DTYPES, Window
from wire.sampling import SamplingParams

LENGTHS = (1, 15, 16, 17, 100, 700)
NUM_TOKENS = 64
CPU = torch.device("cpu")

Checkpoints = Callable[[str], Path]


def load(folder: Path, dtype: str | None = None) -> Decoder:
    return Decoder.load(folder, dtype, CPU, block_size=16)


@pytest.mark.parametrize("chunk_len", [700, 37])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_batch_gives_the_tokens_of_transformers(checkpoint: Checkpoints, arch: str, chunk_len: int) -> None:
    chosen = [choose_prompt(checkpoint(arch), length) for length in LENGTHS]
    others = torch.randint(VOCAB_SIZE, (16 - len(chosen), 40), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [one.prompt_ids for one in chosen] + others
    outputs = generate(load(checkpoint(arch)), prompts, NUM_TOKENS, chunk_len)
    assert outputs[: len(chosen)] == [list(one.token_ids) for one in chosen]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_prompt_alone_gives_the_tokens_of_transformers(checkpoint: Checkpoints, arch: str) -> None:
    model = load(checkpoint(arch))
    for length in LENGTHS:
        chosen = choose_prompt(checkpoint(arch), length)
        assert generate(model, [chosen.prompt_ids], NUM_TOKENS) == [list(chosen.token_ids)]


@pytest.mark.pairs(triton=0)
@pytest.mark.parametrize(
    ("kernels", "chunk_len"), [("torch", 700), ("torch", 37), (best_isa(), 700), (best_isa(), 37), ("triton", 700)]
)
@pytest.mark.parametrize(("arch", "kv_policy"), SINKS)
def test_sinks_give_the_tokens_of_their_rule(
    checkpoint: Checkpoints, arch: str, kv_policy: str, kernels: str, chunk_len: int
) -> None:
    """In a batch and alone, past windows that are shorter than a chunk; far rows have other tokens than in full."""
    folder = checkpoint(arch)
    backend = TritonBackend() if kernels == "triton" else make_backend(kernels)
    model = Decoder.load(folder, "float32", CPU, 16, backend, kv_policy=kv_policy)
    # Triton's interpreter takes a minute for 700 rows. With 14 tokens after 100 the window leaves a block behind.
    lengths, num_tokens = (LENGTHS[-3:-1], 14) if kernels == "triton" else (LENGTHS, 24)
    chosen = [choose_prompt(folder, length, num_tokens, kv_policy=kv_policy) for length in lengths]
    expected = [list(one.token_ids) for one in chosen]
    assert generate(model, [one.prompt_ids for one in chosen], num_tokens, chunk_len) == expected
    assert generate(model, [chosen[-2].prompt_ids], num_tokens, chunk_len) == expected[-2:-1]
    [in_full] = oracle_generate(folder, [chosen[-1].prompt_ids], num_tokens)
    assert list(in_full.token_ids) != expected[-1]


@pytest.mark.parametrize("kernels", ["torch", best_isa()])
def test_positions_far_beyond_the_models_own(checkpoint: Checkpoints, kernels: str) -> None:
    """2,500 tokens in constant memory of a model of 1,024; each is the likeliest of the rule over all before it."""
    folder, kv_policy = checkpoint("qwen3"), "sinks=4+60"
    num_tokens = 2500 if kernels != "torch" else 1200
    model = Decoder.load(folder, "float32", CPU, 16, make_backend(kernels), kv_policy=kv_policy)
    assert (model.max_context_len, Window(model.layout).most_needed) == (1 << 20, 6)
    prompt = choose_prompt(folder, 17).prompt_ids
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    output = serve(make_core(model, num_blocks=6), prompt, sampling).outputs[0]
    best = oracle_logits(folder, [*prompt, *output[:-1]], kv_policy)[len(prompt) - 1 :].topk(2)
    is_sure = best.values[:, 0] - best.values[:, 1] > 0.01
    assert is_sure.float().mean() > 0.9
    assert torch.equal(best.indices[is_sure, 0], torch.tensor(output)[is_sure])


@pytest.mark.parametrize(
    ("arch", "kv_policy", "kv_dtype", "message"),
    [
        ("mistral-window", "sinks=4+60", "auto", r"kv_policy sinks=4\+60: the model has windows of its own"),
        ("qwen2", "sinks=4+60", "auto", "windows of its own"),
        ("qwen3", "sinks=4+1021", "auto", "more than the model's context of 1024 tokens"),
        ("qwen3", "sinks=4+15", "auto", "a window of 15 tokens is shorter than a block of 16"),
        ("qwen3", "sinks=4", "auto", "kv_policy 'sinks=4': known are"),
        ("qwen3", "sinks=4+60", "int4", "int4"),
    ],
)
def test_sinks_that_do_not_suit_the_model_are_refused(
    checkpoint: Checkpoints, arch: str, kv_policy: str, kv_dtype: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Decoder.load(checkpoint(arch), None, CPU, 16, kv_dtype=kv_dtype, kv_policy=kv_policy)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_zeroing_or_swapping_one_block_changes_the_output(checkpoint: Checkpoints, arch: str) -> None:
    """What makes the tests above worth anything: they would notice."""
    model = load(checkpoint(arch))
    chosen = [choose_prompt(checkpoint(arch), length) for length in (100, 700)]
    for corrupt in (zero_block, swap_blocks):
        run = PagedRun(model, [one.prompt_ids for one in chosen], NUM_TOKENS)
        run.prefill(700)
        corrupt(run)
        outputs = zip(run.decode(NUM_TOKENS), chosen, strict=True)
        assert [output == list(one.token_ids) for output, one in outputs] == [False, corrupt is zero_block]


def zero_block(run: PagedRun) -> None:
    run.kv[run.rows[0].pages[4]] = 0


def swap_blocks(run: PagedRun) -> None:
    """Of two prompts: attention over two blocks of one prompt would be the same in any order."""
    first, second = run.rows[0].pages[4], run.rows[1].pages[42]
    run.kv[[first, second]] = run.kv[[second, first]]


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_running_ahead_gives_the_tokens_of_step_by_step(checkpoint: Checkpoints, backend: str) -> None:
    """Sequences begin with one and with several known tokens, and run over the ends of pages."""
    model = Decoder.load(checkpoint("llama-gqa"), "float32", CPU, 16, make_backend(backend))
    prompts = [choose_prompt(checkpoint("llama-gqa"), length).prompt_ids for length in (15, 17, 100)]
    run = PagedRun(model, prompts, 60)
    run.prefill(700)
    known = [list(row.tokens) for row in run.rows]
    expected = [output[1:] for output in run.decode(41)]
    for row, tokens, num_again in zip(run.rows, known, (1, 1, 4), strict=True):
        row.tokens, row.num_computed = tokens, len(tokens) - num_again
    batch = run.batch([(row, len(row.tokens) - row.num_computed) for row in run.rows])
    every = replace(batch, sample_rows=torch.arange(len(batch.token_ids)))
    for one in (batch, every):
        drawn = model.decode_greedily(one, KVPages(run.kv, run.scales), 40)
        assert drawn.T.tolist() == expected


def test_sharded_weights_are_the_same_weights(checkpoint: Checkpoints, tmp_path: Path) -> None:
    chosen = choose_prompt(checkpoint("llama-gqa"), 17)
    folder = shard(checkpoint("llama-gqa"), tmp_path / "sharded")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert generate(load(folder), [chosen.prompt_ids], NUM_TOKENS) == [list(chosen.token_ids)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close_to_float32(checkpoint: Checkpoints, dtype: str) -> None:
    folder = checkpoint("qwen3")
    prompt = choose_prompt(folder, 100).prompt_ids
    exact, rounded = (first_logits(load(folder, name), prompt) for name in ("float32", dtype))
    assert exact.dtype == rounded.dtype == torch.float32
    assert 0 < (exact - rounded).abs().max() < 0.1 * exact.abs().max()


def first_logits(model: Decoder, prompt: tuple[int, ...]) -> torch.Tensor:
    run = PagedRun(model, [prompt], 1)
    return model.forward(run.batch([(run.rows[0], len(prompt))]), KVPages(run.kv))


@pytest.mark.parametrize("kernels", ["torch", best_isa()])
@pytest.mark.parametrize(("kv_dtype", "most"), [("int8", 0.02), ("fp8", 0.1)])
def test_quantized_kv_stays_close_to_transformers(
    checkpoint: Checkpoints, kernels: str, kv_dtype: str, most: float
) -> None:
    """Logits of a whole prompt, which reads its own tokens quantized, and of one more token over it."""
    folder = checkpoint("qwen3")
    prompt = choose_prompt(folder, 100).prompt_ids
    with torch.inference_mode():
        dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(torch.tensor([prompt])).logits
    model = Decoder.load(folder, "float32", CPU, 16, make_backend(kernels), kv_dtype)
    run = PagedRun(model, [prompt], 1)
    for end in (len(prompt) - 1, len(prompt)):
        run.rows[0].tokens = list(prompt[:end])
        batch = run.batch([(run.rows[0], end - run.rows[0].num_computed)])
        logits = model.forward(batch, KVPages(run.kv, run.scales))
        assert 0 < (logits[0] - dense[0, end - 1]).abs().max() < most * dense[0].abs().max()
        run.rows[0].num_computed = end


def test_an_unknown_kv_dtype_is_refused(checkpoint: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="unknown KV dtype int3; known: auto, int8, fp8"):
        Decoder.load(checkpoint("qwen3"), None, CPU, 16, kv_dtype="int3")


def set_capability(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None = None) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_kv_in_fp8_is_refused_by_gpus_that_cannot_convert_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    set_capability(monkeypatch, capability)
    with pytest.raises(ConfigError, match=r"model.kv_dtype: fp8 wants .* 8.9 or later, and cuda:1 has 8.*set int8"):
        check_kv_dtype(torch.device("cuda:1"), "fp8")
    for kept in set(KV_DTYPES) - {"fp8"}:
        check_kv_dtype(torch.device("cuda:1"), kept)


@pytest.mark.parametrize(("capability", "hip"), [((8, 9), None), ((9, 0), None), ((9, 4), "6.4")])
def test_kv_in_fp8_is_served_by_later_gpus_and_amds(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None
) -> None:
    set_capability(monkeypatch, capability, hip)
    check_kv_dtype(torch.device("cuda"), "fp8")
    check_kv_dtype(CPU, "fp8")


def test_kv_in_fp8_is_refused_before_weights_are_loaded(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_capability(monkeypatch, (8, 0))
    with pytest.raises(ConfigError, match="fp8 wants"):
        Decoder.load(checkpoint("qwen3"), None, torch.device("cuda"), 16, TritonBackend(), kv_dtype="fp8")


def test_dtype_is_float32_on_a_cpu_unless_told_otherwise(tmp_path: Path) -> None:
    folder = make_checkpoint("llama-gqa", tmp_path, dtype="bfloat16")
    assert load(folder).layout.dtype == "float32"
    assert load(folder, "bfloat16").layout.dtype == "bfloat16"
    with pytest.raises(ConfigError, match="float32, bfloat16, float16"):
        load(folder, "int4")


def test_layout_and_limits_come_from_the_model(checkpoint: Checkpoints) -> None:
    model = load(checkpoint("llama-mqa"))
    assert model.layout.shape == (2, 2, 1, 16, 32)
    assert (model.vocab_size, model.max_context_len, model.eos_token_ids) == (VOCAB_SIZE, 1024, ())


def test_only_sampled_rows_have_logits(checkpoint: Checkpoints) -> None:
    model = load(checkpoint("llama-gqa"))
    run = PagedRun(model, [range(20), range(30)], 1)
    batch = run.batch([(run.rows[0], 20), (run.rows[1], 10)])
    assert model.forward(batch, KVPages(run.kv)).shape == (1, VOCAB_SIZE)


class Counting(TorchBackend):
    """Counts the layers that attend."""

    def __init__(self) -> None:
        self.num_attended = 0

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.num_attended += 1
        return super().attend(*args, **kwargs)


@pytest.mark.parametrize(("arch", "num_kinds"), [("llama-gqa", 1), ("gemma2", 2), ("gemma3", 2)])
def test_a_layer_of_each_kind_stands_for_all(checkpoint: Checkpoints, arch: str, num_kinds: int) -> None:
    """Windows and rotary embeddings differ from layer to layer."""
    backend = Counting()
    model = Decoder.load(checkpoint(arch), None, CPU, 16, backend)
    for one, expected in ((model, model.config.num_layers), (model.of_each_kind(), num_kinds)):
        run, backend.num_attended = PagedRun(one, [range(20)], 1), 0
        assert one.forward(run.batch([(run.rows[0], 20)]), KVPages(run.kv)).shape == (1, VOCAB_SIZE)
        assert backend.num_attended == expected


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_step_with_chunks_is_a_program_with_the_bits_of_single_kernels(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """Kernel by kernel a dense layer has 7 rows at once, as one of a long prompt has 512."""
    model, by_kernel = (Decoder.load(checkpoint(arch), "bfloat16", CPU, 16, make_backend(best_isa())) for _ in range(2))
    prompts = [[*range(length)] for length in (3, 40, 90)]
    monkeypatch.setattr(by_kernel, "_program_for", lambda batch, kv: None)
    monkeypatch.setattr(feed_forward, "PROMPT_ROWS", 7)
    expected = logits_of(by_kernel, prompts, 4, 24)
    assert torch.equal(logits_of(model, prompts, 4, 24), expected)
    run = PagedRun(model, prompts, 4)
    run.step(24)  # records on the pages of this run
    run.step(1)
    monkeypatch.setattr(CpuBackend, "_call", None)
    run.step(24)


def test_a_program_of_chunks_keeps_the_logits_of_few_rows(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with logits of more rows, as of a scored prompt, gives its memory back."""
    model, by_kernel = (Decoder.load(checkpoint("qwen3"), None, CPU, 16, make_backend(best_isa())) for _ in range(2))
    monkeypatch.setattr(by_kernel, "_program_for", lambda batch, kv: None)
    run = PagedRun(model, [range(100)], 1)
    step, kv, num_kept = run.batch([(run.rows[0], 100)]), KVPages(run.kv), RECORDED_CHUNKS.num_sequences
    for num_rows in (1, num_kept, num_kept + 1):
        batch = replace(step, sample_rows=torch.arange(100 - num_rows, 100), num_scored=num_rows - 1)
        logits = model.forward(batch, kv)
        assert torch.equal(logits, by_kernel.forward(batch, kv))
        assert logits.untyped_storage().nbytes() == max(num_rows, num_kept) * VOCAB_SIZE * 4
