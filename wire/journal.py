"""The journal of a request: the one table of the kinds of its spans, and the list of spans that a process appends to.

    worker    Journal ─ spans ─▶ Update.end ─▶ router    RequestJournal: its own spans, and its workers' in place

Code, exporters, the live page and docs/timeline.md take kinds from the table alone.
"""

from collections.abc import Iterator, Mapping, MutableSequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from wire.pb import inference_pb2 as pb


class SpanPhase(StrEnum):
    """The kind of work of a span, as the page colours it."""

    GATE = "gate"
    FETCH = "fetch"
    COMPUTE = "compute"
    GENERATE = "generate"
    BETWEEN = "between"


ROUTER, PREFILL, DECODE = ("router",), ("prefill",), ("decode",)
WORKERS, FILLED = (*PREFILL, *DECODE), ("",)


@dataclass(frozen=True, eq=False)
class Row:
    """A row of the table.

    step: the second part of a span's name. places: the first part, the process that measures it; "" for spans that the
    router fills in. phase: GATE if the request waits for others. doc: text for docs/timeline.md. cause: words for
    `baton requests` and the page. unit: the count whose pace shows a slow worker.
    """

    step: str
    places: tuple[str, ...]
    phase: SpanPhase
    doc: str
    cause: str = "was at {worker}"
    unit: str = ""

    def at(self, place: str) -> str:
        """Returns the name of the spans that a place measures."""
        return f"{place}.{self.step}" if place else self.step

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(self.at, self.places))


class Kind(Row, Enum):
    """The kinds of spans. A worker's phases follow one another in this order, and any may be left out."""

    CHECK = "check", ROUTER, SpanPhase.BETWEEN, "the request is checked and let in, or refused at once"
    RENDER = (
        "render",
        ROUTER,
        SpanPhase.BETWEEN,
        "messages of a chat to text, in a process that runs the model's template; the wait for one is part of it",
        "the model's template rendered its messages",
    )
    GRAMMAR = (
        "grammar",
        ROUTER,
        SpanPhase.BETWEEN,
        "the response format is built once, in a process of its own; the wait for one is part of it",
        "its response format was built",
    )
    WAIT_TOKENIZER = (
        "wait_tokenizer",
        ROUTER,
        SpanPhase.GATE,
        "a thread that tokenizes",
        "waited for a thread that tokenizes",
    )
    TOKENIZE = (
        "tokenize",
        ROUTER,
        SpanPhase.COMPUTE,
        "text to tokens, settings completed, blocks named",
        "was tokenized",
    )
    WAIT_ROOM = (
        "wait_room",
        ROUTER,
        SpanPhase.GATE,
        "room in the arena. Prompts prefilled and not yet fetched by decode hold more than half of it",
        "waited for room in the arena: prompts held for decode take half of it",
    )
    WAIT_DECODE = (
        "wait_decode",
        ROUTER,
        SpanPhase.GATE,
        "a decode worker that is ready. Short unless all of them are lost or draining",
        "waited for a decode worker that is ready: none was",
    )
    WAIT_ISOLATED = (
        "wait_isolated",
        ROUTER,
        SpanPhase.GATE,
        "after lost workers, the last attempt is made alone",
        "waited to be tried alone, after two workers were lost over it",
    )
    QUEUE = (
        "queue",
        WORKERS,
        SpanPhase.GATE,
        "the step that runs when the request comes in; until it ends, the queue waits",
        "waited at {worker} for a step of its engine to end",
    )
    WAIT_SLOT = (
        "wait_slot",
        WORKERS,
        SpanPhase.GATE,
        "as many sequences have pages as may (`max_running`)",
        "waited at {worker} for a place: max_running sequences ran",
    )
    WAIT_PAGES = (
        "wait_pages",
        WORKERS,
        SpanPhase.GATE,
        "free pages: at prefill for the whole prompt, at decode for all tokens so far and some to grow into",
        "waited at {worker} for free pages: its pool was full",
    )
    FETCH = (
        "fetch",
        WORKERS,
        SpanPhase.FETCH,
        "blocks that are known are copied from the arena, Redis or files; counts say how many of which tier. "
        "At decode the hold ends then",
        "fetched KV at {worker}: {found}",
    )
    WAIT_TURN = (
        "wait_turn",
        WORKERS,
        SpanPhase.GATE,
        "a place in a step. Prompts whose first token can be within `slo.ttft_ms` go before deferred ones, and prompts "
        "with less to compute first; at decode only what was not fetched has to wait",
        "waited at {worker} for its turn in a step, behind other prompts",
    )
    COMPUTE = (
        "compute",
        PREFILL,
        SpanPhase.COMPUTE,
        "the rest of the prompt is computed, up to the first token",
        "computed {tokens_computed} tokens of the prompt at {worker}{pace}",
        "tokens_computed",
    )
    RECOMPUTE = (
        "compute",
        DECODE,
        SpanPhase.COMPUTE,
        "what was not fetched is computed, up to the first token. Left out where nothing was missing",
        "computed {tokens_computed} tokens at {worker} whose KV decode did not find{pace}",
        "tokens_computed",
    )
    PUBLISH = (
        "publish",
        PREFILL,
        SpanPhase.FETCH,
        "the last blocks are copied into the arena, under a hold",
        "published its blocks at {worker}",
    )
    GENERATE = (
        "generate",
        DECODE,
        SpanPhase.GENERATE,
        "tokens one by one, to the end. `preemptions` counts how often its pages went to older requests, "
        "`tokens_guessed` and `tokens_accepted` what speculation guessed and what of it came true",
        "generated {tokens} tokens at {worker}{pace}{preempted}",
        "tokens",
    )
    CALL = (
        "call",
        WORKERS,
        SpanPhase.BETWEEN,
        "a call without its worker's spans: the worker was lost or refused it, or the router ended it for a stop "
        "string, a deadline or an abort",
        "was at {worker}, which has not said what it did",
    )
    NETWORK = (
        "network",
        FILLED,
        SpanPhase.BETWEEN,
        "within a call and outside of the worker's spans: gRPC, and the worker's event loop",
        "was between processes",
    )
    ELSEWHERE = "router", FILLED, SpanPhase.BETWEEN, "between calls", "was at the router"


