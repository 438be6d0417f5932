import json
import math
from typing import Any

import pytest
from transformers import SmolLM3Config

from engine.checkpoint.config import ModelConfig
from engine.checkpoint.rope import RopeScaling
from tests.harness.checkpoints import ARCHITECTURES
from wire.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
SLIDING = {"use_sliding_window": True, "sliding_window": 48}


def test_a_llama_of_few_words() -> None:
    config = ModelConfig.parse(LLAMA)
    attention = config.attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 4, 16)
    assert (attention.qkv_bias, attention.output_bias, config.family.norms.of_heads, config.mlp_bias) == (False,) * 4
    assert attention.windows == (None, None, None)
    assert [one.scaling for one in config.ropes] == [RopeScaling()]
    assert (config.dtype, config.tied_embeddings, config.eos_token_ids) == ("float32", False, (2,))


@pytest.mark.parametrize(
    ("config", "qkv_bias", "output_bias", "qk_norm"),
    [
        (LLAMA | {"attention_bias": True}, True, True, False),
        (MISTRAL | {"attention_bias": True}, False, False, False),
        (QWEN2, True, False, False),
        (QWEN3, False, False, True),
        (QWEN3 | {"attention_bias": True}, True, True, True),
    ],
)
def test_architectures_differ_in_biases_and_norms(
    config: dict[str, Any], qkv_bias: bool, output_bias: bool, qk_norm: bool
) -> None:
    model = ModelConfig.parse(config)
    found = model.attention.qkv_bias, model.attention.output_bias, model.family.norms.of_heads
    assert found == (qkv_bias, output_bias, qk_norm)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LLAMA | SLIDING, (None, None, None)),
        (MISTRAL, (4096, 4096, 4096)),
        (MISTRAL | {"sliding_window": 64}, (64, 64, 64)),
        (MISTRAL | {"sliding_window": None}, (None, None, None)),
        (QWEN2 | {"sliding_window": 48}, (None, None, None)),
        (QWEN2 | SLIDING, (None, None, None)),
        (QWEN2 | SLIDING | {"max_window_layers": 1}, (None, 48, 48)),
        (QWEN3 | SLIDING | {"layer_types": ["sliding_attention", "full_attention"] * 2}, (48, None, 48, None)),
    ],
)
def test_sliding_windows(config: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert ModelConfig.parse(config | {"num_hidden_layers": len(windows)}).attention.windows == windows


def test_head_size_is_explicit_or_of_the_architecture() -> None:
    head_dims = [ModelConfig.parse(c).attention.head_dim for c in (QWEN2, QWEN3, LLAMA | {"head_dim": 20})]
    assert head_dims == [16, 128, 20]


def test_transformers_4_and_5_spell_the_dtype_differently() -> None:
    assert ModelConfig.parse(LLAMA | {"torch_dtype": "bfloat16"}).dtype == "bfloat16"
    assert ModelConfig.parse(LLAMA | {"dtype": "float16"}).dtype == "float16"


def test_the_model_type_names_the_architecture_where_nothing_else_does() -> None:
    assert ModelConfig.parse(LLAMA | {"architectures": None, "model_type": "llama"}) == ModelConfig.parse(LLAMA)


@pytest.mark.parametrize(("eos", "ids"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))])
def test_end_of_text_is_none_one_or_several_tokens(eos: object, ids: tuple[int, ...]) -> None:
    assert ModelConfig.parse(LLAMA | {"eos_token_id": eos}).eos_token_ids == ids


