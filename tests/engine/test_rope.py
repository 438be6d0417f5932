import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.checkpoint.families.family import one_rope
from engine.checkpoint.json_fields import JsonFields
from engine.checkpoint.rope import RopeConfig, RopeScaling
from engine.model.angles import FarAngles, make_angles
from kernels.backend import Angles
from wire.errors import ModelError

HEAD_DIM = 32
MAX_LEN = 4096
CPU = torch.device("cpu")

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WRONG_THETAS = (1e-300, 0, 1, 9.9, -10_000.0, 1e13, 1e300, math.inf, math.nan)
LONG: dict[str, Any] = {"type": "longrope", "short_factor": [1.0 + 0.25 * index for index in range(HEAD_DIM // 2)]}
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


def angles(parameters: dict[str, Any]) -> Angles:
    return make_angles([parse({"rope_parameters": parameters})], HEAD_DIM, MAX_LEN, CPU)


def parse(config: dict[str, Any]) -> RopeConfig:
    [rope] = one_rope(JsonFields(config, "config.json"), 1, MAX_LEN, HEAD_DIM)
    return rope


def peer(parameters: dict[str, Any]) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=2 * HEAD_DIM,
            num_attention_heads=2,
            max_position_embeddings=MAX_LEN,
            rope_parameters=dict(parameters),
        )
    )


@pytest.mark.parametrize("name", PARAMETERS)
def test_angles_by_digits(name: str) -> None:
    """Near ones differ from a table's by its own rounding; far ones are right, and the same bits in any batch."""
    config = parse({"rope_parameters": PARAMETERS[name]})
    far, factor = FarAngles(config, HEAD_DIM, 1 << 20, 63, CPU), config.scaling.attention_factor
    near = far.at(torch.arange(MAX_LEN))
    torch.testing.assert_close(near.sines, angles(PARAMETERS[name]).sines, atol=4e-4, rtol=0)
    positions = torch.tensor([0, 63, 64, 1023, 1024, 123_456, (1 << 20) - 1])
    found, radians = far.at(positions), positions[:, None] * config.frequencies(HEAD_DIM).double()
    torch.testing.assert_close(found.cosines.double(), radians.cos() * factor, atol=2e-7, rtol=0)
    assert found.turns is not None
    turned = (positions - 63).clamp(min=0)[:, None] * config.frequencies(HEAD_DIM).double()
    torch.testing.assert_close(found.turns.sines.double(), turned.sin(), atol=2e-7, rtol=0)
    alone = Angles(torch.empty(2, HEAD_DIM // 2), torch.empty(2, HEAD_DIM // 2), near)
    far.write(positions[5:6], alone)
    assert torch.equal(alone.cosines[0], found.cosines[5])


@pytest.mark.parametrize("name", PARAMETERS)
def test_frequencies_equal_the_ones_of_transformers_bit_by_bit(name: str) -> None:
    config = parse({"rope_parameters": PARAMETERS[name]})
    assert torch.equal(config.frequencies(HEAD_DIM), peer(PARAMETERS[name]).inv_freq)


@pytest.mark.parametrize("name", PARAMETERS)
def test_cosines_and_sines_equal_transformers_to_the_last_place(name: str) -> None:
    """transformers takes them in float32, where they depend on a position's place in a tensor."""
    ours = angles(PARAMETERS[name])
    cos, sin = peer(PARAMETERS[name])(torch.empty(0), torch.arange(MAX_LEN)[None])
    for table, expected in ((ours.cosines, cos), (ours.sines, sin)):
        torch.testing.assert_close(table, expected[0, :, : HEAD_DIM // 2], rtol=0, atol=2.0**-23)


def test_every_kind_has_angles_of_its_own() -> None:
    name_to_angles = {name: tuple(angles(PARAMETERS[name]).cosines[-1].tolist()) for name in PARAMETERS}
    # A lone mscale is ignored, as transformers does.
    assert name_to_angles.pop("yarn-one-mscale") == name_to_angles["yarn"]
    assert len(set(name_to_angles.values())) == len(PARAMETERS) - 1


def test_angles_of_a_position_do_not_depend_on_the_length_of_the_table() -> None:
    whole, part = angles(YARN), make_angles([parse({"rope_parameters": YARN})], HEAD_DIM, 4003, CPU)
    assert torch.equal(whole.cosines[:4003], part.cosines)
    assert torch.equal(whole.sines[:4003], part.sines)


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


def test_angles_that_depend_on_the_total_length_are_refused_with_the_reason() -> None:
    with pytest.raises(ModelError, match="total length"):
        parse({"rope_scaling": {"type": "dynamic", "factor": 2.0}})


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_is_served_within_the_length_of_its_training(kind: str) -> None:
    rope = parse({"rope_scaling": LONG | {"type": kind}, "original_max_position_embeddings": 1024})
    assert rope.scaling.max_len == 1024
    assert rope.scaling.attention_factor == math.sqrt(1 + math.log(4) / math.log(1024))
    periods = 10_000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    torch.testing.assert_close(rope.frequencies(HEAD_DIM), 1 / (torch.tensor(LONG["short_factor"]) * periods))


def test_a_part_of_a_head_is_rotated_and_the_rest_stays() -> None:
    """In our order of a head, whichever pairs a checkpoint rotates, the angles are those of the part alone."""
    part = RopeConfig(10_000.0, RopeScaling(), 0.5)
    alone = RopeConfig(10_000.0, RopeScaling()).frequencies(HEAD_DIM // 2)
    assert torch.equal(part.frequencies(HEAD_DIM), torch.cat([alone, torch.zeros(HEAD_DIM // 4)]))
    halves, neighbours = (
        RopeConfig(10_000.0, RopeScaling(), 0.5, interleaved).head_order(8) for interleaved in (False, True)
    )
    assert halves is not None
    assert halves.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert neighbours is not None
    assert neighbours.tolist() == [0, 2, 4, 5, 1, 3, 6, 7]
    assert RopeConfig(10_000.0, RopeScaling()).head_order(8) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "mrope"}}, "supported: default, linear, llama3, yarn"),
        ({"rope_scaling": {"type": "longrope"}}, "short_factor is missing, expected 16 numbers from 0.01 to 10000"),
        ({"rope_scaling": LONG | {"short_factor": [1.0] * 15}}, "short_factor"),
        ({"rope_scaling": LONG | {"short_factor": [1.0] * 15 + [0]}}, "short_factor"),
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
