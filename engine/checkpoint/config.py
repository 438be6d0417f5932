"""A model's configuration, from its config.json.

One decoder serves the architectures of engine/checkpoint/families/table.py, which differ in data only. Keys are read as
transformers 4 and 5 spell them; an absent key has the default of transformers' configuration class.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from engine.checkpoint.families.family import Family, Ropes, Scalars, Windows
from engine.checkpoint.families.mixture import MixtureConfig
from engine.checkpoint.families.table import FAMILIES, parse_architecture, refuse_fields_of_others
from engine.checkpoint.json_fields import JsonFields
from engine.checkpoint.rope import MAX_CONTEXT, MIN_CONTEXT
from kernels.backend import Activation
from wire.errors import ConfigError, ModelError
from wire.kv_policy import KVPolicy, Sinks
from wire.layout import INT4_HEAD_STEP, KV_DTYPES, KVLayout

DTYPES = ("float32", "bfloat16", "float16")
MAX_LAYERS = 1024
SINKS_CONTEXT_LEN = 1 << 20
"""Context length of a model with sinks, whose KV has constant size; the block table takes a quarter of a MiB."""
RMS_NORM_EPS = (1e-12, 0.1)
_ACTIVATIONS = {
    Activation.SILU: ("silu", "swish"),
    Activation.GELU_TANH: ("gelu_pytorch_tanh",),
    Activation.CLAMPED_SWISH: ("silu", "swish"),
}


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Heads of all layers. `windows`: for each layer the tokens that a token sees, itself included; None for all.

    num_sinks: first tokens that each layer sees besides its window.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: Windows
    num_sinks: int = 0

    @property
    def window(self) -> int | None:
        """The widest window; None if a layer has none."""
        return None if None in self.windows else max(window for window in self.windows if window is not None)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(AttentionShape):
    """Attention of all layers of the native decoder. scale: multiplies scores."""

    scale: float
    qkv_bias: bool
    output_bias: bool

    @classmethod
    def parse(
        cls, family: Family, fields: JsonFields, hidden_size: int, num_layers: int, scale: float | None
    ) -> "AttentionConfig":
        num_heads = fields.count("num_attention_heads")
        num_kv_heads = fields.count("num_key_value_heads", num_heads)
        head_dim = fields.count("head_dim", max(1, hidden_size // num_heads))
        if num_heads % num_kv_heads:
            raise fields.wrong("num_key_value_heads", f"a divisor of {num_heads} attention heads")
        if head_dim % 2:
            raise ModelError(f"a head of {head_dim} dimensions cannot be rotated: it must be even")
        return cls(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            qkv_bias=family.qkv_bias.read(fields, "attention_bias"),
            output_bias=family.output_bias.read(fields, "attention_bias"),
            windows=family.windows(fields, num_layers),
        )


@dataclass(frozen=True, kw_only=True)
class ServedConfig:
    """A decoder-only model, native or not. `dtype` is the checkpoint's own; other files may name further end tokens.

    is_native: the native decoder runs it, in which no row's result depends on other rows.
    """

    is_native: ClassVar[bool] = False

    architecture: str
    vocab_size: int
    num_layers: int
    max_context_len: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    attention: AttentionShape

    def keeping(self, policy: KVPolicy) -> Self:
        """Returns the model under a KV policy. Raises ConfigError if the model cannot have sinks."""
        if isinstance(policy, Sinks):
            raise ConfigError(f"kv_policy {policy}: queries of {self.architecture} cannot be turned back to sinks")
        return self

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


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ServedConfig):
    """A model that the native decoder runs. layer_ropes: the rotary embedding of each layer.

    intermediate_size: the width of dense feed-forward layers.
    """

    is_native: ClassVar[bool] = True

    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    mlp_bias: bool
    tied_embeddings: bool
    attention: AttentionConfig
    layer_ropes: Ropes
    scalars: Scalars
    mixture: MixtureConfig | None

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    @property
    def ropes(self) -> Ropes:
        """The rotary embeddings that some layer has, each once."""
        return tuple(dict.fromkeys(self.layer_ropes))

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """Parses the object in config.json. Raises ModelError, naming the key, for a wrong or unsupported value."""
        architecture = parse_architecture(JsonFields(values, "config.json"))
        family = FAMILIES[architecture]
        fields = JsonFields({**family.defaults, **values}, "config.json")
        _refuse_unsupported(family, fields)
        hidden_size = fields.count("hidden_size")
        num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
        max_context_len = fields.count("max_position_embeddings", most=MAX_CONTEXT, least=MIN_CONTEXT)
        vocab_size = fields.count("vocab_size")
        scalars = family.scalars(fields)
        attention = AttentionConfig.parse(family, fields, hidden_size, num_layers, scalars.scores)
        ropes = family.ropes(fields, num_layers, max_context_len, attention.head_dim)
        config = cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.count("intermediate_size"),
            num_layers=num_layers,
            max_context_len=min(max_context_len, *(rope.scaling.max_len for rope in ropes)),
            rms_norm_eps=fields.number("rms_norm_eps", *RMS_NORM_EPS, 1e-6),
            mlp_bias=family.mlp_bias.read(fields, "mlp_bias"),
            tied_embeddings=fields.flag("tie_word_embeddings", False),
            dtype=parse_dtype(fields),
            eos_token_ids=parse_eos(fields, vocab_size),
            attention=attention,
            layer_ropes=ropes,
            scalars=scalars,
            mixture=family.mixture(fields, num_layers),
        )
        refuse_fields_of_others(architecture, fields)
        return config

    def keeping(self, policy: KVPolicy) -> Self:
        """Returns the model under a KV policy. With sinks all layers have the policy's window, and the context is long.

        Raises ConfigError if the model cannot have sinks.
        """
        if not isinstance(policy, Sinks):
            return self
        if self.attention.windows != (None,) * self.num_layers:
            raise ConfigError(f"kv_policy {policy}: the model has windows of its own")
        if len(self.ropes) > 1 or not self.ropes[0].part:
            raise ConfigError(f"kv_policy {policy}: the model has layers without a rotary embedding")
        if policy.num_sinks + policy.window > self.max_context_len:
            raise ConfigError(f"kv_policy {policy}: more than the model's context of {self.max_context_len} tokens")
        windows = (policy.window,) * self.num_layers
        attention = replace(self.attention, windows=windows, num_sinks=policy.num_sinks)
        return replace(self, attention=attention, max_context_len=max(self.max_context_len, SINKS_CONTEXT_LEN))


def parse_eos(fields: JsonFields, vocab_size: int) -> tuple[int, ...]:
    """Reads the ids of `eos_token_id`: none, one or a list. Raises ModelError for an id beyond the vocabulary."""
    value = fields.raw("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < vocab_size for one in ids):
        raise fields.wrong("eos_token_id", f"a token id below {vocab_size}, or a list of them")
    return tuple(ids)


def _refuse_unsupported(family: Family, fields: JsonFields) -> None:
    names = _ACTIVATIONS[family.activation]
    key = "hidden_activation" if "hidden_activation" in family.defaults else "hidden_act"
    if fields.text(key, names[0]) not in names:
        raise fields.wrong(key, names[0])
    if fields.flag("use_bidirectional_attention", False):
        raise fields.wrong("use_bidirectional_attention", "false: a token's KV would depend on the tokens after it")


def parse_dtype(fields: JsonFields) -> str:
    """Reads the checkpoint's own dtype. Raises ModelError for an unknown one."""
    dtype = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    if dtype not in DTYPES:
        raise fields.wrong("dtype" if "dtype" in fields else "torch_dtype", " or ".join(DTYPES))
    return dtype
