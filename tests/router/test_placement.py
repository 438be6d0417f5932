import pytest

from router.placement.policies import LONG_STEP_S, DecodePlacement, Load, PrefillPlacement
from wire.ids import WorkerId

P0, P1 = WorkerId("p0"), WorkerId("p1")


@pytest.mark.parametrize(
    ("queued", "cached", "chosen"),
    [
        ((0, 0), {}, P0),
        ((10, 0), {}, P1),
        ((0, 0), {P1: 64}, P1),
        ((0, 60), {P1: 64}, P1),
        ((0, 70), {P1: 64}, P0),
        ((500, 0), {P0: 100}, P1),
    ],
    ids=["first", "idle", "prefix", "prefix is worth a queue", "but not any queue", "nor when all of it is there"],
)
def test_prefill_goes_where_it_is_done_first(queued: tuple[int, int], cached: dict[WorkerId, int], chosen: str) -> None:
    loads = [Load(P0, 1, queued[0]), Load(P1, 1, queued[1])]
    assert PrefillPlacement().choose(loads, cached, num_prompt_tokens=100) == chosen


def test_equal_work_goes_where_fewer_requests_are() -> None:
    assert PrefillPlacement().choose([Load(P0, 3, 50), Load(P1, 1, 50)], {}, 10) == P1


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        (((0, 0), (0, 0)), P0),
        (((2, 500), (1, 500)), P1),
        (((1, 5000), (2, 600)), P1),
        (((1, 700), (2, 600)), P0),
    ],
    ids=["first", "fewer choices", "less context", "a choice weighs as 256 tokens"],
)
def test_decode_goes_to_the_lightest_batch(loads: tuple[tuple[int, int], tuple[int, int]], chosen: str) -> None:
    assert DecodePlacement().choose([Load(P0, *loads[0]), Load(P1, *loads[1])], {}) == chosen


def test_decode_that_prefills_goes_where_the_prompt_was() -> None:
    loads = [Load(P0, 0, 0), Load(P1, 1, 100)]
    assert DecodePlacement().choose(loads, {P1: 300}) == P0
    assert DecodePlacement().choose(loads, {P1: 400}) == P1


SHORT_STEP_S = LONG_STEP_S - 0.5
"""Silence is told in halves of a second."""


@pytest.mark.parametrize(
    ("silent_s", "chosen"),
    [
        ((0.0, 0.0), P0),
        ((SHORT_STEP_S, 0.0), P0),
        ((LONG_STEP_S, 0.0), P1),
        ((LONG_STEP_S, SHORT_STEP_S), P1),
        ((100.0, LONG_STEP_S), P0),
    ],
    ids=["both turn", "a step is no silence", "one is silent", "the other is in a step", "both are silent"],
)
def test_who_is_silent_is_chosen_only_where_all_are(silent_s: tuple[float, float], chosen: str) -> None:
    """P0 has next to nothing to do and all of the prompt, P1 much to do and nothing of it."""
    loads = [Load(P0, 0, 0, silent_s[0]), Load(P1, 50, 50_000, silent_s[1])]
    assert PrefillPlacement().choose(loads, {P0: 1000}, 1000) == chosen
    assert DecodePlacement().choose(loads, {P0: 1000}) == chosen
