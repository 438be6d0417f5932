"""Traces of requests in OpenTelemetry's form, written at a request's end, from its timeline.

    chat MODEL                                    the request, with GenAI's names
      router.check, router.tokenize               spans of its timeline before any attempt
      attempt 1                                   failed: its worker was lost
        router.wait_room, prefill.fetch, ...
      attempt 2 (linked to attempt 1)
        decode.fetch, decode.generate, ...

Spans of workers are in the timeline, so workers know nothing of traces. No span has text of prompt or answer.
"""

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import randbytes, random

from router.observe.journal import CANCELLED, OK, RequestJournal
from router.observe.trace_exporter import TraceExporter
from text.chat import Chat
from wire.ids import TraceContext
from wire.pb import otlp_pb2 as otlp
from wire.sampling import SamplingParams

TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8
NS_PER_MS = 1_000_000
REQUEST_SETTINGS = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "max_tokens", "seed")
"""Settings of sampling that GenAI's conventions name, too."""
Value = str | float | Sequence[str] | None


class Traces:
    """The choice of requests to trace. ratio: the traced share of requests whose caller sends no trace."""

    def __init__(self, ratio: float, model: str, exporter: TraceExporter) -> None:
        self._ratio = ratio
        self._model = model
        self._exporter = exporter

    def begin(self, prompt: object, sampling: SamplingParams, traceparent: str) -> "RequestTrace | None":
        """Begins the trace of a request if its caller or the ratio samples it; else returns None."""
        parent = TraceContext.parse(traceparent)
        if not (random() < self._ratio if parent is None else parent.is_sampled):
            return None
        operation = "chat" if isinstance(prompt, Chat) else "text_completion"
        return RequestTrace(operation, self._model, sampling, parent, self._exporter)


@dataclass(frozen=True)
class RequestTrace:
    """The part of a traced request that its journal lacks. parent: the caller's span, None without one."""

    operation: str
    model: str
    sampling: SamplingParams
    parent: TraceContext | None
    exporter: TraceExporter

    def end(self, journal: RequestJournal) -> None:
        """Queues the ended request's spans to be made and sent; never waits."""
        ended_ns = time.time_ns()
        self.exporter.put(lambda: self.spans(journal, ended_ns))

    def spans(self, journal: RequestJournal, ended_ns: int) -> list[otlp.TraceSpan]:
        """Makes the spans of a request that ended at `ended_ns` since 1970: request, attempts, timeline."""
        timeline, attempts_ms, parent = journal.timeline, journal.attempts_ms, self.parent
        draft = SpanDrafts(
            randbytes(TRACE_ID_BYTES) if parent is None else parent.trace_id,
            ended_ns - int(timeline.total_ms * NS_PER_MS),
        )
        root = draft.span(f"{self.operation} {self.model}", 0.0, timeline.total_ms, self._attributes(journal))
        root.parent_span_id = b"" if parent is None else parent.span_id
        root.kind = otlp.SPAN_KIND_SERVER
        spans = [root]
        for number, (start_ms, end_ms) in enumerate(pairwise([*attempts_ms, timeline.total_ms]), 1):
            attempt = draft.span(f"attempt {number}", start_ms, end_ms, {"baton.attempt": number}, root)
            if number > 1:
                attempt.links.add(trace_id=attempt.trace_id, span_id=spans[-1].span_id)
            attempt.status.code = otlp.STATUS_CODE_ERROR if number < len(attempts_ms) else otlp.STATUS_CODE_UNSET
            spans.append(attempt)
        for one in (spans[0], spans[-1]) if journal.outcome not in (OK, CANCELLED) else ():
            one.status.CopyFrom(otlp.Status(code=otlp.STATUS_CODE_ERROR, message=journal.message))
        for span in timeline.spans:
            attributes: dict[str, Value] = {"baton.process": span.worker, "error.type": span.error or None}
            attributes |= {f"baton.{name}": number for name, number in span.counts.items()}
            above = spans[bisect_right(attempts_ms, span.start_ms)]
            spans.append(draft.span(span.name, span.start_ms, span.start_ms + span.duration_ms, attributes, above))
        return spans

    def _attributes(self, journal: RequestJournal) -> Mapping[str, Value]:
        cached = journal.cached
        return {
            "gen_ai.operation.name": self.operation,
            "gen_ai.provider.name": "baton",
            "gen_ai.request.model": self.model,
            "gen_ai.response.model": self.model,
            "gen_ai.response.id": journal.request_id,
            **{f"gen_ai.request.{name}": getattr(self.sampling, name) for name in REQUEST_SETTINGS},
            "gen_ai.request.choice.count": self.sampling.n,
            "gen_ai.usage.input_tokens": journal.num_prompt_tokens,
            "gen_ai.usage.output_tokens": journal.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": sum(cached.values()),
            "gen_ai.response.finish_reasons": journal.finish_reasons or None,
            "gen_ai.response.time_to_first_chunk": journal.ttft_s,
            "error.type": journal.reason or None,
            "rpc.response.status_code": journal.outcome,
            **{f"baton.cached_tokens.{tier}": number for tier, number in cached.items()},
        }


@dataclass(frozen=True)
class SpanDrafts:
    """The unfinished spans of a trace. arrived_ns: the time from which their milliseconds count."""

    trace_id: bytes
    arrived_ns: int

    def span(
        self,
        name: str,
        start_ms: float,
        end_ms: float,
        attributes: Mapping[str, Value],
        parent: otlp.TraceSpan | None = None,
    ) -> otlp.TraceSpan:
        return otlp.TraceSpan(
            trace_id=self.trace_id,
            span_id=randbytes(SPAN_ID_BYTES),
            parent_span_id=b"" if parent is None else parent.span_id,
            name=name,
            kind=otlp.SPAN_KIND_INTERNAL,
            start_time_unix_nano=self.arrived_ns + int(start_ms * NS_PER_MS),
            end_time_unix_nano=self.arrived_ns + int(end_ms * NS_PER_MS),
            attributes=[{"key": key, "value": _any(value)} for key, value in attributes.items() if value is not None],
        )


def _any(value: str | float | Sequence[str]) -> dict[str, object]:
    """Describes an AnyValue; making a message from descriptions takes half as long as from messages."""
    match value:
        case str():
            return {"string_value": value}
        case int():
            return {"int_value": value}
        case float():
            return {"double_value": value}
        case _:
            return {"array_value": {"values": list(map(_any, value))}}