_BY_NAME: Mapping[str, Row] = {name: kind for kind in Kind for name in kind.names}
_UNKNOWN = Row("", FILLED, SpanPhase.BETWEEN, "")
GATES = tuple(name for name, kind in _BY_NAME.items() if kind.phase is SpanPhase.GATE)
"""Names of spans in which a request waits for others."""


def row_of(name: str) -> Row:
    """Returns the row of a span's name; a row without words for an unknown name, as of another version's worker."""
    return _BY_NAME.get(name, _UNKNOWN)


CO_LOCATED, ON_DEVICE = "co_located", "on_device"
"""Changes of a counterfactual other than a gate that is gone."""
_CHANGES = {
    CO_LOCATED: "its prompt computed by its decode worker",
    ON_DEVICE: "its prompt's blocks on the device",
}


def comparisons_of(timeline: pb.Timeline) -> Iterator[str]:
    """Yields words for each counterfactual of a timeline, then for the expected time to the first token."""
    for one in timeline.counterfactuals:
        change = _CHANGES.get(one.change, f"no {'wait' if one.change in GATES else 'others'} at {one.change}")
        yield f"with {change}: {one.ttft_ms:.0f} ms to the first token, {one.total_ms:.0f} ms in all"
    if timeline.HasField("expected_ttft"):
        expected = timeline.expected_ttft
        yield f"like requests: {expected.p50_ms:.0f} ms to the first token, nine in ten within {expected.p90_ms:.0f} ms"


class Journal:
    """The spans of a request at one process, one after another without a gap: the very list that is sent.

    It has no clock: callers pass readings of one monotonic clock. spans: the list in the message to send. place: the
    first part of their names. worker: the name for each span; a router fills it in for its workers.
    """

    def __init__(
        self, spans: MutableSequence[pb.Span], first: Kind, place: str, arrived_s: float, worker: str = ""
    ) -> None:
        self.spans = spans
        self.kind = first
        """The kind of the span that runs."""
        self._place = place
        self._worker = worker
        self._arrived_s = arrived_s
        self._append(first.at(place), worker, 0.0)

    def begin(self, kind: Kind, now_s: float) -> None:
        """Ends the running span and begins another."""
        self._append(kind.at(self._place), self._worker, self.close(now_s))
        self.kind = kind

    def count(self, **amounts: int) -> None:
        """Adds to the counts of the running span."""
        for name, amount in amounts.items():
            if amount:
                self.spans[-1].counts[name] += amount

    def close(self, now_s: float) -> float:
        """Gives the running span an end; returns it, in milliseconds since the arrival."""
        running = self.spans[-1]
        running.duration_ms = max((now_s - self._arrived_s) * 1000 - running.start_ms, 0.0)
        return running.start_ms + running.duration_ms

    def _append(self, name: str, worker: str, start_ms: float) -> None:
        self.spans.append(pb.Span(name=name, worker=worker, start_ms=start_ms))
