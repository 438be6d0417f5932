"""Streams of a mix against the same streams alone."""

import random
import sys

import pytest

from benchmarks import mixes
from benchmarks.mixes import NUM_STREAMS, NUM_TOKENS, PARAMS, compare, make_models
from tests.exactness.test_one_mind import Mix


def test_a_seed_draws_the_same_mix_again() -> None:
    first, again, other = (Mix.drawn(random.Random(seed), NUM_STREAMS, PARAMS) for seed in (1, 1, 2))
    assert first == again != other


def test_streams_that_differ_are_counted() -> None:
    mix = Mix.drawn(random.Random(0), NUM_STREAMS, PARAMS)
    [solo] = make_models(0, ["float32"]).values()
    count = solo.compare(mix)
    assert (count["streams"], count["streams_that_differ"]) == (NUM_STREAMS, 0)
    assert {len(solo.tokens(key)) for key in mix.keys} == {NUM_TOKENS}
    solo.model = make_models(1, ["float32"])["float32"].model
    assert solo.compare(mix)["streams_that_differ"] == NUM_STREAMS


def test_failing_seeds_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(mixes.Solo, "tokens", lambda solo, key: [])
    counts, failing = compare(range(1), ["float32"])
    assert (counts["float32"]["streams_that_differ"], failing) == (NUM_STREAMS, ["0 float32"])
    assert "0 float32: 17 streams differ" in capsys.readouterr().out


def test_a_mix_that_differs_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[str, object] = {}
    monkeypatch.setattr(mixes, "write_result", lambda name, figures, details: shown.update(figures))
    monkeypatch.setattr(mixes.Solo, "tokens", lambda solo, key: [])
    monkeypatch.setattr(sys, "argv", ["mixes.py", "--mixes", "1", "--dtype", "bfloat16"])
    with pytest.raises(SystemExit) as ended:
        mixes.main()
    assert ended.value.code
    assert (shown["streams_that_differ"], shown["failing seeds"]) == (17, "0 bfloat16")
