import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.checkpoint.json_fields import JsonFields
from engine.checkpoint.rope import RopeConfig
from engine.model.decoder import Rope
from wire.errors import ModelError

HEAD_DIM = 32
MAX_LEN = 4096
CPU = torch.device("cpu")

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WRONG_THETAS = (1e-300, 0, 1, 9.9, -10_000.0, 1e13, 1e300, math.inf, math.nan)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "integer-theta": {"rope_type": "default", "rope_theta": 1_000_000},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {**LLAMA3, "rope_theta": 500_000.0, "original_max_position_embeddings": 512},
    "llama3-of-whole-length": LLAMA3,
    "yarn": YARN,
    "yarn-attention-factor": {**YARN, "attention_factor": 0.75},
    "yarn-mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.1},
    "yarn-one-mscale": {**YARN, "mscale": 0.707},
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-not-truncated": {**YARN, "truncate": False},
    "yarn-steep": {**YARN, "beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
}


def rope(parameters: dict[str, Any], dtype: torch.dtype = torch.float32) -> Rope:
    return Rope(parse({"rope_parameters": parameters}), HEAD_DIM, dtype, CPU)


def parse(config: dict[str, Any]) -> RopeConfig:
    return RopeConfig.parse(JsonFields(config, "config.json"), MAX_LEN)


def peer(parameters: dict[str, Any]) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=2 * HEAD_DIM,
            num_attention_heads=2,
            max_position_embeddings=MAX_LEN,
            rope_parameters=dict(parameters),
        )
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PARAMETERS)
def test_angles_equal_the_ones_of_transformers_bit_by_bit(name: str, dtype: torch.dtype) -> None:
    positions = torch.arange(0, MAX_LEN, 7)
    rotation = rope(PARAMETERS[name], dtype).rotation(positions)
    cos, sin = peer(PARAMETERS[name])(torch.empty(0, dtype=dtype), positions[None])
    assert torch.equal(rotation.cos[:, 0], cos[0])
    assert torch.equal(rotation.sin[:, 0], sin[0])


def test_every_kind_has_angles_of_its_own() -> None:
    last = torch.tensor([MAX_LEN - 1])
    name_to_angles = {name: tuple(rope(PARAMETERS[name]).rotation(last).cos.flatten().tolist()) for name in PARAMETERS}
    # A lone mscale is ignored, as transformers does.
    assert name_to_angles.pop("yarn-one-mscale") == name_to_angles["yarn"]
    assert len(set(name_to_angles.values())) == len(PARAMETERS) - 1


def test_rotates_as_transformers_does() -> None:
    states = torch.randn(9, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    rotation = rope(PARAMETERS["default"]).rotation(torch.arange(9))
    expected, _ = apply_rotary_pos_emb(states, states, rotation.cos[:, 0], rotation.sin[:, 0])
    assert torch.equal(rotation.apply(states), expected)


def test_angles_of_a_position_do_not_depend_on_the_batch() -> None:
    together = rope(YARN).rotation(torch.arange(MAX_LEN))
    alone = rope(YARN).rotation(torch.tensor([4001]))
    assert torch.equal(together.cos[4001], alone.cos[0])


@pytest.mark.parametrize(
    "older",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_transformers_4_and_5_spell_the_same(older: dict[str, Any]) -> None:
    assert parse(older) == parse({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}})


def test_without_any_parameters_rope_is_plain() -> None:
    assert parse({}) == parse({"rope_scaling": None, "rope_theta": 10_000.0})


def test_yarn_takes_its_factor_from_the_lengths_where_none_is_named() -> None:
    named = parse({"rope_scaling": YARN})
    assert parse({"rope_scaling": {**YARN, "factor": None}}) == named
    outside = {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 1024}
    assert parse(outside) == named


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
def test_angles_that_depend_on_the_total_length_are_refused_with_the_reason(kind: str) -> None:
    with pytest.raises(ModelError, match="total length"):
        parse({"rope_scaling": {"type": kind, "factor": 2.0}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "mrope"}}, "supported: default, linear, llama3, yarn"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor is -1"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor is nan"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor is True"),
        ({"rope_scaling": [1]}, "expected an object"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "more than low_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0, expected a number from 0.01 to 10000"),
        ({"rope_scaling": {"type": "linear", "factor": 1e30}}, "factor is 1e"),
        ({"rope_scaling": {**LLAMA3, "factor": math.inf}}, "factor is inf"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 0}}, "low_freq_factor is 0"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1e9}}, "high_freq_factor is 1000000000.0"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 1}}, "original_max_position_embeddings is 1"),
        ({"rope_scaling": {**YARN, "factor": -4}}, "factor is -4"),
        ({"rope_scaling": {**YARN, "attention_factor": 1e9}}, "attention_factor is 1000000000.0"),
        ({"rope_scaling": {**YARN, "beta_fast": -32}}, "beta_fast is -32"),
        ({"rope_scaling": {**YARN, "beta_slow": math.nan}}, "beta_slow is nan"),
        ({"rope_scaling": {**YARN, "mscale": 1e30}}, "mscale is 1e"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, "original_max_position_embeddings is 0"),
        ({"rope_theta": "10000"}, "rope_theta is 10000"),
        *(({"rope_theta": theta}, "rope_theta is .*from 10 to 1e") for theta in WRONG_THETAS),
        *(({"rope_parameters": {"rope_theta": theta}}, "rope_parameters: rope_theta is ") for theta in WRONG_THETAS),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer to layer"),
    ],
)
def test_what_cannot_be_served_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(config)
