"""A row of the table of architectures: a model as data, and the functions that read its layers from config.json.

A model is biases, norms and their places, windows, rotary embeddings, factors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from engine.checkpoint.families.mixture import MixtureConfig, no_mixture
from engine.checkpoint.json_fields import JsonFields
from engine.checkpoint.rope import THETAS, UNROTATED, RopeConfig
from kernels.backend import Activation
from wire.errors import ModelError

Windows = tuple[int | None, ...]
"""How many tokens each layer sees, itself included; None for all."""
Ropes = tuple[RopeConfig, ...]
"""The rotary embedding of each layer."""
SCALARS = (1e-4, 1e4)
FULL, SLIDING = "full_attention", "sliding_attention"


class Bias(Enum):
    """When a matrix has a bias: SWITCHED by `attention_bias`, or `mlp_bias` of a feed-forward layer."""

    NEVER = auto()
    ALWAYS = auto()
    SWITCHED = auto()

    def read(self, fields: JsonFields, switch: str) -> bool:
        return self is Bias.ALWAYS or (self is Bias.SWITCHED and fields.flag(switch, False))


@dataclass(frozen=True, kw_only=True)
class Norms:
    """The norms of a layer by name, None for a norm that it has not; a norm after a product is added to states.

    of_heads: each query and key has a norm. of_whole_rows: all queries of a token have a norm, and all its keys.
    is_wide: rows are rounded once, after the product with the weights, and not before it.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    of_heads: bool = False
    of_whole_rows: bool = False
    is_wide: bool = False


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """Numbers by which a model changes its states: factors of embeddings, scores and what a layer adds, and caps.

    The decoder keeps states divided by `residual`, which every norm undoes with its epsilon divided by the square: so
    a layer adds what it computes as it is. is_rounded: the factor of embeddings has the compute dtype. scores: None for
    1 / sqrt(head_dim). logits: a divisor. norm_offset: a number added to weights of norms. score_cap, logit_cap: bounds
    c of c * tanh(x / c) for scores and logits, as in Gemma 2.
    """

    embedding: float = 1.0
    is_rounded: bool = False
    scores: float | None = None
    residual: float = 1.0
    logits: float = 1.0
    norm_offset: float = 0.0
    score_cap: float | None = None
    logit_cap: float | None = None

    @property
    def of_embeddings(self) -> float:
        """The factor of embeddings, as states are kept."""
        return self.embedding / self.residual

    def norm_eps(self, eps: float) -> float:
        """The epsilon of norms of states, as they are kept."""
        return eps / self.residual**2


def no_scalars(_fields: JsonFields) -> Scalars:
    """Implements `Family.scalars`."""
    return Scalars()


def granite_scalars(fields: JsonFields) -> Scalars:
    """Implements `Family.scalars`."""

    def read(name: str) -> float:
        return fields.number(name, *SCALARS, 1.0)

    return Scalars(
        embedding=read("embedding_multiplier"),
        scores=read("attention_multiplier"),
        residual=read("residual_multiplier"),
        logits=read("logits_scaling"),
    )


