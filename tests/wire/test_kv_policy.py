"""KV policies as texts, and the tokens that budgets leave."""

import pytest

from wire.errors import ConfigError
from wire.kv_policy import Dropping, Rule, Sinks, parse_kv_policy


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("sinks=4+1020", Sinks(4, 1020)),
        ("snapkv=25%", Dropping(Rule.SNAPKV, 25, "%")),
        ("h2o=1024", Dropping(Rule.H2O, 1024)),
    ],
)
def test_a_policy_is_read_as_it_is_written(text: str, policy: Sinks | Dropping) -> None:
    assert parse_kv_policy(text) == policy
    assert str(policy) == text


def test_full_is_no_policy() -> None:
    assert parse_kv_policy("full") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "FULL",
        "sinks=0+8",
        "sinks=8+8",
        "sinks=4",
        "snapkv=0%",
        "snapkv=100%",
        "h2o=127",
        "h2o=-1",
        "snapkv=1e9",
        "x" * 999,
    ],
)
def test_senseless_policies_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="kv_policy"):
        parse_kv_policy(text)


def test_int4_keeps_every_token() -> None:
    assert parse_kv_policy("full", "int4") is None
    with pytest.raises(ConfigError, match="kv_policy sinks=4\\+1020: with kv_dtype int4 it must be full"):
        parse_kv_policy("sinks=4+1020", "int4")


@pytest.mark.parametrize(
    ("num_prompt", "num_blocks"), [(30, 0), (48, 0), (49, 3), (300, 5), (1000, 16), (4000, 63), (4096, 64)]
)
def test_a_quarter_is_whole_blocks_and_never_less_than_three(num_prompt: int, num_blocks: int) -> None:
    assert Dropping(Rule.SNAPKV, 25, "%").num_copied(num_prompt, block_size=16) == num_blocks
