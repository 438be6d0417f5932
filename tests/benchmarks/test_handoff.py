"""A hand-off's share of the time up to decode's first step, read from a timeline; the model that is served."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from baton.results import Completion, Span, Timeline, Usage
from benchmarks.handoff import Prompts, handoff_share, make_served_model


def _span(name: str, start_ms: float, duration_ms: float) -> Span:
    return Span(name=name, worker="worker", start_ms=start_ms, duration_ms=duration_ms, counts={})


def _completion(*spans: Span) -> Completion:
    return Completion(
        "r",
        (),
        Usage(prompt_tokens=1, completion_tokens=1, cached_tokens={}),
        0,
        Timeline(prefill_worker="p", decode_worker="d", spans=spans, total_ms=spans[-1].start_ms),
    )


def test_the_handoff_is_from_computed_to_generate() -> None:
    publish = (_span("prefill.publish", 80.0, 5.0), _span("decode.fetch", 90.0, 10.0))
    completion = _completion(_span("prefill.compute", 10.0, 70.0), *publish, _span("decode.generate", 100.0, 50.0))
    assert handoff_share(completion) == pytest.approx(0.2)


def test_a_request_without_prefill_has_no_handoff() -> None:
    with pytest.raises(StopIteration):
        handoff_share(_completion(_span("decode.generate", 0.0, 1.0)))


def test_prompts_differ_and_repeat_with_their_seed() -> None:
    prompts = Prompts(seed=1)
    first, second = prompts.draw(64), prompts.draw(64)
    assert first != second
    assert Prompts(seed=1).draw(64) == first


def test_a_checkpoint_without_a_tokenizer_gets_one_for_all_its_tokens(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"vocab_size": 300}))
    folder = make_served_model(source, tmp_path / "served")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.decode([*tokenizer.encode("A").ids, 299]) == "Aw299"
    assert [path.name for path in source.iterdir()] == ["config.json"]
