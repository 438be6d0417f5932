import pickle
import re

import grpc
import pytest

from wire import errors
from wire.errors import (
    BatonError,
    Cancelled,
    ContextLengthExceeded,
    InvalidRequest,
    Lengths,
    ModelError,
    Overloaded,
    RequestNotFound,
    reached,
)
from wire.pb import inference_pb2 as pb
from wire.rpc import MAX_TIMELINE_BYTES, bounded, to_status


def subclasses(kind: type[BatonError]) -> list[type[BatonError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in subclasses(child))]


OURS = [kind for kind in subclasses(BatonError) if kind.__module__ == "wire.errors"]


def test_the_tree_is_as_drawn() -> None:
    drawn = re.findall(r"(?m)^[│├└─ ]*(\w+) +(?:([A-Z_]+) +(\d{3})\b)?", errors.__doc__ or "")
    table = {name: (code, http) for name, code, http in drawn if name[0].isupper() and hasattr(errors, name)}
    assert table.keys() == {kind.__name__ for kind in OURS}
    for kind in OURS:
        code, http = table[kind.__name__]
        if code:
            assert (code, int(http)) == (kind.status.grpc, kind.status.http), kind


@pytest.mark.parametrize("kind", OURS)
def test_every_status_is_one_of_grpcs(kind: type[BatonError]) -> None:
    assert kind.status.grpc in grpc.StatusCode.__members__
    assert 400 <= kind.status.http < 600


def test_reasons_are_stable_names() -> None:
    assert RequestNotFound("x").reason == "REQUEST_NOT_FOUND"
    assert ModelError("x").reason == "MODEL_ERROR"
    assert len({kind.__name__ for kind in OURS}) == len(OURS)


def test_a_limit_that_is_reached_is_told_with_its_setting() -> None:
    told = reached(2048, "requests are open", "router.max_open_requests")
    assert told == "2,048 requests are open, the limit (router.max_open_requests)"
    assert reached(64, "texts are being tokenized") == "64 texts are being tokenized, the limit (fixed)"


TOO_LONG = ContextLengthExceeded("prompt", "too long", Lengths(20, 0, 16))


def test_lengths_travel_with_an_error_as_ids() -> None:
    again = errors.rebuild(TOO_LONG.reason, TOO_LONG.message, dict(TOO_LONG.ids))
    assert isinstance(again, ContextLengthExceeded)
    assert again.lengths == Lengths(20, 0, 16)
    untold = errors.rebuild(TOO_LONG.reason, TOO_LONG.message, {"param": "prompt"})  # of an older process
    assert isinstance(untold, ContextLengthExceeded)
    assert untold.lengths is None


@pytest.mark.parametrize(
    "error", [InvalidRequest("n", "bad"), Overloaded("full", 2.0, worker="w"), ModelError("none"), TOO_LONG]
)
def test_an_error_survives_the_way_between_actors(error: BatonError) -> None:
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_a_timeline_with_many_attempts_keeps_its_longest_spans_and_their_errors_within_a_bound() -> None:
    timeline = pb.Timeline(total_ms=4e4, prefill_worker="prefill-0", prefill_reason="always")
    for number in range(400):
        span = timeline.spans.add(name="decode.generate", worker="decode-7", start_ms=1e2 * number, duration_ms=number)
        span.error = "" if number % 40 else "UNAVAILABLE"
    error = Cancelled("the client went away")
    error.timeline = timeline
    status = to_status(error)
    kept = pb.Timeline()
    assert status.details[1].Unpack(kept)
    assert MAX_TIMELINE_BYTES - 200 < kept.ByteSize() <= MAX_TIMELINE_BYTES
    assert status.ByteSize() * 4 / 3 < 8192, "the metadata that clients of gRPC take"
    assert (kept.total_ms, kept.prefill_worker) == (4e4, "prefill-0")
    assert sum(bool(span.error) for span in kept.spans) == 10
    assert min(span.duration_ms for span in kept.spans if not span.error) > 300
    assert [span.start_ms for span in kept.spans] == sorted(span.start_ms for span in kept.spans)


def test_a_long_message_leaves_a_timeline_less_room() -> None:
    timeline = pb.Timeline(total_ms=1e3)
    for number in range(300):
        timeline.spans.add(name="router", worker="router", start_ms=number, duration_ms=1.0)
    assert bounded(timeline, 700).ByteSize() <= MAX_TIMELINE_BYTES - 4 * 700
    assert not bounded(timeline, MAX_TIMELINE_BYTES).spans


def test_a_short_timeline_is_whole() -> None:
    timeline = pb.Timeline(total_ms=3.0, spans=[pb.Span(name="router.check", worker="router", duration_ms=3.0)])
    assert bounded(timeline) == timeline
