"""The timeline of one request: every millisecond from its arrival to its end stands in some span.

    router    |check|tokenize|wait_*|                     |wait_decode|
    worker                         .  |prefill.*| prefill.* |.           .|decode.*   ...   |.
    gaps      within a call (.) are `network`, all others `router`

A worker's spans count from the arrival of the call; here they are placed as if it had arrived when it was sent.
docs/timeline.md tells what each span means.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from wire.ids import WorkerId
from wire.journal import Kind
from wire.pb import inference_pb2 as pb

ROUTER, NETWORK = Kind.ELSEWHERE.step, Kind.NETWORK.step


@dataclass
class TimedCall:
    """A call of a worker as the router sees it: when it was sent and over, and the worker's own spans.

    error: the reason of the one that it ended with, "" where it ended well.
    """

    name: str
    worker: WorkerId
    sent_ms: float
    ended_ms: float | None = None
    spans: Sequence[pb.Span] = ()
    error: str = ""


class TimelineRecorder:
    """Times given to it are seconds of one monotonic clock."""

    def __init__(self, arrived_s: float) -> None:
        self.at = Kind.CHECK.at(ROUTER)
        """The span, or the call, in which the request is."""
        self.attempts_ms: list[float] = []
        """When each attempt began."""
        self._arrived_s = arrived_s
        self._spans: list[pb.Span] = []
        self._calls: list[TimedCall] = []
        self._last_ms = 0.0

    def begin_attempt(self) -> None:
        """Notes that an attempt begins, at the last note."""
        self.attempts_ms.append(self._last_ms)

    def set_current_span(self, kind: Kind) -> None:
        """Notes where the request is from now on."""
        self.at = kind.at(ROUTER)

    def record_span(self, kind: Kind, now_s: float) -> None:
        """Notes a span of the router, from its last note to now."""
        now_ms = self._ms(now_s)
        self._spans.append(_span(kind.at(ROUTER), ROUTER, self._last_ms, now_ms))
        self._last_ms = now_ms

    def sent(self, name: str, worker: WorkerId, now_s: float) -> TimedCall:
        """A call was sent. Calls of a request follow one another."""
        self.at = Kind.CALL.at(name)
        call = TimedCall(name, worker, self._ms(now_s))
        self._calls.append(call)
        return call

    def ended(self, call: TimedCall, now_s: float, spans: Sequence[pb.Span] = ()) -> None:
        """A call is over; its first end counts. Without the worker's spans it stands as one, `NAME.call`."""
        if call.ended_ms is None:
            call.ended_ms = self._last_ms = self._ms(now_s)
            call.spans = spans

    def count(self, name: str) -> int:
        """Sums a count over the spans that workers have sent so far."""
        return sum(span.counts.get(name, 0) for call in self._calls for span in call.spans)

    def finish(self, now_s: float) -> pb.Timeline:
        """Spans in order of start, without a gap from 0 to `total_ms`. Calls that are still open end now."""
        total_ms = self._ms(now_s)
        for call in self._calls:
            self.ended(call, now_s)
        known = [*self._spans, *(span for call in self._calls for span in _placed(call))]
        spans = sorted([*known, *self._fill(_gaps(known, total_ms))], key=lambda span: span.start_ms)
        return pb.Timeline(spans=spans, total_ms=total_ms)

    def _fill(self, gaps: Iterable[tuple[float, float]]) -> Iterator[pb.Span]:
        """Cuts gaps where calls start and end."""
        for start_ms, end_ms in gaps:
            edges = {edge for call in self._calls for edge in (call.sent_ms, call.ended_ms or call.sent_ms)}
            cuts = [start_ms, *sorted(edge for edge in edges if start_ms < edge < end_ms), end_ms]
            for left_ms, right_ms in pairwise(cuts):
                inside = any(call.sent_ms <= left_ms and right_ms <= (call.ended_ms or 0.0) for call in self._calls)
                yield _span(NETWORK if inside else ROUTER, ROUTER, left_ms, right_ms)

    def _ms(self, time_s: float) -> float:
        return (time_s - self._arrived_s) * 1000


def _placed(call: TimedCall) -> Iterator[pb.Span]:
    """A call's spans on the request's own clock, cut off at the end of the call. The last one has its error."""
    ended_ms = call.ended_ms if call.ended_ms is not None else call.sent_ms
    whole = pb.Span(name=Kind.CALL.at(call.name), duration_ms=ended_ms - call.sent_ms)
    spans = call.spans or [whole]
    for span in spans:
        start_ms = min(call.sent_ms + span.start_ms, ended_ms)
        placed = _span(span.name, call.worker, start_ms, min(start_ms + span.duration_ms, ended_ms))
        placed.counts.update(span.counts)
        placed.error = call.error if span is spans[-1] else ""
        yield placed


def _gaps(spans: Iterable[pb.Span], total_ms: float) -> Iterator[tuple[float, float]]:
    """Times between 0 and `total_ms` that no span covers."""
    covered_ms = 0.0
    for span in sorted(spans, key=lambda span: span.start_ms):
        if span.start_ms > covered_ms:
            yield covered_ms, span.start_ms
        covered_ms = max(covered_ms, span.start_ms + span.duration_ms)
    if total_ms > covered_ms:
        yield covered_ms, total_ms


def _span(name: str, worker: str, start_ms: float, end_ms: float) -> pb.Span:
    return pb.Span(name=name, worker=worker, start_ms=start_ms, duration_ms=max(0.0, end_ms - start_ms))
