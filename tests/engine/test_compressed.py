"""Quantized checkpoints give the logits, bit by bit, of what their own package decompresses them into."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.checkpoint import Checkpoint
from engine.model.decoder import Decoder
from engine.model.weights import check_weights, count_bytes
from kernels.selection import select_backend
from kernels.torch_backend import TorchBackend
from tests.harness.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.harness.compressed_checkpoints import FP8, KINDS, compress, set_quantization, to_fp8_method
from tests.harness.model_alone import logits_of
from tests.kernels.backends import ISAS
from wire.errors import ModelError

CPU = torch.device("cpu")
PROMPTS = torch.randint(VOCAB_SIZE, (5, 40), generator=torch.Generator().manual_seed(2)).tolist()
LAYER = "model.layers.0.self_attn.q_proj."


def make_pair(tmp_path: Path, kind: str, dtype: torch.dtype, layout: str = "") -> tuple[Path, Path]:
    """A quantized folder, and a plain one of what it means; edges of blocks are no whole ones."""
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    sizes = {"hidden_size": 256, "intermediate_size": 384 if "large" in kind else 320}
    make_checkpoint("llama-gqa", plain, num_attention_heads=4, head_dim=64, **sizes)
    compress(plain, quantized, kind, dtype, layout)
    return quantized, plain


def assert_equal_logits(quantized: Path, plain: Path, kernels: str = "auto") -> None:
    backend = select_backend(CPU, kernels)
    for dtype in ("float32", "bfloat16"):
        models = [Decoder.load(folder, dtype, CPU, 16, backend) for folder in (quantized, plain)]
        packed, reference = (logits_of(model, PROMPTS, 6, 23) for model in models)
        assert torch.equal(packed, reference)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_have_the_bits_of_the_decompressed_checkpoint(tmp_path: Path, kind: str, scales: torch.dtype) -> None:
    quantized, plain = make_pair(tmp_path, kind, scales)
    assert_equal_logits(quantized, plain)


@pytest.mark.parametrize("kind", ["FP8 of tensors", "FP8 of channels", "W8A16 of groups", "W8A16 with zero points"])
def test_codes_in_items_of_their_own_are_read(tmp_path: Path, kind: str) -> None:
    assert_equal_logits(*make_pair(tmp_path, kind, torch.bfloat16, "naive-quantized"))


@pytest.mark.parametrize("isa", ISAS[1:])
@pytest.mark.parametrize("kind", ["W4A16 with zero points", "W8A16 with zero points", "FP8 of blocks"])
def test_other_instruction_sets_have_the_same_bits(tmp_path: Path, kind: str, isa: str) -> None:
    assert_equal_logits(*make_pair(tmp_path, kind, torch.bfloat16), isa)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["FP8 of blocks", "FP8 of tensors"])
def test_fp8_is_read_under_the_method_fp8(tmp_path: Path, kind: str, scales: torch.dtype) -> None:
    quantized, plain = make_pair(tmp_path, kind, scales)
    to_fp8_method(quantized)
    assert_equal_logits(quantized, plain)


def test_torch_serves_them_widened(tmp_path: Path) -> None:
    quantized, plain = make_pair(tmp_path, "W4A16 with zero points", torch.bfloat16)
    models = [Decoder.load(folder, "float32", CPU, 16, TorchBackend()) for folder in (quantized, plain)]
    packed, reference = (logits_of(model, PROMPTS, 2, 40) for model in models)
    assert torch.equal(packed, reference)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_stay_as_wide_as_they_are_stored(tmp_path: Path, kind: str) -> None:
    quantized, plain = make_pair(tmp_path, kind, torch.bfloat16)
    backend = select_backend(CPU)
    packed, whole = (count_bytes(Checkpoint(one), torch.bfloat16, backend) for one in (quantized, plain))
    stored = load_file(quantized / "model.safetensors")
    plain_bytes = sum(one.nbytes for name, one in stored.items() if "_proj" not in name and one.dim() == 2)
    code_bytes = sum(one.nbytes for name, one in stored.items() if "_proj" in name)
    assert packed < plain_bytes + 1.2 * code_bytes, "edges of panels and groups, of a small model"
    assert packed < whole


def test_a_matrix_beside_others_without_codes_is_widened(tmp_path: Path) -> None:
    quantized, plain = make_pair(tmp_path, "FP8 of channels", torch.bfloat16)
    tensors, widened = (load_file(one / "model.safetensors") for one in (quantized, plain))
    del tensors[f"{LAYER}weight_scale"]
    save_file(tensors | {f"{LAYER}weight": widened[f"{LAYER}weight"]}, quantized / "model.safetensors")
    assert_equal_logits(quantized, plain)


GROUP: dict[str, Any] = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}


def of(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"0": GROUP}} | changes


def with_weights(**changes: Any) -> dict[str, Any]:
    return of(config_groups={"0": {"weights": GROUP["weights"] | changes}})


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        (
            FP8 | {"activation_scheme": "static"},
            "activation_scheme is static, expected dynamic: static scales of activations",
        ),
        (FP8 | {"fmt": "e5m2"}, "fmt is e5m2"),
        (FP8 | {"weight_block_size": [0, 128]}, "weight_block_size is"),
        (FP8 | {"weight_block_size": "128"}, "weight_block_size is 128"),
        (of(format="nvfp4-pack-quantized"), "format is nvfp4"),
        (of(quantization_status="frozen"), "quantization_status is frozen"),
        (of(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is"),
        (of(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is"),
        (of(transform_config={"config_groups": {"R1": {}}}), "transform_config is"),
        (of(config_groups={"0": GROUP | {"input_activations": {"num_bits": 8, "dynamic": False}}}), "dynamic is False"),
        (of(config_groups={"0": GROUP | {"output_activations": {"num_bits": 8}}}), "output_activations is"),
        (of(config_groups={"0": "W4A16"}), "0 is W4A16"),
        (of(config_groups=[]), "config_groups is"),
        (with_weights(num_bits=3), "num_bits is 3"),
        (with_weights(num_bits=[4]), "num_bits is"),
        (with_weights(type="float"), "type is float"),
        (with_weights(strategy="tensor_group"), "strategy is tensor_group"),
        (with_weights(group_size=0), "group_size is 0"),
        (with_weights(actorder="group"), "actorder is group"),
    ],
)
def test_any_other_quantization_is_refused_by_name(tmp_path: Path, quantization: dict[str, Any], reason: str) -> None:
    make_checkpoint("llama-gqa", tmp_path)
    set_quantization(tmp_path, quantization)
    with pytest.raises(ModelError, match=r"config\.json: quantization_config") as raised:
        Checkpoint(tmp_path)
    assert reason in raised.value.message
    assert len(raised.value.message) < 300


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight_scale": torch.ones(7, 3)}, "q_proj.weight has scales of [7, 3]"),
        ({"weight_scale": torch.ones(64, 4)}, "q_proj.weight has scales of [64, 4]"),
        ({"weight_scale": None}, "q_proj.weight has codes without scales"),
        ({"weight_scale": torch.ones(1, dtype=torch.int32)}, "q_proj.weight has codes without scales"),
        ({"weight_packed": torch.zeros(256, 7, dtype=torch.int32)}, "q_proj.weight has codes that are neither"),
        ({"weight_packed": torch.zeros(256, 32)}, "q_proj.weight has codes that are neither"),
        ({"weight_packed": torch.zeros(8, 32, dtype=torch.int32)}, "q_proj.weight has codes of [8, 256]"),
        ({"weight_packed": None}, "q_proj.weight has codes that are neither"),
        ({"weight_zero_point": torch.zeros(7, 3, dtype=torch.int32)}, "q_proj.weight has scales of"),
        ({"weight_zero_point": torch.zeros(1, dtype=torch.int8)}, "q_proj.weight has zero points that do not fit"),
        ({"weight_g_idx": torch.zeros(256, dtype=torch.int32)}, "q_proj.weight_g_idx, which is no part of the model"),
        ({"input_scale": torch.ones(1)}, "q_proj.input_scale, which is no part of the model"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], reason: str
) -> None:
    """Before any content is read."""
    quantized, _ = make_pair(tmp_path, "W4A16 of groups", torch.bfloat16)
    tensors: dict[str, Any] = load_file(quantized / "model.safetensors")
    tensors |= {f"{LAYER}{part}": one for part, one in changes.items()}
    save_file({name: one for name, one in tensors.items() if one is not None}, quantized / "model.safetensors")
    with pytest.raises(ModelError) as raised:
        check_weights(Checkpoint(quantized))
    assert reason in raised.value.message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, value: float) -> None:
    quantized, _ = make_pair(tmp_path, "W4A16 of groups", torch.bfloat16)
    tensors = load_file(quantized / "model.safetensors")
    tensors[f"{LAYER}weight_scale"][3, 2] = value
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_proj\.weight has NaN or infinity"):
        Decoder.load(quantized, "bfloat16", CPU, 16)


def test_another_shape_in_the_file_is_refused(tmp_path: Path) -> None:
    quantized, _ = make_pair(tmp_path, "W4A16 of groups", torch.bfloat16)
    tensors = load_file(quantized / "model.safetensors")
    tensors[f"{LAYER}weight_shape"] = torch.tensor([256, 255])
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_proj\.weight has codes of \[256, 255\], config"):
        Decoder.load(quantized, "bfloat16", CPU, 16)


def test_codes_without_a_declaration_are_refused(tmp_path: Path) -> None:
    quantized, _ = make_pair(tmp_path, "FP8 of channels", torch.bfloat16)
    config = json.loads((quantized / "config.json").read_bytes())
    del config["quantization_config"]
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quantized weights are not supported"):
        check_weights(Checkpoint(quantized))
