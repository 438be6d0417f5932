"""Mixtures of experts: the layers that have one, the number of experts that a token goes to, and names of tensors.

A mixture routes each token to a few experts, each a feed-forward layer of its own, and sums their outputs by the
token's shares. Shared experts, which see every token, are not supported.
"""

from dataclasses import dataclass

from engine.checkpoint.json_fields import JsonFields
from kernels.routing import Gating
from wire.errors import ModelError

COUNTS = ("num_experts", "num_local_experts")
"""The spellings of the number of experts."""
SHARED = ("n_shared_experts", "shared_expert_intermediate_size")
SWIGLU = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
"""The constants of `Activation.CLAMPED_SWISH` by their fields."""


@dataclass(frozen=True, kw_only=True)
class MixtureNames:
    """The names of a mixture's tensors: `part` of a layer, in it the router, and in each expert its matrices.

    is_stacked: a tensor has the matrices of all experts, as gpt-oss stores them.
    """

    part: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    is_stacked: bool = False


MIXTRAL_NAMES = MixtureNames(part="block_sparse_moe", gate="w1", up="w3", down="w2")
QWEN_NAMES = MixtureNames()
GPT_OSS_NAMES = MixtureNames(router="router", is_stacked=True)


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """The mixtures of a model. layers: whether each layer has one. has_bias: router and matrices have biases.

    intermediate_size: the width of one expert.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    shares: Gating
    layers: tuple[bool, ...]
    names: MixtureNames
    has_bias: bool = False


def no_mixture(fields: JsonFields, _num_layers: int) -> MixtureConfig | None:
    """Implements `Family.mixture`. Raises ModelError for a configuration that names experts."""
    for name in COUNTS:
        if fields.raw(name):
            raise fields.wrong(name, "none: the architecture has no experts")
    return None


def mixtral_mixture(fields: JsonFields, num_layers: int) -> MixtureConfig:
    """Implements `Family.mixture`."""
    return _mixture(fields, 8, "intermediate_size", Gating.OF_ALL_NORMED, (True,) * num_layers, MIXTRAL_NAMES)


def qwen_mixture(fields: JsonFields, num_layers: int) -> MixtureConfig:
    """Implements `Family.mixture`: each `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    step, dense = fields.count("decoder_sparse_step", 1), fields.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(one) is not int or not 0 <= one < num_layers for one in dense):
        raise fields.wrong("mlp_only_layers", f"a list of layers below {num_layers}")
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
    shares = Gating.OF_ALL_NORMED if fields.flag("norm_topk_prob", False) else Gating.OF_ALL
    return _mixture(fields, 128, "moe_intermediate_size", shares, layers, QWEN_NAMES)


def gpt_oss_mixture(fields: JsonFields, num_layers: int) -> MixtureConfig:
    """Implements `Family.mixture`."""
    for name, constant in SWIGLU.items():
        if fields.number(name, 0.0, 1e4, constant) != constant:
            raise fields.wrong(name, f"{constant}: the kernels have no other")
    layers = (True,) * num_layers
    return _mixture(fields, 128, "intermediate_size", Gating.OF_CHOSEN, layers, GPT_OSS_NAMES, has_bias=True)


def _mixture(
    fields: JsonFields,
    default: int,
    width: str,
    shares: Gating,
    layers: tuple[bool, ...],
    names: MixtureNames,
    has_bias: bool = False,
) -> MixtureConfig:
    for name in SHARED:
        if fields.raw(name):
            raise fields.wrong(name, "none: shared experts are not supported")
    given = [name for name in COUNTS if name in fields]
    if len({fields.count(name) for name in given}) > 1:
        raise ModelError(f"config.json: {' and '.join(given)} are names of one field, and differ")
    num_experts = fields.count(given[0] if given else COUNTS[0], default)
    return MixtureConfig(
        num_experts=num_experts,
        num_chosen=fields.count("num_experts_per_tok", most=num_experts),
        intermediate_size=fields.count(width),
        shares=shares,
        layers=layers,
        has_bias=has_bias,
        names=names,
    )
