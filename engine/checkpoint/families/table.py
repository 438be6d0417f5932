"""The architectures that the native decoder serves, and which field of their config.json is which switch.

An absent key has the default of transformers' configuration class.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from engine.checkpoint.families.family import (
    Bias,
    Family,
    Norms,
    equal_windows,
    gemma_scalars,
    granite_scalars,
    one_rope,
    rope_in_some_layers,
    ropes_of_types,
    switched_windows,
    switched_windows_of_all,
    windows_beside_rope,
    windows_of_types,
)
from engine.checkpoint.families.mixture import gpt_oss_mixture, mixtral_mixture, qwen_mixture
from engine.checkpoint.json_fields import JsonFields
from kernels.backend import Activation
from wire.errors import ModelError

BESIDE_TEXT = ("encoder", "vision", "image", "video", "audio", "speech", "talker", "thinker")
_SWITCHED: dict[str, Any] = {"qkv_bias": Bias.SWITCHED, "output_bias": Bias.SWITCHED}
_QWEN: dict[str, Any] = {
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "eos_token_id": None,
}
_GEMMA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_OLMO: dict[str, Any] = {"rms_norm_eps": 1e-5, "eos_token_id": 50279}
_OLMO_NORMS = Norms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
    of_whole_rows=True,
    is_wide=True,
)
_GEMMA_NORMS: dict[str, Any] = {
    "after_attention": "post_attention_layernorm",
    "before_mlp": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
    "is_wide": True,
}
FAMILIES = {
    "LlamaForCausalLM": Family(model_type="llama", defaults={"eos_token_id": 2}, mlp_bias=Bias.SWITCHED, **_SWITCHED),
    "MistralForCausalLM": Family(
        model_type="mistral",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, "eos_token_id": 2},
        windows=equal_windows,
    ),
    "Qwen2ForCausalLM": Family(model_type="qwen2", defaults=_QWEN, qkv_bias=Bias.ALWAYS, windows=switched_windows),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        defaults=_QWEN | {"head_dim": 128},
        norms=Norms(of_heads=True),
        windows=switched_windows,
        **_SWITCHED,
    ),
    "GraniteForCausalLM": Family(
        model_type="granite",
        defaults={"eos_token_id": 2},
        mlp_bias=Bias.SWITCHED,
        scalars=granite_scalars,
        **_SWITCHED,
    ),
    "SmolLM3ForCausalLM": Family(
        model_type="smollm3",
        defaults={
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "eos_token_id": 128001,
        },
        mlp_bias=Bias.SWITCHED,
        windows=windows_beside_rope,
        ropes=rope_in_some_layers,
        **_SWITCHED,
    ),
    "Phi3ForCausalLM": Family(
        model_type="phi3",
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "eos_token_id": 32000},
        fuses_qkv=True,
        fuses_gate=True,
        windows=equal_windows,
        ropes=partial(one_rope, reads_part=True),
    ),
    "Olmo2ForCausalLM": Family(model_type="olmo2", defaults=_OLMO, norms=_OLMO_NORMS, **_SWITCHED),
    "Olmo3ForCausalLM": Family(
        model_type="olmo3",
        defaults=_OLMO | {"rope_theta": 500_000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
        norms=_OLMO_NORMS,
        windows=windows_of_types,
        ropes=ropes_of_types,
        **_SWITCHED,
    ),
    "Glm4ForCausalLM": Family(
        model_type="glm4",
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-7,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "eos_token_id": [151329, 151336, 151338],
        },
        qkv_bias=Bias.SWITCHED,
        norms=Norms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
        fuses_gate=True,
        ropes=partial(one_rope, reads_part=True, is_interleaved=True),
    ),
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        defaults=_GEMMA
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2},
        norms=Norms(**_GEMMA_NORMS),
        activation=Activation.GELU_TANH,
        windows=windows_of_types,
        scalars=gemma_scalars,
        **_SWITCHED,
    ),
    "Gemma3ForCausalLM": Family(
        model_type="gemma3_text",
        defaults=_GEMMA | {"rope_theta": 1e6, "rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6},
        norms=Norms(of_heads=True, **_GEMMA_NORMS),
        activation=Activation.GELU_TANH,
        windows=windows_of_types,
        ropes=ropes_of_types,
        scalars=gemma_scalars,
        **_SWITCHED,
    ),
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        defaults={
            "num_key_value_heads": 8,
            "num_experts_per_tok": 2,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
        },
        windows=equal_windows,
        mixture=mixtral_mixture,
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        defaults={
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "sliding_window": 4096,
            "eos_token_id": None,
        },
        norms=Norms(of_heads=True),
        windows=switched_windows_of_all,
        mixture=qwen_mixture,
        **_SWITCHED,
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "attention_bias": True,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "rms_norm_eps": 1e-5,
            "eos_token_id": None,
        },
        norms=Norms(is_wide=True),
        activation=Activation.CLAMPED_SWISH,
        windows=windows_of_types,
        mixture=gpt_oss_mixture,
        has_sinks=True,
        **_SWITCHED,
    ),
}


def find_architecture(fields: JsonFields) -> str:
    """Finds the architecture that config.json names, by the name of its class or by its `model_type`."""
    named = fields.raw("architectures")
    if isinstance(named, list) and named:
        if len(named) > 1:
            raise fields.wrong("architectures", "one name")
        return str(named[0])
    model_type = fields.text("model_type", "unknown")
    return next((name for name, one in FAMILIES.items() if one.model_type == model_type), model_type)


def parse_architecture(fields: JsonFields) -> str:
    """Finds a native architecture. Raises ModelError for another one."""
    architecture = find_architecture(fields)
    if architecture not in FAMILIES:
        parts = f" (it has {', '.join(found)[:128]})" if (found := _parts_besides_text(fields)) else ""
        raise ModelError(f"architecture {architecture[:64]}{parts} is not supported; supported: {', '.join(FAMILIES)}")
    return architecture


def _parts_besides_text(fields: JsonFields) -> list[str]:
    """Lists the sections of config.json that describe encoders, vision and speech."""
    encoder = ["an encoder"] if fields.raw("is_encoder_decoder") is True else []
    return encoder + [name for name, _ in fields.items() if name.endswith("_config") and name.startswith(BESIDE_TEXT)]


OF_OTHERS: Mapping[str, Any] = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "embedding_multiplier": 1,
    "attention_multiplier": None,
    "residual_multiplier": 1,
    "logits_scaling": 1,
    "no_rope_layers": [],
    "partial_rotary_factor": 1,
    "clip_qkv": None,
    "qk_layernorm": False,
    "alibi": False,
    "kv_lora_rank": 0,
    "num_experts": 0,
    "num_local_experts": 0,
    "n_routed_experts": 0,
}
"""Fields that change what a model computes, each of some families, and the values that change nothing."""


def refuse_fields_of_others(architecture: str, fields: JsonFields) -> None:
    """Raises ModelError for a field of OF_OTHERS that no reader of this architecture has read."""
    for name, neutral in OF_OTHERS.items():
        if name in fields.unread and fields.raw(name) != neutral:
            raise fields.wrong(name, f"none: {architecture} has no such field")
