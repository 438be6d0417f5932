"""Costs of work, learned from the spans of requests that a cluster has answered. Pure.

    compute               s of a span = step and prompt + tokens * prompt_token + tokens * context * pair
    generate              s of a token = step + rows * row + context * context_token + prompt tokens beside * any
    publish and fetch     s of a span = transfer + blocks * block

Each is a least-squares fit without negative terms, of compute over the periods in which a worker had such spans. Rows,
their context, and prompt tokens beside are means over the spans that the same worker had meanwhile. A copy also waits
for other copies and for a step to end, so that only the quickest of them tell.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from baton.results import Span
from cli.bench.latency import Record
from wire.errors import InvalidRequest
from wire.journal import GATES, Kind, row_of

QUICK_SHARE = 0.25
MIN_SPANS, MAX_SPANS = 8, 2000
"""The least number of spans that tell what their work costs, and the most that are looked at."""
COMPUTE, GENERATE = (*Kind.COMPUTE.names, *Kind.RECOMPUTE.names), Kind.GENERATE.names
COPY = (*Kind.PUBLISH.names, *Kind.FETCH.names)
NETWORK = Kind.NETWORK.names
MODELLED = (*COMPUTE, *COPY, *NETWORK, *GATES)
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class WorkCosts:
    """Seconds that work takes: a step by its batch, a transfer, a message from a worker, and the rest of a request.

    step_s: a step. prompt_s: more for a step with a prompt. prompt_token_s: a token of a prompt. pair_s: a token of a
    prompt, for each token of context. row_s: a row that decodes. context_token_s: a token of context of such a row.
    transfer_s, block_s: a copy between pages and store, and each of its blocks. message_s: a message. request_s: a
    request's way to the router, its checks there, and the way of its first token to the client.
    """

    step_s: float = 0.008
    prompt_s: float = 0.0
    prompt_token_s: float = 0.0003
    pair_s: float = 0.0
    row_s: float = 0.0003
    context_token_s: float = 5e-7
    transfer_s: float = 0.002
    block_s: float = 0.0002
    message_s: float = 0.001
    request_s: float = 0.0


@dataclass(frozen=True)
class LearnedCosts:
    """Costs, and what each was learned from, by the name of its field."""

    costs: WorkCosts
    sources: Mapping[str, str]


@dataclass(frozen=True)
class SpanTable:
    """Spans of some kinds, a row each: worker, seconds from the round's start, tokens or blocks, tokens of context."""

    workers: npt.NDArray[np.str_]
    begin_s: Floats
    took_s: Floats
    num: Floats
    context_len: Floats

    @classmethod
    def of(cls, rounds: Sequence[Sequence[Record]], kinds: Sequence[str], least: int) -> "SpanTable":
        """Collects the spans that moved or made at least so many tokens or blocks."""
        found = sorted(
            (
                f"{number} {span.worker}",
                one.sent_s + span.start_ms / 1000,
                span.duration_ms / 1000,
                num,
                one.prompt_len + num / 2,
            )
            for number, records in enumerate(rounds)
            for one in records
            for span in one.spans
            if span.name in kinds and span.duration_ms > 0 and (num := _num_units(span)) >= least
            if math.isfinite(one.sent_s + span.start_ms + span.duration_ms)
        )[:MAX_SPANS]
        workers, *numbers = zip(*found, strict=True) if found else [()] * 5
        return cls(np.array(workers, np.str_), *(np.array(each, np.float64) for each in numbers))

    def __len__(self) -> int:
        return len(self.workers)

    def busy_sums(self, *columns: Floats) -> tuple[Floats, list[Floats]]:
        """Returns the seconds of each period in which a worker had such spans, and the sums of columns over its spans.

        Work of one kind at one worker runs together, or waits for each other.
        """
        ends_s = self.begin_s + self.took_s
        begins, last_s = list[int](), 0.0
        for row in range(len(self)):
            if not row or self.workers[row] != self.workers[row - 1] or self.begin_s[row] > last_s:
                begins.append(row)
                last_s = 0.0
            last_s = max(last_s, ends_s[row])
        if not begins:
            return self.took_s, [*columns]
        took_s = np.maximum.reduceat(ends_s, begins) - self.begin_s[begins]
        return took_s, [np.add.reduceat(column, begins) for column in columns]

    def quickest(self, share: float) -> "SpanTable":
        """Returns the share of the spans that took the least time for a token or block, rounded up."""
        rows = np.argsort(self.took_s / self.num, kind="stable")[: math.ceil(share * len(self))]
        return SpanTable(
            self.workers[rows], self.begin_s[rows], self.took_s[rows], self.num[rows], self.context_len[rows]
        )

    def during(self, other: "SpanTable") -> Floats:
        """Returns the seconds for which each span ran together with each other one at its worker."""
        begin_s = np.maximum(self.begin_s[:, None], other.begin_s)
        end_s = np.minimum((self.begin_s + self.took_s)[:, None], other.begin_s + other.took_s)
        together: Floats = np.clip(end_s - begin_s, 0.0, None) * (self.workers[:, None] == other.workers)
        return together


