"""Figures of the engine's own cost: its model, its sums, the split of a step by operation."""

from pathlib import Path

import pytest

from benchmarks.engine import FreeModel, TimedBackend, decoding_core, operations, prompt_us, python_us, summarize
from tests.harness.checkpoints import make_checkpoint


def test_an_engine_to_measure_does_nothing_but_decode() -> None:
    core = decoding_core(FreeModel(), num_sequences=3, prompt_len=20, num_tokens=40)
    for _ in range(20):
        assert len(core.step().token_ids) == 3
    assert core.check() == []


def test_time_per_token_is_positive() -> None:
    assert python_us(2, 20) > 0
    assert prompt_us(40) > 0


def test_the_ratio_is_of_pairs_of_the_same_round() -> None:
    rounds = [{"before": 40.0, "now": 2.0}, {"before": 20.0, "now": 4.0}, {"before": 30.0, "now": 3.0}]
    assert summarize(rounds) == {"before": 30.0, "now": 3.0, "ratio": 10.0}
    assert summarize([{"now": 2.0}]) == {"now": 2.0}


def test_operations_are_timed_and_the_rest_is_passed_on() -> None:
    class Backend:
        name = "fake"

        def linear(self, left: int, right: int) -> int:
            return left * right

    backend = TimedBackend(Backend())
    assert (backend.name, backend.linear(2, 3)) == ("fake", 6)
    assert list(backend.seconds) == ["linear"]


def test_operations_of_a_step_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.engine.READ_BYTES", 1 << 20)
    figures = operations(make_checkpoint("llama-gqa", tmp_path), num_sequences=2, context_len=20, num_threads=1)
    parts = sum(value for name, value in figures.items() if name.endswith("_ms") and name != "step_ms")
    assert parts == pytest.approx(figures["step_ms"])
    assert {"linear_ms", "attend_ms", "logits_ms", "weights_of_read", "attention_of_read"} <= set(figures)
