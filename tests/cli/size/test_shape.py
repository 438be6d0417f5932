"""Shapes of published models, by their numbers, and of transformers' architectures, by transformers' own count."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cli.size.shape import ModelShape
from engine.checkpoint.config import ModelConfig
from tests.cli.size.published_models import (
    DEEPSEEK_V3,
    GPT2,
    LLAMA_2_70B,
    LLAMA_3_8B,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    QWEN3_06B,
)
from wire.errors import ModelError


@pytest.mark.parametrize(
    ("config", "num_parameters", "kv_bytes"),
    [
        pytest.param(LLAMA_3_8B, 8_030_261_248, 131_072, id="Llama-3-8B"),
        pytest.param(LLAMA_2_70B, 68_976_648_192, 327_680, id="Llama-2-70B"),
        pytest.param(MISTRAL_7B, 7_241_732_096, 131_072, id="Mistral-7B"),
        pytest.param(QWEN3_06B, 596_049_920, 114_688, id="Qwen3-0.6B"),
        pytest.param(MIXTRAL_8X7B, 46_702_792_704, 131_072, id="Mixtral-8x7B"),
        pytest.param(GPT2, 124_439_808, 73_728, id="GPT-2, in float32"),
    ],
)
def test_parameters_and_kv_of_a_token_are_as_published(
    config: dict[str, Any], num_parameters: int, kv_bytes: int
) -> None:
    shape = ModelShape.parse(config)
    assert shape.num_parameters == num_parameters
    assert shape.kv_layout(1).payload_bytes == kv_bytes
    assert shape.weight_bytes() == num_parameters * (4 if config is GPT2 else 2)


def test_a_latent_vector_is_kept_in_place_of_keys_and_values() -> None:
    shape = ModelShape.parse(DEEPSEEK_V3)
    assert shape.num_parameters == pytest.approx(671e9, rel=0.001)
    assert shape.kv_layout(1).payload_bytes == 61 * (512 + 64) * 2
    assert shape.weight_bytes() == pytest.approx(671e9, rel=0.005)  # a byte each, but for embeddings


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "moe_intermediate_size": 48}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
}
OLD: dict[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 500, "n_positions": 128}
PLAIN: dict[str, Any] = {name: SMALL[name] for name in SMALL if name != "num_key_value_heads"}


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**SMALL, attention_bias=True),
        transformers.MistralConfig(**SMALL),
        transformers.MixtralConfig(**SMALL),
        transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
        transformers.Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=96),
        transformers.Qwen3Config(**SMALL, head_dim=32),
        transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, mlp_only_layers=[1]),
        transformers.GptOssConfig(**SMALL, head_dim=32, num_local_experts=8),
        transformers.DeepseekV3Config(**SMALL, **LATENT, **ROUTED, moe_intermediate_size=48),
        transformers.Phi3Config(**SMALL, pad_token_id=0),
        transformers.GPT2Config(**OLD),
        transformers.GPTBigCodeConfig(**OLD),
        transformers.FalconConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=500),
        transformers.GPTNeoXConfig(**PLAIN),
        transformers.PhiConfig(**PLAIN),
    ],
    ids=lambda config: config.model_type,
)
def test_transformers_counts_as_many_parameters(config: transformers.PreTrainedConfig) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    # Gates of shared experts and a bias of a head are left out.
    assert ModelShape.parse(json.loads(config.to_json_string())).num_parameters == pytest.approx(
        num_parameters, rel=0.01
    )


@pytest.mark.parametrize("config", [LLAMA_3_8B, LLAMA_2_70B, MISTRAL_7B, QWEN3_06B])
def test_the_engine_makes_the_same_blocks(config: dict[str, Any]) -> None:
    assert ModelShape.parse(config).kv_layout(16) == ModelConfig.parse(config).kv_layout(config["torch_dtype"], 16)


def test_mxfp4_has_four_bits() -> None:
    config = SMALL | {"model_type": "gpt_oss", "num_local_experts": 8, "max_position_embeddings": 128}
    assert ModelShape.parse(config | {"quantization_config": {"quant_method": "mxfp4"}}).weight_bits == 4


def test_a_model_of_several_media_is_its_text_model() -> None:
    assert ModelShape.parse({"model_type": "llava", "text_config": LLAMA_3_8B}) == ModelShape.parse(LLAMA_3_8B)


@pytest.mark.parametrize(
    ("config", "change", "told"),
    [
        (LLAMA_3_8B, {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA_3_8B, {"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        (LLAMA_3_8B, {"num_hidden_layers": True}, "num_hidden_layers is True"),
        (LLAMA_3_8B, {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        (LLAMA_3_8B, {"num_key_value_heads": 5}, "num_key_value_heads is 5, expected a divisor of 32"),
        (LLAMA_3_8B, {"num_key_value_heads": 64}, "num_key_value_heads is 64"),
        (LLAMA_3_8B, {"num_attention_heads": 48}, "num_attention_heads is 48, expected a divisor of 4096"),
        (LLAMA_3_8B, {"intermediate_size": None}, "intermediate_size is missing"),
        (LLAMA_3_8B, {"vocab_size": "many"}, "vocab_size is many"),
        (LLAMA_3_8B, {"max_position_embeddings": None}, "max_position_embeddings is missing"),
        (LLAMA_3_8B, {"torch_dtype": "int3"}, "torch_dtype is int3"),
        (LLAMA_3_8B, {"dtype": "float32"}, "dtype and torch_dtype are names of one field, and differ"),
        (LLAMA_3_8B, {"n_layer": 40}, "num_hidden_layers and n_layer are names of one field, and differ"),
        (LLAMA_3_8B, {"layer_types": ["full_attention"]}, "layer_types is"),
        (LLAMA_3_8B, {"layer_types": ["linear_attention"] * 32}, "layer_types is"),
        (LLAMA_3_8B, {"is_encoder_decoder": True}, "is_encoder_decoder is True"),
        (LLAMA_3_8B, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config: bits is missing"),
        (MISTRAL_7B, {"num_key_value_heads": None}, "num_key_value_heads is missing"),
        (MISTRAL_7B, {"sliding_window": 0}, "sliding_window is 0"),
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        (MIXTRAL_8X7B, {"num_local_experts": 0}, "num_local_experts is 0"),
        (GPT2, {"n_embd": -768}, "n_embd is -768"),
        (DEEPSEEK_V3, {"qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
        (DEEPSEEK_V3, {"first_k_dense_replace": 62}, "first_k_dense_replace is 62"),
    ],
)
def test_a_config_that_lies_or_lacks_a_field_is_refused_by_the_fields_name(
    config: dict[str, Any], change: dict[str, Any], told: str
) -> None:
    with pytest.raises(ModelError, match=told):
        ModelShape.parse(config | change)


def test_a_folder_and_its_config_are_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    assert ModelShape.read(tmp_path) == ModelShape.read(tmp_path / "config.json") == ModelShape.parse(GPT2)


def test_bits_of_compressed_tensors_are_the_widest_of_its_groups() -> None:
    groups = {"group_0": {"weights": {"num_bits": 4}}, "group_1": {"weights": {"num_bits": 8}}}
    config = LLAMA_3_8B | {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}
    assert ModelShape.parse(config).weight_bits == 8
    groups.pop("group_1")
    assert ModelShape.parse(config).weight_bits == 4
