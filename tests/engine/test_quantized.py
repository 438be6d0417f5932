"""Checkpoints of AWQ, GPTQ and MXFP4 give the logits, bit by bit, of the same weights in a plain checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.quantized.mxfp4 import from_blocks
from engine.model.decoder import Decoder
from engine.model.weights import WeightLoader, check_weights, count_bytes
from kernels.backend import Weight
from kernels.selection import select_backend
from tests.harness.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.harness.compressed_checkpoints import FP8, set_quantization
from tests.harness.model_alone import logits_of
from tests.harness.quantized_checkpoints import AWQ, GPTQ, KINDS, quantize
from tests.kernels.backends import ISAS
from wire.errors import ModelError

CPU = torch.device("cpu")
PROMPTS = torch.randint(VOCAB_SIZE, (5, 40), generator=torch.Generator().manual_seed(2)).tolist()
LAYER = "model.layers.0.self_attn.q_proj."
OF_HALVES = ("AWQ", "AWQ of channels", "GPTQ of 4 bits", "GPTQ of 8 bits", "GPTQ, version 2")
"""Kinds whose weights are computed in float16, and stay packed where the model is computed in it or in float32."""


def make_pair(tmp_path: Path, kind: str) -> tuple[Path, Path]:
    """A quantized folder, and a plain one of what it means."""
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    sizes = {"hidden_size": 256, "intermediate_size": 320}
    make_checkpoint("llama-gqa", plain, num_attention_heads=4, head_dim=64, **sizes)
    quantize(plain, quantized, kind)
    return quantized, plain


def is_packed(kind: str, dtype: str) -> bool:
    if kind in OF_HALVES:
        return dtype != "bfloat16"
    return kind == "MXFP4" or (kind == "AWQ in bfloat16" and dtype != "float16")


def assert_equal_logits(quantized: Path, plain: Path, kind: str, kernels: str = "auto") -> None:
    backend = select_backend(CPU, kernels)
    for dtype in ("float32", "bfloat16", "float16"):
        models = [Decoder.load(folder, dtype, CPU, 16, backend) for folder in (quantized, plain)]
        for layer in models[0].weights.layers:
            for weight in (layer.qkv.weight, layer.attention_output.weight, *layer.feed_forward.matrices):
                assert (weight.data.dtype is torch.uint8) is is_packed(kind, dtype)
        packed, reference = (logits_of(model, PROMPTS, 6, 23) for model in models)
        assert torch.equal(packed, reference)
        assert reference.std() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_logits_have_the_bits_of_the_widened_checkpoint(tmp_path: Path, kind: str) -> None:
    assert_equal_logits(*make_pair(tmp_path, kind), kind)


def test_biases_of_zeros_beside_codes_are_none(tmp_path: Path) -> None:
    """As older packages write them of each matrix."""
    quantized, plain = make_pair(tmp_path, "GPTQ of 4 bits")
    change(quantized, {"bias": torch.zeros(256, dtype=torch.float16)})
    check_weights(Checkpoint(quantized))
    assert_equal_logits(quantized, plain, "GPTQ of 4 bits")
    change(quantized, {"bias": torch.eye(256, dtype=torch.float16)[7]})
    with pytest.raises(ModelError, match=r"tensor model\.layers\.0\.self_attn\.q_proj\.bias is not of zeros"):
        Decoder.load(quantized, "float32", CPU, 16)


@pytest.mark.parametrize("isa", ISAS[1:])
@pytest.mark.parametrize("kind", ["AWQ", "GPTQ of 8 bits", "MXFP4"])
def test_other_instruction_sets_have_the_same_bits(tmp_path: Path, kind: str, isa: str) -> None:
    assert_equal_logits(*make_pair(tmp_path, kind), kind, isa)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_counted_without_content(tmp_path: Path, kind: str) -> None:
    quantized, plain = make_pair(tmp_path, kind)
    dtype, backend = torch.float16 if kind in OF_HALVES else torch.bfloat16, select_backend(CPU)
    sizes: list[int] = []

    def packed(_: str, pack: Callable[[], Weight]) -> Weight:
        weight = pack()
        sizes.append(weight.data.nbytes)
        return weight

    WeightLoader(Checkpoint(quantized), dtype, CPU, backend, packed).load()
    counted, whole = (count_bytes(Checkpoint(one), dtype, backend) for one in (quantized, plain))
    assert counted == sum(sizes)
    assert (counted < 0.7 * whole) is (kind != "GPTQ by activation")


def test_mxfp4_means_what_transformers_makes_of_it() -> None:
    """As gpt-oss's experts are stored: [experts, columns, groups, 16]; transformers turns them around."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 8, 2, 16), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(20, 230, (3, 8, 2), dtype=torch.uint8, generator=generator)
    matrix = from_blocks(blocks, exponents)
    assert (matrix.columns, matrix.depth) == (24, 64)
    theirs = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
    assert torch.equal(matrix.dequantize().view(3, 8, 64), theirs.transpose(1, 2))