def test_windows_of_smollm3_are_in_layers_without_rope() -> None:
    """As transformers has them where config.json names no types of layers."""
    named: dict[str, Any] = SLIDING | {"num_hidden_layers": 5, "no_rope_layers": [1, 0, 1, 1, 0]}
    types = SmolLM3Config(**named).layer_types or ()
    own = {"architectures": ["SmolLM3ForCausalLM"], "num_key_value_heads": 2, "eos_token_id": None}
    config = ModelConfig.parse(LLAMA | named | own)
    assert config.attention.windows == tuple(48 if one == "sliding_attention" else None for one in types)
    assert config.attention.windows == (None, 48, None, None, 48)
    assert [rope.part for rope in config.layer_ropes] == [1, 0, 1, 1, 0]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_defaults_equal_the_ones_of_transformers(arch: str) -> None:
    """What a configuration saved by transformers leaves out means the same here."""
    config_class, _ = ARCHITECTURES[arch]
    name = config_class.__name__.replace("Text", "").replace("Config", "ForCausalLM")
    full = config_class(architectures=[name]).to_dict()
    structure = {key: full[key] for key in LLAMA}
    theirs = ModelConfig.parse(json.loads(json.dumps(full)))
    assert ModelConfig.parse(structure) == theirs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported: LlamaForCausalLM, M"),
        ({"architectures": [], "model_type": "gpt2"}, "gpt2 is not supported"),
        ({"architectures": ["LlamaForCausalLM", "GPT2LMHeadModel"]}, "architectures is .*, expected one name"),
        ({"architectures": ["T5Gemma"], "is_encoder_decoder": True}, r"T5Gemma \(it has an encoder\) is not supported"),
        (
            {"architectures": ["A"], "vision_config": {}, "audio_config": {}, "text_config": {}},
            r"architecture A \(it has vision_config, audio_config\) is not",
        ),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, expected none: LlamaForC.* has no such"),
        ({"logits_scaling": 8.0}, "logits_scaling is 8.0, expected none"),
        ({"no_rope_layers": [1, 0, 1]}, "no_rope_layers is"),
        ({"num_experts": 8}, "num_experts is 8, expected none"),
        ({"num_local_experts": 8}, "num_local_experts is 8, expected none"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is 512, expected none"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope type spiral is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu, expected silu"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": "100"}, "vocab_size is 100"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"hidden_size": 10**40}, "hidden_size is 1000"),
        ({"num_hidden_layers": 100_000}, "from 1 to 1024"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"intermediate_size": -1}, "intermediate_size is -1"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_attention_heads": 4.0}, "num_attention_heads is 4.0"),
        ({"num_key_value_heads": 3}, "divisor of 4"),
        ({"num_key_value_heads": 8}, "divisor of 4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"max_position_embeddings": 1}, "max_position_embeddings is 1, expected an integer from 16 to 16777216"),
        ({"max_position_embeddings": 15}, "max_position_embeddings is 15"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings is 2147483648"),
        ({"head_dim": 15}, "even"),
        *(({"rms_norm_eps": eps}, f"rms_norm_eps is {eps}, exp") for eps in (-1e-6, 0, 1e-300, 1.0, 1e9, math.nan)),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps is inf, expected a number from 1e-12 to 0.1"),
        ({"attention_bias": 1}, "attention_bias is 1, expected true or false"),
        ({"mlp_bias": "no"}, "mlp_bias is no"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"torch_dtype": "int8"}, "torch_dtype is int8"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [1, -1]}, "eos_token_id"),
        ({"eos_token_id": 100}, "eos_token_id is 100, expected a token id below 100"),
        ({"eos_token_id": [2, 1000]}, "eos_token_id"),
        ({"eos_token_id": 2.0}, "eos_token_id is 2.0"),
    ],
)
def test_wrong_values_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.parse(LLAMA | change)


def test_fields_of_other_families_that_change_nothing_are_passed_over() -> None:
    neutral = {"logits_scaling": 1.0, "num_experts": 0, "attn_logit_softcapping": None, "partial_rotary_factor": 1.0}
    assert ModelConfig.parse(LLAMA | neutral) == ModelConfig.parse(LLAMA)


def test_a_part_of_the_rope_is_refused_where_layers_have_two() -> None:
    """It was passed over; transformers has no such Gemma 3 either."""
    gemma = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "partial_rotary_factor": 0.5}
    with pytest.raises(ModelError, match=r"partial_rotary_factor is 0\.5, expected none: Gemma3ForCausalLM has no"):
        ModelConfig.parse(gemma)


@pytest.mark.parametrize(
    "layer_types", ["sliding_attention", ["full_attention"], ["chunked_attention"] * 3, [["full_attention"]] * 3]
)
def test_wrong_layer_types_are_refused(layer_types: object) -> None:
    with pytest.raises(ModelError, match="layer_types"):
        ModelConfig.parse(QWEN2 | SLIDING | {"layer_types": layer_types})


@pytest.mark.parametrize("window", [0, -1, 2.5, "48"])
@pytest.mark.parametrize("model", [MISTRAL, QWEN2 | {"use_sliding_window": True}], ids=["mistral", "qwen2"])
def test_wrong_windows_are_refused(model: dict[str, Any], window: object) -> None:
    with pytest.raises(ModelError, match=f"sliding_window is {window}"):
        ModelConfig.parse(model | {"sliding_window": window})


@pytest.mark.parametrize("first", [-1, 1.0, "1", True])
def test_wrong_numbers_of_whole_layers_are_refused(first: object) -> None:
    with pytest.raises(ModelError, match=f"max_window_layers is {first}"):
        ModelConfig.parse(QWEN2 | SLIDING | {"max_window_layers": first})


def test_a_sliding_layer_without_a_window_is_refused() -> None:
    with pytest.raises(ModelError, match="no sliding window"):
        ModelConfig.parse(QWEN2 | {"layer_types": ["sliding_attention"] * 3})
