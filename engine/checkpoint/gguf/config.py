"""config.json, generation_config.json and the names of tensors, from the metadata of a GGUF model.

llama.cpp's converter calls Llama, Mistral without windows, SmolLM and Mixtral `llama`, and reorders their query and key
rows, and Granite's and SmolLM3's. It writes the scaling of Llama 3 as a tensor of divisors, `rope_freqs`, which is
recognized by its numbers, LongRoPE as two tensors, and a mixture's matrices of one kind as one tensor, whose slices are
the matrices of experts.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine.checkpoint.families.family import Norms
from engine.checkpoint.families.mixture import GPT_OSS_NAMES, MIXTRAL_NAMES, QWEN_NAMES
from engine.checkpoint.families.table import FAMILIES
from engine.checkpoint.gguf.blocks import Floats, StoredTensor
from engine.checkpoint.json_fields import JsonFields
from wire.errors import ModelError

ROPE_FREQS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
DIVISORS = (ROPE_FREQS, SHORT_FACTORS, LONG_FACTORS)
"""Tensors of divisors of frequencies, which belong to config.json."""
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}
_MIXTURES = {
    "MixtralForCausalLM": MIXTRAL_NAMES,
    "Qwen3MoeForCausalLM": QWEN_NAMES,
    "GptOssForCausalLM": GPT_OSS_NAMES,
}
_TURNED = ("llama", "granite", "smollm3")
"""Architectures whose query and key rows are reordered."""
_ROTATING_A_PART = ("phi3", "glm4")
_GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Granite's factors, by llama.cpp's names."""
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""The size of either that scales scores by hidden size over heads, and not by the head: its file does not say so."""
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SINKS = "attn_sinks"
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.(\w+)\.(weight|bias)", re.ASCII)
_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_LLAMA3: dict[str, float] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def architecture_of(arch: str, has_experts: bool) -> str:
    """Returns the architecture of a file by its name in ARCHITECTURES, which Llama and Mixtral share."""
    return "MixtralForCausalLM" if arch == "llama" and has_experts else ARCHITECTURES[arch]


class GgufConfig:
    """Metadata of a GGUF model. Raises ModelError for an architecture or a feature that is not served."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor], source: str) -> None:
        self._tensors = tensors
        self._all = JsonFields(metadata, source)
        arch = self._all.text("general.architecture", "")
        if arch not in ARCHITECTURES:
            raise ModelError(
                f"{source}: architecture {arch[:64]} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        own = {key.removeprefix(f"{arch}."): value for key, value in metadata.items() if key.startswith(f"{arch}.")}
        self._own = JsonFields(own, f"{source}: {arch}")
        self._arch, self._architecture = arch, architecture_of(arch, bool(self._own.raw("expert_count")))
        self._num_heads = self._own.count("attention.head_count")
        self._num_kv_heads = self._own.count("attention.head_count_kv", self._num_heads)
        family = FAMILIES[self._architecture]
        fused = {"ffn_up": "mlp.gate_up_proj"} if family.fuses_gate else {}
        self._mixture = _MIXTURES.get(self._architecture)
        self._in_layer = _IN_LAYER | _names_of_norms(family.norms) | fused
        if self._mixture is not None:
            self._in_layer["ffn_gate_inp"] = f"{self._mixture.part}.{self._mixture.router}"
        if arch == "gpt-oss":
            self._in_layer |= {_SINKS: "self_attn.sinks", "post_attention_norm": "post_attention_layernorm"}
        self._refuse_unsupported()

    def config(self, divisors: Mapping[str, Floats]) -> dict[str, Any]:
        """Makes config.json's object; `divisors`: values of the tensors of DIVISORS that there are."""
        own, tensors = self._own, self._tensors
        hidden = own.count("embedding_length")
        head_dim = own.count("attention.key_length", max(1, hidden // self._num_heads))
        if own.count("attention.value_length", head_dim) != head_dim:
            raise own.wrong("attention.value_length", f"{head_dim}, the length of keys")
        rotated = own.count("rope.dimension_count", head_dim, head_dim)
        if rotated != head_dim and self._arch not in _ROTATING_A_PART:
            raise own.wrong("rope.dimension_count", f"{head_dim}, the whole head")
        theta, context_len = own.number("rope.freq_base", 0, math.inf, 10_000.0), own.count("context_length")
        rope = {"rope_theta": theta, **self._rope_scaling(divisors, theta, head_dim, context_len)}
        rope |= {"partial_rotary_factor": rotated / head_dim} if self._arch in _ROTATING_A_PART else {}
        return {
            "architectures": [self._architecture],
            "model_type": FAMILIES[self._architecture].model_type,
            "hidden_size": hidden,
            "intermediate_size": own.count("feed_forward_length"),
            "num_hidden_layers": own.count("block_count"),
            "num_attention_heads": self._num_heads,
            "num_key_value_heads": self._num_kv_heads,
            "head_dim": head_dim,
            "vocab_size": self._embedding().shape[0],
            "max_position_embeddings": context_len,
            "rms_norm_eps": self._rounded("attention.layer_norm_rms_epsilon"),
            "rope_parameters": rope,
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": any(f"blk.0.{name}.bias" in tensors for name in ("attn_q", "attn_output")),
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "dtype": self._embedding().kind.dtype or "bfloat16",
            **(self._gemma(hidden, head_dim, theta, rope) if self._arch in _GEMMA_27B_LAYERS else {}),
            **(self._phi3(context_len) if self._arch == "phi3" else {}),
            **{ours: self._rounded(name) for name, ours in _GRANITE.items() if name in own and self._arch == "granite"},
            **(self._experts() if self._mixture is not None else {}),
        }

    def _experts(self) -> dict[str, Any]:
        """Makes the fields of a mixture. Files of Qwen3-MoE do not say that shares are normed, as all of them are."""
        own, is_qwen = self._own, self._arch == "qwen3moe"
        fields = {
            "num_local_experts": own.count("expert_count"),
            "num_experts_per_tok": own.count("expert_used_count"),
        }
        width = own.count("expert_feed_forward_length", own.count("feed_forward_length"))
        if is_qwen:
            return {**fields, "moe_intermediate_size": width, "norm_topk_prob": True}
        window = own.count("attention.sliding_window") if self._arch == "gpt-oss" else None
        return {**fields, "intermediate_size": width, "sliding_window": window}

    def _phi3(self, context_len: int) -> dict[str, Any]:
        """Makes Phi-3's own fields of config.json."""
        trained_len = self._own.count("rope.scaling.original_context_length", context_len)
        window = self._own.raw("attention.sliding_window") or None
        return {"original_max_position_embeddings": trained_len, "sliding_window": window}

    def _rounded(self, name: str) -> float:
        """Reads a number that config.json had in decimals, and the file has as float32."""
        return float(f"{self._own.number(name, 0, math.inf):.6g}")

    def _gemma(self, hidden: int, head_dim: int, theta: float, rope: Mapping[str, Any]) -> dict[str, Any]:
        """Makes Gemma's own fields of config.json; the file has norms with 1 added."""
        own = self._own
        is_27b = own.count("block_count") == _GEMMA_27B_LAYERS[self._arch]
        caps = {"attn_logit_softcapping": own.raw("attn_logit_softcapping")}
        caps["final_logit_softcapping"] = own.raw("final_logit_softcapping")
        ropes = {"rope_parameters": None, "rope_theta": theta, "rope_scaling": rope} if self._arch == "gemma3" else {}
        return {
            "sliding_window": own.count("attention.sliding_window"),
            "query_pre_attn_scalar": hidden // self._num_heads if is_27b else head_dim,
            "norm_offset": 0.0,
            **caps,
            **ropes,
        }

    def generation_config(self, end_ids: Sequence[int]) -> dict[str, Any]:
        """Makes generation_config.json's object: the ids that end an answer, and the sampling of the authors."""
        sampling = {
            name: self._all.raw(f"general.sampling.{key}")
            for key, name in _SAMPLING.items()
            if f"general.sampling.{key}" in self._all
        }
        return {"eos_token_id": list(end_ids), **sampling}

    def our_name(self, name: str) -> str:
        """Names a tensor as Hugging Face's layout does; an unknown name stays as it is."""
        if match := _LAYER_TENSOR.fullmatch(name):
            layer, part, kind = match.groups()
            ours = f"model.layers.{int(layer)}.{self._in_layer.get(part, part)}.{kind}"
            return ours.removesuffix(".weight") if part == _SINKS else ours
        stem, _, kind = name.rpartition(".")
        return f"{_TOP[stem]}.{kind}" if stem in _TOP else name

    def places(self, name: str, tensor: StoredTensor) -> dict[str, StoredTensor]:
        """Maps our names to the parts of a tensor: the matrices or biases of single experts, or all of it."""
        match, names = _LAYER_TENSOR.fullmatch(name), self._mixture
        matrices = {} if names is None else {"gate": names.gate, "up": names.up, "down": names.down}
        stem = match[2].removeprefix("ffn_").removesuffix("_exps") if match and match[2].endswith("_exps") else ""
        if match is None or names is None or stem not in matrices:
            return {self.our_name(name): replace(tensor, heads=self._turned_heads(name, tensor))}
        num_experts = self._own.count("expert_count")
        if len(tensor.shape) < 2 or tensor.shape[0] != num_experts:
            raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, expected {num_experts} experts first")
        shape, num_bytes = tensor.shape[1:], tensor.num_bytes // num_experts
        part = f"model.layers.{int(match[1])}.{names.part}.experts"
        return {
            f"{part}.{expert}.{matrices[stem]}.{match[3]}": StoredTensor(
                tensor.kind, shape, tensor.offset + expert * num_bytes
            )
            for expert in range(num_experts)
        }

    def _turned_heads(self, name: str, tensor: StoredTensor) -> int:
        """Returns the number of heads whose rows llama.cpp's converter reordered; 0 for rows in our order."""
        match = _LAYER_TENSOR.fullmatch(name)
        turned = {"attn_q": self._num_heads, "attn_k": self._num_kv_heads} if self._arch in _TURNED else {}
        heads = turned.get(match[2], 0) if match else 0
        if heads and tensor.shape[0] % (2 * heads):
            raise ModelError(f"tensor {name} has {tensor.shape[0]} rows, no even number for each of {heads} heads")
        return heads

    def _embedding(self) -> StoredTensor:
        tensor = self._tensors.get("token_embd.weight")
        if tensor is None or len(tensor.shape) != 2:
            raise ModelError("the tensor token_embd.weight is missing, or no matrix")
        return tensor

    def _refuse_unsupported(self) -> None:
        if self._own.raw("expert_count") and self._mixture is None:
            raise self._own.wrong("expert_count", "none: the architecture has no experts")
        for name in ("expert_shared_count", "expert_shared_feed_forward_length"):
            if self._own.raw(name):
                raise self._own.wrong(name, "none: shared experts are not supported")
        if self._own.raw("attention.sliding_window") and self._arch not in (*_GEMMA_27B_LAYERS, "gpt-oss", "phi3"):
            raise self._own.wrong("attention.sliding_window", "none: of these files windows are not read")

    def _rope_scaling(
        self, divisors: Mapping[str, Floats], theta: float, head_dim: int, context_len: int
    ) -> dict[str, Any]:
        own = self._own
        if SHORT_FACTORS in divisors or LONG_FACTORS in divisors:
            if missing := {SHORT_FACTORS, LONG_FACTORS} - divisors.keys():
                raise ModelError(f"the tensor {min(missing)} is missing beside the other factors of rope")
            factors = {f"{kind}_factor": divisors[f"rope_factors_{kind}.weight"].tolist() for kind in ("short", "long")}
            return {"rope_type": "longrope", "attention_factor": own.raw("rope.scaling.attn_factor"), **factors}
        if own.number("rope.scaling.attn_factor", 0, math.inf, 1.0) != 1:
            raise own.wrong("rope.scaling.attn_factor", "1: other ones are not supported")
        if ROPE_FREQS in divisors:
            return _llama3_scaling(divisors[ROPE_FREQS], theta, head_dim)
        # As llama.cpp reads them: a factor without a type is linear, and older files name it otherwise.
        kind = own.text("rope.scaling.type", "linear")
        factor = own.number("rope.scaling.factor", 0, math.inf, own.number("rope.scale_linear", 0, math.inf, 1.0))
        if kind == "none" or (kind == "linear" and factor == 1):
            return {"rope_type": "default"}
        if kind == "longrope":
            raise own.wrong("rope.scaling.type", f"{SHORT_FACTORS} and {LONG_FACTORS} beside it")
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            trained_len = own.count("rope.scaling.original_context_length", context_len)
            scaling["original_max_position_embeddings"] = trained_len
            scaling["truncate"] = self._arch != "gpt-oss"
        return scaling


def _names_of_norms(norms: Norms) -> dict[str, str]:
    """Maps llama.cpp's names of a layer's norms to an architecture's names."""
    names = {
        "attn_norm": norms.before_attention,
        "post_attention_norm": norms.after_attention,
        "ffn_norm": norms.before_mlp,
        "post_ffw_norm": norms.after_mlp,
    }
    return {theirs: ours for theirs, ours in names.items() if ours is not None}


def _llama3_scaling(divisors: Floats, theta: float, head_dim: int) -> dict[str, Any]:
    """Finds Llama 3's factor in its divisors of frequencies. Raises ModelError for the divisors of another scaling."""
    low, high, trained_len = _LLAMA3.values()
    factor = float(divisors.max())
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = ((trained_len / wavelengths - low) / (high - low)).clip(0, 1)
    if divisors.shape != smooth.shape or not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
        raise ModelError(f"tensor {ROPE_FREQS} has divisors that are not of Llama 3's scaling")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