def learn(rounds: Sequence[Sequence[Record]]) -> LearnedCosts:
    """Learns the costs of work from rounds of requests. Raises InvalidRequest if they tell too little."""
    told = [[one for one in records if one.error is None and one.chunks and one.spans] for records in rounds]
    ended = [one for records in told for one in records]
    computed, generated = SpanTable.of(told, COMPUTE, 1), SpanTable.of(told, GENERATE, 2)
    copied, networks = SpanTable.of(told, COPY, 1), [one for record in ended for one in _of(record.spans, NETWORK)]
    for what, spans in (("computed prompts", computed), ("answers of two tokens", generated)):
        if len(spans) < MIN_SPANS:
            raise InvalidRequest("costs", f"tell of {len(spans)} {what} with a timeline: {MIN_SPANS} are needed")
    step_s, row_s, context_token_s, _ = _fit_steps(generated, computed)
    compute_s, tokens = computed.busy_sums(computed.num, computed.num * computed.context_len)
    first_s, prompt_token_s, pair_s = _fit([np.ones_like(compute_s), *tokens], compute_s)
    quick = copied.quickest(QUICK_SHARE)
    transfer_s, block_s = _fit([np.ones_like(quick.num), quick.num], quick.took_s)
    costs = WorkCosts(
        step_s=step_s,
        prompt_s=max(0.0, first_s - step_s),
        prompt_token_s=prompt_token_s,
        pair_s=pair_s,
        row_s=row_s,
        context_token_s=context_token_s,
        transfer_s=transfer_s,
        block_s=block_s,
        message_s=median(one.duration_ms / 1000 for one in networks) if networks else 0.0,
        request_s=max(0.0, median(map(_unmodelled_s, ended))),
    )
    by_steps, by_prompts, by_copies = (
        f"{len(spans)} spans of {kinds}"
        for spans, kinds in ((generated, "generate"), (computed, "compute"), (copied, "publish and fetch"))
    )
    sources = dict.fromkeys(("step_s", "row_s", "context_token_s"), by_steps)
    sources |= dict.fromkeys(("prompt_s", "prompt_token_s", "pair_s"), by_prompts)
    sources |= dict.fromkeys(("transfer_s", "block_s"), by_copies)
    sources |= dict.fromkeys(("message_s", "request_s"), f"medians of {len(ended)} requests")
    return LearnedCosts(costs, sources)


def _fit_steps(generated: SpanTable, computed: SpanTable) -> list[float]:
    """Fits the time of a token by the rows of a step, their context, and the prompt tokens of the step."""
    num_steps = generated.num - 1
    together = generated.during(generated) / generated.took_s[:, None]
    prompt_tokens = generated.during(computed) @ (computed.num / computed.took_s) / num_steps
    columns = [np.ones_like(num_steps), together.sum(1), together @ generated.context_len, prompt_tokens]
    return _fit(columns, generated.took_s / num_steps)


def _fit(columns: Sequence[Floats], wanted: Floats) -> list[float]:
    """Fits a factor for each column by least squares, without negative ones; zeros without rows."""
    matrix = np.stack(columns, axis=1)
    kept, found = [*range(len(columns))] if len(wanted) else [], np.zeros(len(columns))
    while kept:
        scale = np.maximum(matrix[:, kept].mean(0), 1e-12)
        solved = np.linalg.lstsq(matrix[:, kept] / scale, wanted, rcond=None)[0]
        if solved.min() >= 0.0:
            found[kept] = solved / scale
            break
        kept.pop(int(solved.argmin()))
    return [float(one) for one in found]


def _unmodelled_s(record: Record) -> float:
    """Returns the time to the first token that no worker, message or gate took."""
    publishes = any(span.name in Kind.PUBLISH.names for span in record.spans)
    last = Kind.WAIT_DECODE.names if publishes else GENERATE
    first_ms = min((span.start_ms for span in _of(record.spans, last)), default=float("inf"))
    modelled_ms = sum(span.duration_ms for span in _of(record.spans, MODELLED) if span.start_ms < first_ms)
    return record.chunks[0][0] - record.sent_s - modelled_ms / 1000


def _of(spans: Sequence[Span], kinds: Sequence[str]) -> list[Span]:
    return [span for span in spans if span.name in kinds]


def _num_units(span: Span) -> int:
    """Counts the tokens or blocks of a span."""
    unit = row_of(span.name).unit
    return span.counts.get(unit, 0) if unit else sum(n for name, n in span.counts.items() if name.startswith("blocks"))
