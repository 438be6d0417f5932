"""The quality script: the same figures from both backends, and bad figures for a bad model."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.quality import Meter, main
from demo_model import CHECKPOINT
from demo_model.recall import Depth
from text.tokenizer import Tokenizer

_ARGUMENTS = ("--model", str(CHECKPOINT), "--seed", "7", "--prompts", "3", "--lengths", "64,100")


class _Parrot:
    """A model that repeats the end of its prompt and finds every token as likely as a thousand others."""

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        return [list(prompt[-max_tokens:]) for prompt in prompts]

    def log_likelihood(self, token_ids: Sequence[int]) -> float:
        return -6.907755 * (len(token_ids) - 1)


class _Mute(_Parrot):
    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        return [[] for _ in prompts]


@pytest.fixture
def parrot_meter() -> Meter:
    return Meter(_Parrot(), Tokenizer.load(CHECKPOINT), seed=7, num_prompts=3)


def _figures(capsys: pytest.CaptureFixture[str], backend: str) -> dict[str, object]:
    capsys.readouterr()
    main([*_ARGUMENTS, "--backend", backend, "--json"])
    return dict(json.loads(capsys.readouterr().out))


def test_baton_and_transformers_measure_alike(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = (_figures(capsys, backend) for backend in ("baton", "transformers"))
    assert ours["recall"] == theirs["recall"]
    assert ours["recall_by_depth"] == theirs["recall_by_depth"]
    assert ours["perplexity"] == pytest.approx(theirs["perplexity"], rel=1e-4)
    assert ours["greedy_agreement"] == 1.0


def test_the_json_has_recall_by_prompt_length(tmp_path: Path) -> None:
    main([*_ARGUMENTS, "--json", str(tmp_path / "quality.json")])
    quality = json.loads((tmp_path / "quality.json").read_text())
    assert set(quality["recall"]) == {"64", "100"}
    assert all(0.9 <= share <= 1.0 for share in quality["recall"].values())
    assert set(quality["recall_by_depth"]["64"]) == {"early", "middle", "late"}


def test_the_table_has_a_row_for_each_length(capsys: pytest.CaptureFixture[str]) -> None:
    main(_ARGUMENTS)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:4]] == ["64", "100"]


def test_a_model_that_cannot_answer_has_no_recall(parrot_meter: Meter) -> None:
    assert parrot_meter.recall(64, Depth.LATE) == 0.0


def test_perplexity_is_by_token(parrot_meter: Meter) -> None:
    assert parrot_meter.perplexity() == pytest.approx(1000, rel=1e-4)


def test_agreement_counts_whole_continuations(parrot_meter: Meter) -> None:
    assert parrot_meter.agreement(_Parrot(), (64,)) == 1.0
    assert parrot_meter.agreement(_Mute(), (64,)) == 0.0
