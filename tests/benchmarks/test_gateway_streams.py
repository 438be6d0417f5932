"""Which gaps count."""

import pytest

from benchmarks.gateway_streams import gaps_while_all_open


def test_only_gaps_while_all_streams_are_open() -> None:
    early = [0.0, 0.1, 0.9, 1.0, 1.2, 1.5]
    late = [0.5, 1.0, 1.3, 1.6, 2.0]
    assert gaps_while_all_open([early, late]) == pytest.approx([0.2, 0.3, 0.3])


def test_one_stream_alone_has_all_but_its_first_gap() -> None:
    assert gaps_while_all_open([[0.0, 1.0, 3.0, 6.0]]) == pytest.approx([2.0, 3.0])
