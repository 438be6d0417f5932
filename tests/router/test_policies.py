from dataclasses import dataclass

import pytest

from router.placement import DecodePlacement, PrefillPlacement
from wire.ids import WorkerId

P0, P1 = WorkerId("p0"), WorkerId("p1")


@dataclass
class Load:
    """A worker's load, as a table's row has it."""

    id: WorkerId
    num_choices: int
    num_tokens: int
    is_silent: bool = False
    num_prompt_tokens: int = 0
    prefill_token_s: float | None = None


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
    assert PrefillPlacement().choose(loads, cached, num_prompt_tokens=100).id == chosen


def test_equal_work_goes_where_fewer_requests_are() -> None:
    assert PrefillPlacement().choose([Load(P0, 3, 50), Load(P1, 1, 50)], {}, 10).id == P1


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
    assert DecodePlacement().choose([Load(P0, *loads[0]), Load(P1, *loads[1])], {}).id == chosen


def test_decode_that_prefills_goes_where_the_prompt_was() -> None:
    loads = [Load(P0, 0, 0), Load(P1, 1, 100)]
    assert DecodePlacement().choose(loads, {P1: 300}).id == P0
    assert DecodePlacement().choose(loads, {P1: 400}).id == P1


@pytest.mark.parametrize(
    ("silent", "chosen"),
    [((False, False), P0), ((True, False), P1), ((False, True), P0), ((True, True), P0)],
    ids=["no worker is silent", "the idle one is silent", "the busy one is silent", "both are silent"],
)
def test_a_silent_worker_is_chosen_only_where_all_are(silent: tuple[bool, bool], chosen: str) -> None:
    """P0 has next to nothing to do and all of the prompt, P1 much to do and nothing of it."""
    loads = [Load(P0, 0, 0, silent[0]), Load(P1, 50, 50_000, silent[1])]
    assert PrefillPlacement().choose(loads, {P0: 1000}, 1000).id == chosen
    assert DecodePlacement().choose(loads, {P0: 1000}).id == chosen


def test_decode_that_prefills_goes_where_less_is_to_be_prefilled() -> None:
    assert DecodePlacement().choose([Load(P0, 1, 100, num_prompt_tokens=400), Load(P1, 2, 100)], {}).id == P1
