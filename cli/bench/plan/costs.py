"""Costs of work, learned from the spans of requests that a cluster has answered. Pure.

    compute               s of a span = step and prompt + tokens * prompt_token + tokens * context * pair
    generate              s of a token = step + rows * row + context * context_token + prompt tokens beside * any
    publish               s of a span = transfer + blocks * block
    fetch                 s of a span = fetch + blocks * block

Each is a fit of least absolute deviations without negative terms, which few late spans do not move; of compute over the
periods in which a worker had such spans. Rows, their context, and prompt tokens beside are means over the spans that
the same worker had meanwhile. A copy also waits for other copies and for a step to end, so that only copies tell during
which their worker did nothing else.
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

NUM_FITS = 40
"""Fits of least squares in a row, each with weights by the deviations of the fit before."""
MIN_SPANS, MAX_SPANS = 8, 2000
"""The least number of spans that tell what their work costs, and the most that are looked at."""
COMPUTE, GENERATE = (*Kind.COMPUTE.names, *Kind.RECOMPUTE.names), Kind.GENERATE.names
PUBLISH, FETCH, NETWORK = Kind.PUBLISH.names, Kind.FETCH.names, Kind.NETWORK.names
MODELLED = (*COMPUTE, *PUBLISH, *FETCH)
QUANTILES = np.linspace(0.025, 0.975, 20)
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class WorkCosts:
    """Seconds that work takes: a step by its batch, a transfer, a message from a worker, and the rest of a request.

    step_s: a step. prompt_s: more for a step with a prompt. prompt_token_s: a token of a prompt. pair_s: a token of a
    prompt, for each token before it. row_s: a row that decodes. context_token_s: a token of context of such a row.
    transfer_s, fetch_s, block_s: a copy from pages to the store, a search there, and each block. message_s: a message.
    request_s: the rest of the time to a first token, as quantiles to draw from: the way to the router, its checks,
    gates without a wait, the way back.
    """

    step_s: float = 0.008
    prompt_s: float = 0.0
    prompt_token_s: float = 0.0003
    pair_s: float = 0.0
    row_s: float = 0.0003
    context_token_s: float = 5e-7
    transfer_s: float = 0.002
    fetch_s: float = 0.002
    block_s: float = 0.0002
    message_s: float = 0.001
    request_s: tuple[float, ...] = (0.0,)


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
                one.prompt_len + (num if span.name in GENERATE else -num) / 2,
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

    def beside_none(self, others: "SpanTable") -> "SpanTable":
        """Returns the spans during which no other ran at their worker, of all spans; itself if there are none."""
        rows = np.flatnonzero(self.during(others).sum(1) <= self.took_s * (1.0 + 1e-6))
        if not len(rows):
            return self
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
    every = SpanTable.of(told, (*COMPUTE, *GENERATE, *PUBLISH, *FETCH), 0)
    published, fetched = (SpanTable.of(told, *one).beside_none(every) for one in ((PUBLISH, 1), (FETCH, 0)))
    networks = [one for record in ended for one in _of(record.spans, NETWORK)]
    for what, spans in (("computed prompts", computed), ("answers of two tokens", generated)):
        if len(spans) < MIN_SPANS:
            raise InvalidRequest("costs", f"tell of {len(spans)} {what} with a timeline: {MIN_SPANS} are needed")
    step_s, row_s, context_token_s, _ = _fit_steps(generated, computed)
    compute_s, tokens = computed.busy_sums(computed.num, computed.num * computed.context_len)
    first_s, prompt_token_s, pair_s = _fit([np.ones_like(compute_s), *tokens], compute_s)
    transfer_s, block_s = _fit([np.ones_like(published.num), published.num], published.took_s)
    [fetch_s] = _fit([np.ones_like(fetched.num)], (fetched.took_s - block_s * fetched.num).clip(0.0))
    rests_s, gates_s = np.array([*map(_rest_and_gates_s, ended)]).T
    message_s = median(one.duration_ms / 1000 for one in networks) if networks else 0.0
    rests_s += gates_s.min() - message_s  # the gates of a request that waited at none; the message with the token
    costs = WorkCosts(
        step_s=step_s,
        prompt_s=max(0.0, first_s - step_s),
        prompt_token_s=prompt_token_s,
        pair_s=pair_s,
        row_s=row_s,
        context_token_s=context_token_s,
        transfer_s=transfer_s,
        fetch_s=fetch_s,
        block_s=block_s,
        message_s=message_s,
        request_s=tuple(np.quantile(rests_s, QUANTILES).clip(0.0).tolist()),
    )
    sources = {
        **dict.fromkeys(("step_s", "row_s", "context_token_s"), f"{len(generated)} spans of generate"),
        **dict.fromkeys(("prompt_s", "prompt_token_s", "pair_s"), f"{len(computed)} spans of compute"),
        **dict.fromkeys(("transfer_s", "block_s"), f"{len(published)} spans of publish"),
        "fetch_s": f"{len(fetched)} spans of fetch",
        "message_s": f"median of {len(networks)} spans of network",
        "request_s": f"{len(ended)} requests",
    }
    return LearnedCosts(costs, sources)


def _fit_steps(generated: SpanTable, computed: SpanTable) -> list[float]:
    """Fits the time of a token by the rows of a step, their context, and the prompt tokens of the step."""
    num_steps = generated.num - 1
    together = generated.during(generated) / generated.took_s[:, None]
    prompt_tokens = generated.during(computed) @ (computed.num / computed.took_s) / num_steps
    columns = [np.ones_like(num_steps), together.sum(1), together @ generated.context_len, prompt_tokens]
    return _fit(columns, generated.took_s / num_steps)


def _fit(columns: Sequence[Floats], wanted: Floats) -> list[float]:
    """Fits a factor for each column by least absolute deviations, without negative ones; zeros without rows.

    Squares of deviations, each over the deviation of the fit before, add up to deviations.
    """
    matrix, weights, found = np.stack(columns, axis=1), np.ones((len(wanted), 1)), np.zeros(len(columns))
    for _ in range(NUM_FITS if len(wanted) else 0):
        found = _fit_squares(matrix * weights, wanted * weights[:, 0])
        weights = np.abs(wanted - matrix @ found)[:, None].clip(max(1e-3 * wanted.mean(), 1e-9)) ** -0.5
    return [float(one) for one in found]


def _fit_squares(matrix: Floats, wanted: Floats) -> Floats:
    """Fits a factor for each column by least squares, without negative ones."""
    kept, found = [*range(matrix.shape[1])], np.zeros(matrix.shape[1])
    while kept:
        scale = np.maximum(matrix[:, kept].mean(0), 1e-12)
        solved = np.linalg.lstsq(matrix[:, kept] / scale, wanted, rcond=None)[0]
        if solved.min() >= 0.0:
            found[kept] = solved / scale
            break
        kept.pop(int(solved.argmin()))
    return found


def _rest_and_gates_s(record: Record) -> tuple[float, float]:
    """Returns the time to the first token that no work or gate took, and that of the gates."""
    publishes = bool(_of(record.spans, PUBLISH))
    last = _of(record.spans, Kind.WAIT_DECODE.names if publishes else GENERATE)
    first_ms = min((span.start_ms for span in last), default=math.inf)
    before = [span for span in record.spans if span.start_ms < first_ms]
    modelled_s, gates_s = (sum(span.duration_ms for span in _of(before, kinds)) / 1000 for kinds in (MODELLED, GATES))
    return record.chunks[0][0] - record.sent_s - modelled_s - gates_s, gates_s


def _of(spans: Sequence[Span], kinds: Sequence[str]) -> list[Span]:
    return [span for span in spans if span.name in kinds]


def _num_units(span: Span) -> int:
    """Counts the tokens or blocks of a span."""
    unit = row_of(span.name).unit
    return span.counts.get(unit, 0) if unit else sum(n for name, n in span.counts.items() if name.startswith("blocks"))
