"""The timeline of a request, a frozen value without protobuf. Completions and errors have one."""

from collections.abc import Mapping
from dataclasses import dataclass

from wire.pb import inference_pb2 as pb


@dataclass(frozen=True)
class Span:
    """A step of a request, in milliseconds since its arrival at the router. docs/timeline.md lists the names.

    error: the reason of the error that an attempt ended with here, "" for none.
    """

    name: str
    worker: str
    start_ms: float
    duration_ms: float
    counts: Mapping[str, int]
    error: str = ""


@dataclass(frozen=True)
class Timeline:
    """Spans in order of their start. A role that had no part in the request has no worker.

    prefill_reason: why the prompt went to a prefill worker, or to decode at once; a word of docs/timeline.md.
    """

    prefill_worker: str | None
    decode_worker: str | None
    spans: tuple[Span, ...]
    total_ms: float
    prefill_reason: str = ""


def read_timeline(timeline: pb.Timeline) -> Timeline:
    spans = tuple(
        Span(one.name, one.worker, one.start_ms, one.duration_ms, dict(one.counts), one.error) for one in timeline.spans
    )
    workers = timeline.prefill_worker or None, timeline.decode_worker or None
    return Timeline(*workers, spans, timeline.total_ms, timeline.prefill_reason)
