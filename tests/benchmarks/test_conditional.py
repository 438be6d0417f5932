"""The benchmark of conditional disaggregation on a short stretch of its virtual clock."""

from benchmarks.conditional import draw, measure, over_the_better
from router.config import Disaggregation


def test_turns_extend_one_another_and_fill_the_prefill_pool_as_told() -> None:
    turns = draw(seed=3, load=0.5, duration_s=20.0)
    assert turns == draw(seed=3, load=0.5, duration_s=20.0)
    assert [one.at_s for one in turns] == sorted(one.at_s for one in turns)
    assert 10.0 <= sum(one.num_new for one in turns) * 0.0003 < 13.0
    later = [one for one in turns if one.num_new < len(one.prompt)]
    assert later
    for one in later:
        assert any(one.prompt[: len(other.prompt)] == other.prompt for other in turns if other.at_s < one.at_s)


def test_conditional_disaggregation_is_no_worse_than_the_better_of_always_and_never() -> None:
    found = measure(seed=1, load=0.5, duration_s=15.0)
    ttft, goodput = over_the_better(found)
    assert min(ttft, goodput) >= 0.95
    assert {mode: set(reasons) for mode, (_, reasons) in found.items() if mode is not Disaggregation.CONDITIONAL} == {
        Disaggregation.ALWAYS: {"always"},
        Disaggregation.NEVER: {"never"},
    }
    summary, reasons = found[Disaggregation.CONDITIONAL]
    assert sum(reasons.values()) == summary.num_ended == summary.num_sent
    assert {"sooner", "cheaper", "busy"} <= set(reasons)
