"""The figures of an engine beside a busy process."""

from benchmarks.busy_core import burning_core, describe


def test_a_ratio_is_the_median_of_the_rounds_not_of_the_speeds() -> None:
    text = describe([100.0, 50.0, 200.0], [50.0, 30.0, 20.0])
    assert text == "100 alone, 30 beside: 0.50 (0.10 .. 0.60)"


def test_the_burner_ends_with_its_block() -> None:
    with burning_core() as burner:
        assert burner.poll() is None
    assert burner.returncode is not None
