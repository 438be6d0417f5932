"""Every way of the benchmark of tiers moves all blocks, and each ratio is of two ways that were measured."""

from pathlib import Path

import pytest

from benchmarks.tiers import RATIOS, measure, measure_directory


@pytest.mark.redis
def test_all_ways_are_measured(tmp_path: Path) -> None:
    seconds = measure(num_blocks=2, num_turns=2, folder=tmp_path)
    assert all(each > 0 for each in seconds.values())
    assert {way for ratio in RATIOS.values() for way in ratio} < set(seconds)


def test_a_full_directory_takes_turns() -> None:
    figures, turns = measure_directory(num_blocks=1280, num_turns=10)
    assert [len(each) for each in turns] == [10] * 4
    del figures["directory: bytes a block"]  # the process grows by nothing where earlier tests have left room
    assert all(figure > 0 for figure in figures.values())