def test_each_exponent_of_mxfp4_is_exact_or_refused() -> None:
    blocks = torch.full((256, 1, 16), 0x17, dtype=torch.uint8)  # 6 and 0.5
    matrix = from_blocks(blocks, torch.arange(256, dtype=torch.uint8)[:, None])
    powers = torch.ldexp(torch.ones(253, dtype=torch.float64), torch.arange(253) - 127)
    assert torch.equal(matrix.dequantize()[:253, :2].double(), torch.stack((6 * powers, powers / 2), -1))
    for exponent in range(256):
        own = matrix.pick(torch.tensor([exponent]))
        assert own.is_finite(torch.bfloat16) is (exponent <= 252)
        assert own.is_finite(torch.float16) is (exponent <= 127 + 13)


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"quant_method": "hqq"}, "quant_method is hqq, expected compressed-tensors"),
        (AWQ | {"bits": 8}, "bits is 8, expected 4"),
        (AWQ | {"version": "gemv"}, "version is gemv, expected gemm"),
        (AWQ | {"zero_point": False}, "zero_point is False"),
        (AWQ | {"group_size": 0}, "group_size is 0"),
        (GPTQ | {"bits": 3}, "bits is 3, expected 4 or 8"),
        (GPTQ | {"bits": [4]}, "bits is [4], expected 4 or 8"),
        (GPTQ | {"group_size": -2}, "group_size is -2"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is marlin, expected gptq or gptq_v2"),
        (GPTQ | {"format": "bitblas"}, "format is bitblas"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is True"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype is int16"),
        (GPTQ | {"dynamic": {"-:.*down.*": {}}}, "dynamic is"),
        (GPTQ | {"desc_act": "yes"}, "desc_act is yes"),
        (FP8 | {"activation_scheme": "static"}, "static scales of activations are not supported"),
    ],
)
def test_any_other_quantization_is_refused_by_name(tmp_path: Path, quantization: dict[str, Any], reason: str) -> None:
    make_checkpoint("llama-gqa", tmp_path)
    set_quantization(tmp_path, quantization)
    with pytest.raises(ModelError, match=r"config\.json: quantization_config") as raised:
        Checkpoint(tmp_path)
    assert reason in raised.value.message


def test_two_quantizations_are_refused(tmp_path: Path) -> None:
    make_checkpoint("llama-gqa", tmp_path)
    set_quantization(tmp_path, AWQ)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("{", '{"compression_config": {"format": "x"}, ', 1))
    with pytest.raises(ModelError, match=r"quantization_config is .*, expected no compression_config beside it"):
        Checkpoint(tmp_path)


WORDS = torch.zeros(256, 32, dtype=torch.int32)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("AWQ", {"qweight": None}, "the weights lack the tensor model.layers.0.self_attn.q_proj.qweight"),
        ("AWQ", {"qzeros": None}, "the weights lack the tensor model.layers.0.self_attn.q_proj.qzeros"),
        ("AWQ", {"qweight": WORDS.T.contiguous()}, "q_proj.qweight is int32 [32, 256], expected int32 [256, 32]"),
        ("AWQ", {"qweight": WORDS.float()}, "q_proj.qweight is float32 [256, 32], expected int32"),
        ("AWQ", {"qzeros": WORDS}, "q_proj.qzeros is int32 [256, 32], expected int32 [4, 32]"),
        ("AWQ", {"scales": torch.ones(2, 256)}, "q_proj.scales is float32 [2, 256], expected float32 or bfloat16"),
        ("GPTQ of 4 bits", {"scales": None}, "the weights lack the tensor model.layers.0.self_attn.q_proj.scales"),
        ("GPTQ of 4 bits", {"qweight": WORDS}, "q_proj.qweight is int32 [256, 32], expected int32 [32, 256]"),
        ("GPTQ of 4 bits", {"g_idx": WORDS[:9, 0]}, "q_proj.g_idx is int32 [9], expected int32 [256]"),
        ("MXFP4", {"weight_scales": None}, "the weights lack the tensor model.layers.0.self_attn.q_proj.weight_scales"),
        ("MXFP4", {"weight_scales": torch.ones(256, 8)}, "q_proj.weight_scales is float32 [256, 8], expected uint8"),
        ("MXFP4", {"input_scale": torch.ones(1)}, "q_proj.input_scale, which is no part of the model"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, kind: str, changes: dict[str, torch.Tensor | None], reason: str
) -> None:
    """Before any content is read."""
    quantized, _ = make_pair(tmp_path, kind)
    change(quantized, changes)
    with pytest.raises(ModelError) as raised:
        check_weights(Checkpoint(quantized))
    assert reason in raised.value.message


def change(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replaces tensors of a matrix, or takes out those of None."""
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    tensors |= {f"{LAYER}{part}": one for part, one in changes.items()}
    save_file(
        {name: one.contiguous() for name, one in tensors.items() if one is not None}, folder / "model.safetensors"
    )


@pytest.mark.parametrize(
    ("kind", "part", "value", "reason"),
    [
        ("GPTQ of 4 bits", "qzeros", -1, r"q_proj\.qzeros has a zero point of 16, above the codes of 4 bits"),
        ("GPTQ of 8 bits", "qzeros", 255 << 8, r"q_proj\.qzeros has a zero point of 256, above the codes of 8 bits"),
        ("GPTQ of 4 bits", "g_idx", 4, r"q_proj\.g_idx has a group out of range: there are 4"),
        ("GPTQ by activation", "g_idx", -1, r"q_proj\.g_idx has a group out of range: there are 4"),
        ("GPTQ by activation", "qzeros", -1, r"q_proj\.qzeros has a zero point of 16"),
        ("AWQ", "scales", float("nan"), r"q_proj\.weight has NaN or infinity"),
        ("GPTQ by activation", "scales", float("inf"), r"q_proj\.weight has NaN or infinity"),
        ("MXFP4", "weight_scales", 255, r"q_proj\.weight has NaN or infinity"),
        ("MXFP4", "weight_scales", 253, r"q_proj\.weight has NaN or infinity"),
    ],
)
def test_content_out_of_range_is_refused_by_name(
    tmp_path: Path, kind: str, part: str, value: float, reason: str
) -> None:
    quantized, _ = make_pair(tmp_path, kind)
    tensor = load_file(quantized / "model.safetensors")[f"{LAYER}{part}"]
    tensor.view(-1)[3] = value
    change(quantized, {part: tensor})
    with pytest.raises(ModelError, match=reason):
        Decoder.load(quantized, "float32", CPU, 16)
