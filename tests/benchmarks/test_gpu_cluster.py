"""What is read from clusters that share a GPU, without any."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from baton.results import Choice, Completion, Span, Timeline, Usage
from benchmarks import gpu_cluster
from benchmarks.gpu_cluster import Answer, Barrier, Handoff, num_equal, num_late, read_ready, settings_of
from benchmarks.gpu_model import SIZES, make_model
from benchmarks.gpu_timing import NUMBERS_AT_ONCE, Read
from engine.model.decoder import Decoder

SPANS = [
    ("router.check", 0.0, 1.0),
    ("prefill.fetch", 1.0, 3.0),
    ("prefill.compute", 4.0, 17.0),
    ("prefill.publish", 21.0, 7.0),
    ("network", 28.0, 2.0),
    ("decode.fetch", 30.0, 6.0),
    ("decode.generate", 36.5, 40.0),
    ("network", 76.5, 5.0),
]


def completion(spans: list[tuple[str, float, float]]) -> Completion:
    made = tuple(
        Span(name=name, worker="", start_ms=start, duration_ms=duration, counts={}) for name, start, duration in spans
    )
    usage = Usage(prompt_tokens=1, completion_tokens=1, cached_tokens={})
    return Completion(
        "r",
        tuple[Choice, ...](),
        usage,
        0,
        Timeline(prefill_worker="prefill-0", decode_worker="decode-0", spans=made, total_ms=81.5),
    )


def test_a_hand_off_is_read_from_a_timeline() -> None:
    handoff = Handoff.of(completion(SPANS))
    assert handoff == Handoff(3.0, 17.0, 7.0, 2.0, 6.0, computed=21.0, fetched=36.0)
    assert handoff.share == pytest.approx(15 / 36)


def test_a_decode_worker_that_had_all_before_it_began_fetches_nothing() -> None:
    handoff = Handoff.of(completion([one for one in SPANS if one[0] != "decode.fetch"]))
    assert handoff.fetch == 0.0
    assert handoff.share == pytest.approx((36.5 - 21) / 36.5)


def test_starts_and_late_kernels_are_read_from_the_status() -> None:
    events = [{"text": "worker prefill-0 is ready after 42.1 s"}, {"text": "the cluster serves"}]
    assert list(read_ready({"events": events})) == [("prefill-0", 42.1)]
    problems = ["worker decode-0: 3 kernels or graphs were made while requests waited: restart it, or report a bug"]
    assert num_late([*problems, "another problem"]) == 3
    assert num_late([]) == 0


def test_workers_tell_of_late_kernels_in_the_words_that_are_read() -> None:
    source = (Path(gpu_cluster.ROOT) / "worker/service.py").read_text()
    assert "{num_late} kernels or graphs were made while requests waited" in source


def test_answers_are_equal_where_neither_failed() -> None:
    answers = [Answer((1, 2), 1), Answer((1, 2), 2), Answer((), 0, "lost")]
    assert num_equal(answers, [Answer((1, 2), 1), Answer((1, 3), 1), Answer((), 0, "lost")]) == 1


def test_a_worker_is_killed_once_when_all_streams_have_begun() -> None:
    killed: list[str] = []
    barrier = Barrier(2, lambda: killed.append("worker"))
    barrier.begin()
    barrier.end()
    with pytest.raises(RuntimeError, match="1 streams never had"):
        barrier.require_open()
    barrier.begin()
    barrier.end()
    barrier.require_open()
    assert (killed, barrier.num_ended) == (["worker"], 1)


@pytest.mark.parametrize(
    ("what", "gpus", "flags", "expected"),
    [
        ("pools", None, "", ["--arena-bytes", "16GiB"]),
        ("colocated", None, "--pool-bytes 8GiB", ["--http-port", "0", "--pool-bytes", "8GiB"]),
        ("killed", 0.3, "", ["--gpus", "0.3", "--dtype", "float32", "--exact", "on", "--pool-bytes"]),
        ("pools", 0.0, "", ["--gpus", "0", "--threads", "1"]),
    ],
)
def test_the_callers_flags_of_up_come_last(what: str, gpus: float | None, flags: str, expected: list[str]) -> None:
    settings = settings_of(Namespace(what=what, gpus=gpus, flags=flags, dtype="float32"))
    places = [settings.index(one) for one in expected if settings.count(one) == 1]
    assert {*expected} <= {*settings}
    assert places == sorted(places)


def test_a_made_model_is_one_that_loads(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny", SIZES["tiny"])
    assert not (tmp_path / "tiny.part").exists()
    model = Decoder.load(tmp_path / "tiny", "bfloat16", torch.device("cpu"), 16)
    assert model.config.num_layers == SIZES["tiny"].num_layers


def test_the_ceiling_of_reading_reads_everything() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    read = Read(12 * NUMBERS_AT_ONCE, device)
    read.source.random_()
    read()
    expected = [0] * 3
    for place, part in enumerate(read.source.view(3, -1).tolist()):
        for number in part:
            expected[place] ^= number
    assert read.kept.tolist() == expected
