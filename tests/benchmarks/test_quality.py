"""The quality script: the same figures from both backends, and bad figures for a bad model."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.choosers import Latest
from benchmarks.quality import Meter, main, share_alike
from benchmarks.quality_backends import CutText, EngineBackend
from benchmarks.quality_page import PAGE, PLAN, RESULTS, Row, add_rows, format_page, page_of_kept
from benchmarks.quality_real import BASE, PLACES, make_haystack, read_real
from benchmarks.real_text import plain_text
from benchmarks.techniques import TECHNIQUES, Decoding, Technique, decode
from demo_model import CHECKPOINT
from demo_model.corpus import Split
from demo_model.recall import Depth, make_recall_prompt
from text.tokenizer import Tokenizer

_ARGUMENTS = ("--model", str(CHECKPOINT), "--seed", "7", "--prompts", "3", "--lengths", "64,100")


class _Parrot:
    """A model that repeats the end of its text and finds every token as likely as a thousand others."""

    def generate(self, texts: Sequence[CutText], max_tokens: int) -> list[list[int]]:
        return [text.token_ids[-max_tokens:] for text in texts]

    def log_likelihood(self, text: CutText) -> float:
        return -6.907755 * (len(text.given_ids) - 1)


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
    ours = parrot_meter.continuations((64,))
    assert len(ours) == 6
    assert share_alike(ours, ours) == 1.0
    assert share_alike(ours, [*ours[:3], *([*one[:-1], 0] for one in ours[3:])]) == 0.5


def _load(tmp_path: Path, **settings: Any) -> EngineBackend:
    return Technique("asked", "", **settings).load(CHECKPOINT, tmp_path, num_blocks=256)


def _recall(backend: EngineBackend, depth: Depth) -> float:
    return Meter(backend, Tokenizer.load(CHECKPOINT), seed=7, num_prompts=10).recall(150, depth)


def test_a_window_forgets_what_is_behind_it(tmp_path: Path) -> None:
    windowed = _load(tmp_path, window=48)
    assert _recall(windowed, Depth.LATE) - _recall(windowed, Depth.EARLY) > 0.5


def test_an_answer_behind_the_cut_is_sampled_on_what_was_kept(tmp_path: Path) -> None:
    """A fact that a rule drops is gone, though prefill has seen it: an answer that prefill samples is right."""
    forgetful = _load(tmp_path, kv_policy="snapkv=25%", chooser=Latest())
    assert _recall(forgetful, Depth.EARLY) == 0.0
    prompt = make_recall_prompt(random.Random(7), Split.HELD_OUT, 150, Depth.EARLY)
    tokenizer = Tokenizer.load(CHECKPOINT)
    token_ids = tokenizer.encode(prompt.text)
    [at_prefill] = forgetful.generate([CutText(tuple(token_ids), ())], 1)
    [behind_cut] = forgetful.generate([CutText.cut(token_ids, -3)], 1)
    assert tokenizer.decode(at_prefill).strip() == prompt.value != tokenizer.decode(behind_cut).strip()


def test_perplexity_counts_tokens_that_see_what_was_kept(tmp_path: Path) -> None:
    def perplexity(**settings: Any) -> float:
        return Meter(_load(tmp_path, **settings), Tokenizer.load(CHECKPOINT), seed=7, num_prompts=5).perplexity("facts")

    assert perplexity(kv_policy="snapkv=25%", chooser=Latest()) > 1.5 * perplexity()


def test_given_tokens_are_run_and_not_sampled(tmp_path: Path, parrot_meter: Meter) -> None:
    [text, *_] = parrot_meter.load(1, 40)
    backend = _load(tmp_path)
    [whole] = backend.generate([CutText(tuple(text.token_ids), ())], 8)
    assert backend.generate([text], 8) == [whole]
    assert backend.generate([CutText(text.prompt_ids, text.given_ids[::-1])], 8) != [whole]


def test_bytes_are_of_all_pages_with_references(tmp_path: Path, parrot_meter: Meter) -> None:
    backend = _load(tmp_path)
    layout = backend.core.pool.layout
    figures = decode(backend, parrot_meter.load(4, 157), 3)
    # 161 known tokens or a few more, the last of which has no KV: ten pages of 16, or eleven.
    assert 0.99 <= figures.bytes_per_token * layout.block_size / layout.payload_bytes <= 1.1
    assert backend.core.check() == []


def test_each_technique_has_its_row_and_its_case() -> None:
    row = Row(dict.fromkeys(PLAN, 0.987), {}, {"english": 4.0, "facts": 5.0}, 0.995, Decoding(3100.0, 2071.0))
    page = format_page("a machine", {one.name: row for one in TECHNIQUES}, *read_real())
    for one in TECHNIQUES:
        line = next(line for line in page.splitlines() if line.startswith(f"| {one.name} |"))
        assert "98.7%" in line
        assert line.endswith(f"| {one.promise} |")
        assert (f"- **{one.name}**: " in page) is bool(one.when)


def test_advice_has_the_figures_of_the_real_table() -> None:
    machine, real = read_real()
    row = Row(dict.fromkeys(PLAN, 0.987), {}, {"english": 4.0, "facts": 5.0}, 0.995, Decoding(3100.0, 2071.0))
    same = {**real, "int4": replace(real["int4"], answers=real[BASE].answers)}
    page = format_page("a machine", {one.name: row for one in TECHNIQUES}, machine, same)
    assert "(0 of 16)" in next(line for line in page.splitlines() if line.startswith("- **int4**"))


def test_a_row_is_added_to_the_kept_ones_without_a_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = json.loads(RESULTS.read_text())
    for name in ("RESULTS", "PAGE"):
        monkeypatch.setattr(f"benchmarks.quality_page.{name}", tmp_path / name)
    (tmp_path / "RESULTS").write_text(json.dumps(kept))
    row = Row(dict.fromkeys(PLAN, 0.987), {}, {"english": 4.0, "facts": 5.0}, 0.625, Decoding(None, 550.0))
    add_rows({"int8 over bfloat16": row})
    page = (tmp_path / "PAGE").read_text()
    assert "| int8 over bfloat16 | 550 | - | 98.7% | 98.7% | 98.7% | 4.000 | 5.000 | 62.5% of full, bfloat16 |" in page
    after = json.loads((tmp_path / "RESULTS").read_text())
    assert after["machine"] == kept["machine"]
    assert {**after["rows"], "int8 over bfloat16": None} == {**kept["rows"], "int8 over bfloat16": None}


def test_the_page_is_made_of_the_kept_figures() -> None:
    assert PAGE.read_text() == page_of_kept()


def test_a_text_with_facts_asks_for_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.quality_real.articles", lambda: {"Lincoln": "He was born in a log cabin. " * 200})
    tokenizer = Tokenizer.load(CHECKPOINT)
    haystack = make_haystack(tokenizer, 1000, 0)
    text = tokenizer.decode(list(haystack.prompt_ids))
    assert 800 < len(haystack.prompt_ids) <= 1000
    assert len(haystack.questions) == len(PLACES)
    for end, value in haystack.questions.items():
        assert f"The secret number of{end} {value}." in text
    assert text.endswith("The secret number of")


def test_a_page_of_wikipedia_keeps_the_words_that_a_reader_sees() -> None:
    markup = """{{Infobox|a={{b}}}}'''Ada''' &lt;ref name="x"&gt;[[Y]]&lt;/ref&gt;met [[C. Babbage|Babbage]]<!-- no -->.
== Life ==
[[File:Ada.jpg|thumb|[[Ada]] in {{circa}} 1840]]See [http://example.org/ada the letters] of [[London]].
{| class="wikitable"
| cell
|}"""
    assert plain_text(markup) == "Ada met Babbage.\n Life \nSee the letters of London."


def test_the_kept_figures_of_the_real_model_reach_their_floors() -> None:
    _, rows = read_real()
    base = rows[BASE]
    assert rows["int8"].perplexity < 1.005 * base.perplexity
    assert sum(rows["int8"].found.values()) >= sum(base.found.values()) - 0.2
    assert rows["snapkv=25%"].found[1000] > rows["latest 25%"].found[1000]
    assert rows["int8"].bytes_per_token < 0.54 * base.bytes_per_token


def test_the_kept_figures_reach_their_floors() -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    recall = {name: row["recall"]["300"] for name, row in rows.items()}
    full = recall["full, float32"]
    for name, most_lost in {"int8": 0.01, "fp8": 0.02, "int4": 0.05}.items():
        assert recall.get(name, full) >= full - most_lost
    for name in ("snapkv=25%", "h2o=25%"):
        assert recall[name] >= recall["latest 25%"] + 0.05
        assert recall[name] >= recall["25% at random"] + 0.10
