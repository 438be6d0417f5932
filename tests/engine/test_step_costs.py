"""Tokens of prompts beside decoding sequences: what a step has time for by learned costs, and how these are learned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.schedule.batcher import FIRST_CHUNK_TOKENS, UNLEARNED, StepCosts

BLOCK = 16
MOST = 2048


@pytest.mark.parametrize(
    ("decode_s", "token_s", "max_step_s", "most", "num_tokens"),
    [
        pytest.param(0.005, 40e-6, 0.05, MOST, 1120, id="a GPU: 1,125 tokens have time, in whole blocks"),
        pytest.param(0.005, 10e-6, 0.05, MOST, MOST, id="a fast GPU: the bound of tokens"),
        pytest.param(0.005, 10e-6, 0.05, MOST - 20, MOST - 32, id="a bound within a block"),
        pytest.param(0.01, 0.002, 0.05, MOST, BLOCK, id="a CPU: 20 tokens have time"),
        pytest.param(0.01, 0.002, 0.5, MOST, 240, id="a CPU with half a second"),
        pytest.param(0.049, 0.002, 0.05, MOST, BLOCK, id="not even a token has time"),
        pytest.param(0.08, 40e-6, 0.05, MOST, BLOCK, id="decoding alone takes longer"),
        pytest.param(0.005, 40e-6, 0.05, 12, 12, id="a bound below a block"),
        pytest.param(0.005, 40e-6, 0.05, 0, 0, id="a step without room"),
        pytest.param(0.005, None, 0.05, MOST, FIRST_CHUNK_TOKENS, id="nothing learned"),
        pytest.param(0.005, None, 0.05, 100, 96, id="nothing learned, and a bound"),
    ],
)
def test_a_step_has_the_tokens_that_it_has_time_for(
    decode_s: float, token_s: float | None, max_step_s: float, most: int, num_tokens: int
) -> None:
    assert StepCosts(decode_s, token_s).chunk_tokens(max_step_s, most, BLOCK) == num_tokens


seconds = st.floats(1e-7, 10.0)


@given(seconds, seconds, seconds, st.integers(0, 4096), st.sampled_from([8, 16, 128]))
def test_whole_blocks_within_both_bounds_and_at_least_one(
    decode_s: float, token_s: float, max_step_s: float, most: int, block_size: int
) -> None:
    costs = StepCosts(decode_s, token_s)
    num_tokens = costs.chunk_tokens(max_step_s, most, block_size)
    assert num_tokens == most if most < block_size else block_size <= num_tokens <= most
    assert num_tokens % block_size == 0 or num_tokens == most < block_size
    assert num_tokens <= block_size or decode_s + num_tokens * token_s <= max_step_s * (1 + 1e-9)
    assert costs.chunk_tokens(2 * max_step_s, most, block_size) >= num_tokens


def test_nothing_is_learned_at_first() -> None:
    assert (UNLEARNED.decode_s, UNLEARNED.token_s) == (0.0, None)
