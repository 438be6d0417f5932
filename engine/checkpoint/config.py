"""A model's configuration, from its config.json.

One decoder serves four architectures, which differ in data only:

| architecture       | biases                                     | q/k norm | sliding window                          |
|--------------------|--------------------------------------------|----------|-----------------------------------------|
| LlamaForCausalLM   | `attention_bias`: q, k, v, o; `mlp_bias`   | no       | no layer                                |
| MistralForCausalLM | none                                       | no       | all layers                              |
| Qwen2ForCausalLM   | q, k, v                                    | no       | by `layer_types` or `max_window_layers` |
| Qwen3ForCausalLM   | `attention_bias`: q, k, v, o               | yes      | by `layer_types` or `max_window_layers` |

Keys are read as transformers 4 and 5 spell them; an absent key has the default of transformers' configuration class.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.checkpoint.json_fields import JsonFields
from engine.checkpoint.rope import MAX_CONTEXT, MIN_CONTEXT, RopeConfig
from wire.errors import ConfigError, ModelError
from wire.kv_policy import KVPolicy, Sinks
from wire.layout import INT4_HEAD_STEP, KV_DTYPES, KVLayout

DTYPES = ("float32", "bfloat16", "float16")
MAX_LAYERS = 1024
SINKS_CONTEXT_LEN = 1 << 20
"""Context length of a model with sinks, whose KV has constant size; the block table takes a quarter of a MiB."""
RMS_NORM_EPS = (1e-12, 0.1)

_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "eos_token_id": None}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"eos_token_id": 2},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096, "eos_token_id": 2},
    "Qwen2ForCausalLM": _QWEN_DEFAULTS,
    "Qwen3ForCausalLM": _QWEN_DEFAULTS | {"head_dim": 128},
}


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention of all layers. `windows`: for each layer the tokens that a token sees, itself included; None for all.

    num_sinks: first tokens that each layer sees besides its window.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    num_sinks: int = 0

    @property
    def window(self) -> int | None:
        """The widest window; None if a layer has none."""
        return None if None in self.windows else max(window for window in self.windows if window is not None)

    @classmethod
    def parse(cls, architecture: str, fields: JsonFields, hidden_size: int, num_layers: int) -> "AttentionConfig":
        num_heads = fields.count("num_attention_heads")
        num_kv_heads = fields.count("num_key_value_heads", num_heads)
        head_dim = fields.count("head_dim", max(1, hidden_size // num_heads))
        if num_heads % num_kv_heads:
            raise fields.wrong("num_key_value_heads", f"a divisor of {num_heads} attention heads")
        if head_dim % 2:
            raise ModelError(f"a head of {head_dim} dimensions cannot be rotated: it must be even")
        has_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and fields.flag("attention_bias", False)
        return cls(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            qkv_bias=has_bias or architecture == "Qwen2ForCausalLM",
            output_bias=has_bias,
            qk_norm=architecture == "Qwen3ForCausalLM",
            windows=_parse_windows(architecture, fields, num_layers),
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only model. `dtype` is the checkpoint's own; other files may name further `eos_token_ids`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    max_context_len: int
    rms_norm_eps: float
    mlp_bias: bool
    tied_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    attention: AttentionConfig
    rope: RopeConfig

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Parses the object in config.json. Raises ModelError, naming the key, for a wrong or unsupported value."""
        architecture = _parse_architecture(JsonFields(config, "config.json"))
        fields = JsonFields({**_DEFAULTS[architecture], **config}, "config.json")
        _refuse_unsupported(fields)
        hidden_size = fields.count("hidden_size")
        num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
        max_context_len = fields.count("max_position_embeddings", most=MAX_CONTEXT, least=MIN_CONTEXT)
        vocab_size = fields.count("vocab_size")
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.count("intermediate_size"),
            num_layers=num_layers,
            max_context_len=max_context_len,
            rms_norm_eps=fields.number("rms_norm_eps", *RMS_NORM_EPS, 1e-6),
            mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias", False),
            tied_embeddings=fields.flag("tie_word_embeddings", False),
            dtype=_parse_dtype(fields),
            eos_token_ids=parse_eos(fields, vocab_size),
            attention=AttentionConfig.parse(architecture, fields, hidden_size, num_layers),
            rope=RopeConfig.parse(fields, max_context_len),
        )

    def keeping(self, policy: KVPolicy) -> "ModelConfig":
        """Returns the model under a KV policy. With sinks all layers have the policy's window, and the context is long.

        Raises ConfigError if the model cannot have sinks.
        """
        if not isinstance(policy, Sinks):
            return self
        if self.attention.windows != (None,) * self.num_layers:
            raise ConfigError(f"kv_policy {policy}: the model has windows of its own")
        if policy.num_sinks + policy.window > self.max_context_len:
            raise ConfigError(f"kv_policy {policy}: more than the model's context of {self.max_context_len} tokens")
        windows = (policy.window,) * self.num_layers
        attention = replace(self.attention, windows=windows, num_sinks=policy.num_sinks)
        return replace(self, attention=attention, max_context_len=max(self.max_context_len, SINKS_CONTEXT_LEN))

    def kv_layout(self, dtype: str, block_size: int, kv_dtype: str = "auto") -> KVLayout:
        """Describes a block of this model's KV. `dtype`: the compute dtype.

        Raises ConfigError for a `kv_dtype` that is unknown, or that does not fit the heads' size.
        """
        if kv_dtype not in KV_DTYPES:
            raise ConfigError(f"unknown KV dtype {kv_dtype[:64]}; known: {', '.join(KV_DTYPES)}")
        quantization = "none" if kv_dtype == "auto" else kv_dtype
        attention = self.attention
        if attention.num_sinks and (attention.window or 0) < block_size:
            raise ConfigError(
                f"kv_policy: a window of {attention.window} tokens is shorter than a block of {block_size}"
            )
        layout = KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            block_size=block_size,
            dtype=dtype,
            quantization=quantization,
            window=attention.window,
            num_sinks=attention.num_sinks,
        )
        if layout.has_open_blocks and layout.head_dim % INT4_HEAD_STEP:
            problem = f"int4 takes heads of a multiple of {INT4_HEAD_STEP} numbers, not {attention.head_dim}"
            raise ConfigError(f"model.kv_dtype: {problem}")
        return layout


