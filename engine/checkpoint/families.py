"""The architectures that the native decoder serves, and which field of their config.json is which switch.

| architecture       | biases, as its config.json says            | windows, else                        |
|--------------------|--------------------------------------------|--------------------------------------|
| LlamaForCausalLM   | `attention_bias`: q, k, v, o; `mlp_bias`   | none                                 |
| MistralForCausalLM | none                                       | all layers                           |
| Qwen2ForCausalLM   | q, k, v always                             | `layer_types` or `max_window_layers` |
| Qwen3ForCausalLM   | `attention_bias`: q, k, v, o               | the same; norms of q and k           |
| GraniteForCausalLM | `attention_bias`: q, k, v, o; `mlp_bias`   | none; `Scalars`                      |
| SmolLM3ForCausalLM | `attention_bias`: q, k, v, o; `mlp_bias`   | `layer_types`; layers without rope   |
| Phi3ForCausalLM    | none                                       | all; fused weights, part of a head   |

An absent key has the default of transformers' configuration class.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.checkpoint.json_fields import JsonFields
from wire.errors import ModelError

Windows = tuple[int | None, ...]
"""How many tokens each layer sees, itself included; None for all."""
SCALARS = (1e-4, 1e4)


@dataclass(frozen=True)
class Scalars:
    """Factors of a model's states, as Granite has them: of embeddings, scores, what a layer adds, and logits.

    The decoder keeps states divided by `residual`, which every norm undoes with its epsilon divided by the square: so
    a layer adds what it computes as it is. `scores`: None for 1 / sqrt(head_dim).
    """

    embedding: float = 1.0
    scores: float | None = None
    residual: float = 1.0
    logits: float = 1.0

    @property
    def of_embeddings(self) -> float:
        """The factor of embeddings, as states are kept."""
        return self.embedding / self.residual

    def norm_eps(self, eps: float) -> float:
        """The epsilon of norms of states, as they are kept."""
        return eps / self.residual**2

    @classmethod
    def parse(cls, fields: JsonFields) -> "Scalars":
        names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
        return cls(*(fields.number(name, *SCALARS, 1.0) for name in names))


def no_windows(_fields: JsonFields, num_layers: int) -> Windows:
    """Implements `Family.windows`: each layer sees all tokens."""
    return (None,) * num_layers


def equal_windows(fields: JsonFields, num_layers: int) -> Windows:
    """Implements `Family.windows`: each layer has the window of `sliding_window`."""
    return (_parse_window(fields),) * num_layers


def windows_of_types(fields: JsonFields, num_layers: int) -> Windows:
    """Implements `Family.windows`: if `use_sliding_window`, layers by `layer_types` or from `max_window_layers` on."""
    window = _parse_window(fields) if fields.flag("use_sliding_window", False) else None
    return tuple(window if sliding else None for sliding in _parse_sliding_layers(fields, num_layers, window))


def all_rotated(_fields: JsonFields, num_layers: int) -> Sequence[bool]:
    """Implements `Family.rotated`: each layer rotates its queries and keys."""
    return (True,) * num_layers


def rotated_of_flags(fields: JsonFields, num_layers: int) -> Sequence[bool]:
    """Implements `Family.rotated`: by `no_rope_layers`, or all layers but each `no_rope_layer_interval`-th."""
    flags = fields.raw("no_rope_layers")
    if flags is None:
        interval = fields.count("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(flags, list) or len(flags) != num_layers or any(one not in (0, 1) for one in flags):
        raise fields.wrong("no_rope_layers", f"0 or 1 for each of {num_layers} layers")
    return [bool(one) for one in flags]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What distinguishes an architecture.

    has_qkv_bias: without a switch. reads_attention_bias, reads_mlp_bias: these fields are switches. is_fused: query,
    key and value are one tensor, gate and up another. rotates_part: reads `partial_rotary_factor`.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    has_qk_norm: bool = False
    is_fused: bool = False
    rotates_part: bool = False
    windows: Callable[[JsonFields, int], Windows] = no_windows
    rotated: Callable[[JsonFields, int], Sequence[bool]] = all_rotated
    scalars: Callable[[JsonFields], Scalars] = lambda _fields: Scalars()


_QWEN: dict[str, Any] = {
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "eos_token_id": None,
}
_SMOLLM3: dict[str, Any] = {
    "num_key_value_heads": 4,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
    "eos_token_id": 128001,
    "max_window_layers": 0,
}
FAMILIES = {
    "LlamaForCausalLM": Family(
        model_type="llama", defaults={"eos_token_id": 2}, reads_attention_bias=True, reads_mlp_bias=True
    ),
    "MistralForCausalLM": Family(
        model_type="mistral",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, "eos_token_id": 2},
        windows=equal_windows,
    ),
    "Qwen2ForCausalLM": Family(model_type="qwen2", defaults=_QWEN, has_qkv_bias=True, windows=windows_of_types),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        defaults=_QWEN | {"head_dim": 128},
        reads_attention_bias=True,
        has_qk_norm=True,
        windows=windows_of_types,
    ),
    "GraniteForCausalLM": Family(
        model_type="granite",
        defaults={"eos_token_id": 2},
        reads_attention_bias=True,
        reads_mlp_bias=True,
        scalars=Scalars.parse,
    ),
    "SmolLM3ForCausalLM": Family(
        model_type="smollm3",
        defaults=_SMOLLM3,
        reads_attention_bias=True,
        reads_mlp_bias=True,
        windows=windows_of_types,
        rotated=rotated_of_flags,
    ),
    "Phi3ForCausalLM": Family(
        model_type="phi3",
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "eos_token_id": 32000},
        is_fused=True,
        rotates_part=True,
        windows=equal_windows,
    ),
}


def parse_architecture(fields: JsonFields) -> str:
    """Finds the architecture that config.json names. Raises ModelError for one that is not served."""
    named = fields.raw("architectures")
    if isinstance(named, list) and named:
        architecture = str(named[0])
    else:
        model_type = fields.text("model_type", "unknown")
        architecture = next((name for name, one in FAMILIES.items() if one.model_type == model_type), model_type)
    if architecture not in FAMILIES:
        raise ModelError(f"architecture {architecture[:64]} is not supported; supported: {', '.join(FAMILIES)}")
    return architecture


def _parse_window(fields: JsonFields) -> int | None:
    return fields.count("sliding_window") if "sliding_window" in fields else None


def _parse_sliding_layers(fields: JsonFields, num_layers: int, window: int | None) -> list[bool]:
    layer_types = fields.raw("layer_types")
    if layer_types is None:
        first = fields.raw("max_window_layers")
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise fields.wrong("max_window_layers", "an integer from 0")
        return [layer >= first for layer in range(num_layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(layer_types, list) or len(layer_types) != num_layers or any(t not in known for t in layer_types):
        raise fields.wrong("layer_types", f"full_attention or sliding_attention for each of {num_layers} layers")
    if window is None and "sliding_attention" in layer_types:
        raise ModelError("config.json: layer_types names sliding_attention, but no sliding window is in use")
    return [layer_type == "sliding_attention" for layer_type in layer_types]