def gemma_scalars(fields: JsonFields) -> Scalars:
    """Implements `Family.scalars`."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    score_cap, logit_cap = (fields.number(name, *SCALARS) if name in fields else None for name in caps)
    return Scalars(
        embedding=fields.count("hidden_size") ** 0.5,
        is_rounded=True,
        scores=fields.number("query_pre_attn_scalar", *SCALARS, 256) ** -0.5,
        norm_offset=fields.number("norm_offset", 0.0, 1.0, 1.0),
        score_cap=score_cap,
        logit_cap=logit_cap,
    )


def no_windows(_fields: JsonFields, num_layers: int) -> Windows:
    """Implements `Family.windows`: each layer sees all tokens."""
    return (None,) * num_layers


def equal_windows(fields: JsonFields, num_layers: int) -> Windows:
    """Implements `Family.windows`: each layer has the window of `sliding_window`."""
    return (_window(fields),) * num_layers


def switched_windows(fields: JsonFields, num_layers: int) -> Windows:
    """Implements `Family.windows`: if `use_sliding_window`, by `layer_types` or from layer `max_window_layers` on."""
    first = 0 if "layer_types" in fields else fields.count("max_window_layers", least=0)
    return _switched(fields, [layer >= first for layer in range(num_layers)])


def switched_windows_of_all(fields: JsonFields, num_layers: int) -> Windows:
    """Implements `Family.windows`: if `use_sliding_window`, each layer has the window of `sliding_window`."""
    return _switched(fields, [True] * num_layers)


def windows_beside_rope(fields: JsonFields, num_layers: int) -> Windows:
    """Implements `Family.windows`: if `use_sliding_window`, by `layer_types` or in the layers without rope."""
    return _switched(fields, [not flag for flag in _rope_flags(fields, num_layers)])


def windows_of_types(fields: JsonFields, num_layers: int) -> Windows:
    """Implements `Family.windows`: by `layer_types`, or in all layers but each `sliding_window_pattern`-th."""
    window = _window(fields)
    return tuple(window if one == SLIDING else None for one in _layer_types(fields, num_layers))


def one_rope(
    fields: JsonFields,
    num_layers: int,
    max_context_len: int,
    head_dim: int,
    reads_part: bool = False,
    is_interleaved: bool = False,
) -> Ropes:
    """Implements `Family.ropes`: that of all layers. reads_part: `partial_rotary_factor` is no error."""
    section = fields.section("rope_scaling" if fields.raw("rope_scaling") else "rope_parameters")
    if FULL in section or SLIDING in section:
        raise ModelError("rotary embeddings that differ from layer to layer are not supported")
    part = fields.number("partial_rotary_factor", 0.01, 1.0, 1.0)
    part = section.number("partial_rotary_factor", 0.01, 1.0, part)
    if part != 1 and not reads_part:
        raise ModelError("rotary embedding of a part of the head (partial_rotary_factor) is not supported")
    return (RopeConfig.parse(section, fields, max_context_len, head_dim, part, is_interleaved),) * num_layers


def rope_in_some_layers(fields: JsonFields, num_layers: int, max_context_len: int, head_dim: int) -> Ropes:
    """Implements `Family.ropes`: by `no_rope_layers`, or in all layers but each `no_rope_layer_interval`-th."""
    ropes, flags = one_rope(fields, num_layers, max_context_len, head_dim), _rope_flags(fields, num_layers)
    return tuple(rope if flag else UNROTATED for rope, flag in zip(ropes, flags, strict=True))


def ropes_of_types(fields: JsonFields, num_layers: int, max_context_len: int, head_dim: int) -> Ropes:
    """Implements `Family.ropes`: layers that see all tokens have a rope of their own, layers with windows another."""
    named = fields.section("rope_parameters")
    whole = named.section(FULL) if FULL in named else fields.section("rope_scaling")
    base = "rope_local_base_freq"
    local = JsonFields({"rope_theta": fields.number(base, *THETAS)}, "config.json") if base in fields else fields
    ropes = {
        FULL: RopeConfig.parse(whole, fields, max_context_len, head_dim),
        SLIDING: RopeConfig.parse(named.section(SLIDING), local, max_context_len, head_dim),
    }
    return tuple(ropes[one] for one in _layer_types(fields, num_layers))


@dataclass(frozen=True, kw_only=True)
class Family:
    """A row of the table of architectures: which fields of config.json are switches, and defaults.

    fuses_qkv, fuses_gate: query, key and value are one tensor of a checkpoint; gate and up are one. has_sinks: each
    query head has a learned sink.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: Bias = Bias.NEVER
    output_bias: Bias = Bias.NEVER
    mlp_bias: Bias = Bias.NEVER
    norms: Norms = Norms()
    fuses_qkv: bool = False
    fuses_gate: bool = False
    activation: Activation = Activation.SILU
    windows: Callable[[JsonFields, int], Windows] = no_windows
    ropes: Callable[[JsonFields, int, int, int], Ropes] = one_rope
    scalars: Callable[[JsonFields], Scalars] = no_scalars
    mixture: Callable[[JsonFields, int], MixtureConfig | None] = no_mixture
    has_sinks: bool = False


def _window(fields: JsonFields) -> int | None:
    return fields.count("sliding_window") if "sliding_window" in fields else None


def _switched(fields: JsonFields, sliding: Sequence[bool]) -> Windows:
    """Finds the windows of layers, which slide by `layer_types`, or as given where it is absent."""
    window = _window(fields) if fields.flag("use_sliding_window", False) else None
    if "layer_types" in fields:
        sliding = [one == SLIDING for one in _layer_types(fields, len(sliding))]
        if window is None and any(sliding):
            raise ModelError("config.json: layer_types names sliding_attention, but no sliding window is in use")
    return tuple(window if one else None for one in sliding)


def _rope_flags(fields: JsonFields, num_layers: int) -> list[int]:
    flags = fields.raw("no_rope_layers")
    if flags is None:
        interval = fields.count("no_rope_layer_interval")
        return [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(flags, list) or len(flags) != num_layers or any(one not in (0, 1) for one in flags):
        raise fields.wrong("no_rope_layers", f"0 or 1 for each of {num_layers} layers")
    return flags


def _layer_types(fields: JsonFields, num_layers: int) -> list[str]:
    types = fields.raw("layer_types")
    if types is None:
        pattern = fields.count("sliding_window_pattern")
        return [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(one not in (FULL, SLIDING) for one in types):
        raise fields.wrong("layer_types", f"full_attention or sliding_attention for each of {num_layers} layers")
    return types