def parse_eos(fields: JsonFields, vocab_size: int) -> tuple[int, ...]:
    """Reads the ids of `eos_token_id`: none, one or a list. Raises ModelError for an id beyond the vocabulary."""
    value = fields.raw("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < vocab_size for one in ids):
        raise fields.wrong("eos_token_id", f"a token id below {vocab_size}, or a list of them")
    return tuple(ids)


def _parse_architecture(fields: JsonFields) -> str:
    named = fields.raw("architectures")
    if isinstance(named, list) and named:
        architecture = str(named[0])
    else:
        model_type = fields.text("model_type", "unknown")
        architecture = _MODEL_TYPES.get(model_type, model_type)
    if architecture not in _DEFAULTS:
        raise ModelError(f"architecture {architecture[:64]} is not supported; supported: {', '.join(_DEFAULTS)}")
    return architecture


def _refuse_unsupported(fields: JsonFields) -> None:
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.wrong("hidden_act", "silu")


def _parse_dtype(fields: JsonFields) -> str:
    dtype = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    if dtype not in DTYPES:
        raise fields.wrong("dtype" if "dtype" in fields else "torch_dtype", " or ".join(DTYPES))
    return dtype


def _parse_windows(architecture: str, fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        return (_parse_window(fields),) * num_layers
    window = _parse_window(fields) if fields.flag("use_sliding_window", False) else None
    return tuple(window if sliding else None for sliding in _parse_sliding_layers(fields, num_layers, window))


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
