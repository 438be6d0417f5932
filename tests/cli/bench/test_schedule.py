"""Load that is the same for whoever is measured, and differs from round to round."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from cli.bench.schedule import PROMPT_IDS, ScaledTrace, TraceRow, poisson, read_trace, replay, scale
from wire.errors import InvalidRequest


class TestPoisson:
    def test_same_seed_same_load(self) -> None:
        assert poisson(5, 10, 20, 8, seed=1) == poisson(5, 10, 20, 8, seed=1)
        assert poisson(5, 10, 20, 8, seed=1) != poisson(5, 10, 20, 8, seed=2)

    def test_rate_and_spread_fit_a_poisson_process(self) -> None:
        times = [arrival.at_s for arrival in poisson(10, 400, 1, 1, seed=3)]
        gaps = [after - before for before, after in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
        assert mean == pytest.approx(0.1, rel=0.1)
        assert variance**0.5 == pytest.approx(mean, rel=0.1)
        assert 0 < times[0] < times[-1] < 400

    def test_prompts_have_the_length_asked_for_and_share_nothing(self) -> None:
        arrivals = poisson(10, 10, 64, 7, seed=4)
        assert {len(arrival.prompt) for arrival in arrivals} == {64}
        assert {arrival.output_len for arrival in arrivals} == {7}
        assert len({arrival.prompt[:16] for arrival in arrivals}) == len(arrivals)
        assert all(token in PROMPT_IDS for arrival in arrivals for token in arrival.prompt)


class TestReadTrace:
    def test_mooncake(self, tmp_path: Path) -> None:
        path = tmp_path / "conversation.jsonl"
        path.write_text(
            '{"timestamp": 1000, "input_length": 512, "output_length": 4, "hash_ids": [0]}\n'
            '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 2]}\n'
        )
        assert read_trace(path) == [TraceRow(0.0, 512, 4, (0,)), TraceRow(2.0, 600, 5, (0, 2))]

    def test_azure(self, tmp_path: Path) -> None:
        path = tmp_path / "code.csv"
        path.write_text(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:17:03.9799600,4808,10\n"
            "2023-11-16 18:17:04.0319600,3180,8\n"
        )
        first, second = read_trace(path)
        assert first == TraceRow(0.0, 4808, 10)
        assert second.at_s == pytest.approx(0.052)
        assert second == TraceRow(second.at_s, 3180, 8)

    def test_neither(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest, match="neither"):
            read_trace(tmp_path / "x.parquet")

    @pytest.mark.parametrize("text", ["[]\n", "{\n", '{"timestamp": "noon", "input_length": 1, "output_length": 1}\n'])
    def test_rows_of_another_form(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "x.jsonl"
        path.write_text(text)
        with pytest.raises(InvalidRequest, match=r"is neither Azure's .csv nor Mooncake's .jsonl"):
            read_trace(path)

    def test_no_rows(self, tmp_path: Path) -> None:
        path = tmp_path / "x.csv"
        path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        with pytest.raises(InvalidRequest, match="has no requests"):
            read_trace(path)

    def test_times_that_go_back(self, tmp_path: Path) -> None:
        path = tmp_path / "x.csv"
        path.write_text(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:17:03.9799600,4808,10\n"
            "2023-11-16 18:17:03.0319600,3180,8\n"
        )
        with pytest.raises(InvalidRequest, match="request 2 is earlier than the one before it"):
            read_trace(path)


class TestScale:
    ROWS = (
        TraceRow(0, 1024, 100, (7, 8)),
        TraceRow(10, 2048, 100, (7, 8, 9, 10)),
        TraceRow(100, 10, 1, (11,)),
        TraceRow(200, 10, 1, (12,)),
    )

    def test_time_and_lengths(self) -> None:
        trace = scale(self.ROWS, rate=1, duration_s=3, length_factor=0.125, max_len=1000)
        assert [row.at_s for row in trace.rows] == pytest.approx([0, 0.3, 3])
        assert [(row.input_len, row.output_len) for row in trace.rows] == [(128, 12), (256, 12), (1, 1)]
        assert (trace.block_len, trace.num_clipped) == (64, 0)
        assert trace.time_factor == pytest.approx(0.03)
        assert trace.describe() == (
            "3 requests, arrivals 33.3 times as fast, lengths x 0.125, 0 of 3 cut to fit the context"
        )

    @pytest.mark.parametrize(("input_len", "output_len"), [(90, 20), (200, 5), (5, 200), (200, 200), (100, 1)])
    def test_what_is_too_long_is_cut_and_counted(self, input_len: int, output_len: int) -> None:
        rows = [TraceRow(0, input_len, output_len), TraceRow(1, 1, 1)]
        trace = scale(rows, rate=2, duration_s=1, length_factor=1, max_len=100)
        cut = trace.rows[0]
        assert cut.input_len + cut.output_len == 100
        assert min(cut.input_len, cut.output_len) >= min(input_len, output_len, 50)
        assert trace.num_clipped == 1

    def test_requests_that_come_at_once(self) -> None:
        rows = [TraceRow(5, 1, 1), TraceRow(5, 1, 1)]
        assert [row.at_s for row in scale(rows, 2, 1, 1, 100).rows] == [0, 0]


class TestReplay:
    TRACE = ScaledTrace(
        rows=(TraceRow(0, 20, 3, (1, 2)), TraceRow(1, 30, 4, (1, 2, 3)), TraceRow(2, 8, 1, (4,))),
        block_len=10,
        time_factor=1,
        length_factor=1,
        num_clipped=0,
    )

    def test_prefixes_are_shared_where_the_trace_shares_them(self) -> None:
        first, second, third = replay(self.TRACE, seed=1)
        assert [len(one.prompt) for one in (first, second, third)] == [20, 30, 8]
        assert second.prompt[:20] == first.prompt
        assert third.prompt != first.prompt[:8]
        assert [(one.at_s, one.output_len) for one in (first, second)] == [(0, 3), (1, 4)]

    def test_rounds_share_nothing(self) -> None:
        one, other = replay(self.TRACE, seed=1), replay(self.TRACE, seed=2)
        assert one == replay(self.TRACE, seed=1)
        assert all(a.prompt[:8] != b.prompt[:8] for a, b in zip(one, other, strict=True))

    def test_prompts_without_blocks_are_all_different(self) -> None:
        row = TraceRow(0, 16, 1)
        first, second = replay(replace(self.TRACE, rows=(row, row)), seed=1)
        assert len(first.prompt) == 16
        assert first.prompt != second.prompt
