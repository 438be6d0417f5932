"""The journal of a request at the router: each fact is written once, by its owner; reports are folds over it.

    router    |check|tokenize|wait_*|                     |wait_decode|
    worker                         .  |prefill.*| prefill.* |.           .|decode.*   ...   |.
    gaps      within a call (.) are `network`, all others `router`

    flow, attempt ─ begin, call ─▶ spans ◀─ end_call ─ spans of a worker's own journal
    folds: timeline, usage, line of the log, metrics, OTLP spans, causes, `baton requests`, `baton why`

A worker's spans count from the call's arrival; here they count from its sending, so that no two processes' clocks are
compared. docs/timeline.md describes each span.
"""

from collections.abc import Mapping, Sequence

from wire.convert import reason_from_pb, tiers_from_pb
from wire.errors import BatonError, Cancelled, InvalidRequest, PromptReturned, Unsupported
from wire.ids import QualifiedId, WorkerId
from wire.journal import GATES, Journal, Kind
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.pools import Role
from wire.tier import Tier

ROUTER, NETWORK = Kind.ELSEWHERE.step, Kind.NETWORK.step
OK, CANCELLED = "OK", Cancelled.status.grpc
PROMPT_RETURNED = PromptReturned("").reason


def outcome_of(error: Exception) -> str:
    """Returns the gRPC status that a client gets for an error; an exception other than BatonError is a bug."""
    return error.status.grpc if isinstance(error, BatonError) else BatonError.status.grpc


class RequestJournal(Journal):
    """The journal of a request. Times passed to it are seconds of one monotonic clock.

    While `kind` is ELSEWHERE, the running span is a gap, which the next `begin` renames.

    timeline: its spans, workers, and the reason for the prompt's pool. source: the tiers of the prompt's KV; None
    before they are known. outcome, reason, message: describe the end, without text of the request. finish_reasons: the
    choices' ends, if the request ended well. num_resumed_tokens: tokens of the answer from an earlier router.
    """

    def __init__(self, request_id: QualifiedId, arrived_s: float) -> None:
        self.timeline = pb.Timeline()
        super().__init__(self.timeline.spans, Kind.CHECK, ROUTER, arrived_s, ROUTER)
        self.request_id = request_id
        self.attempts_ms: list[float] = []
        """The begin of each attempt."""
        self.num_prompt_tokens = self.num_resumed_tokens = self.num_output_tokens = 0
        self.source: worker_pb2.PromptSource | None = None
        self.ttft_s: float | None = None
        """Time from arrival to the first token; None before it."""
        self.outcome, self.reason, self.message = OK, "", ""
        self.finish_reasons: Sequence[str] = ()
        self.key_id = ""
        """The caller's key; "" without keys."""
        self.forecast_s: float | None = None
        """Time from arrival to the end, as the router expected it; None if it did not."""
        self._gained_s: dict[int, float] = {}

    def age_s(self, now_s: float) -> float:
        """Returns the seconds since the request's arrival."""
        return now_s - self._arrived_s

    def begin(self, kind: Kind, now_s: float) -> None:
        """Begins a step of the router, which includes the time since the last step's end."""
        if self.kind is Kind.ELSEWHERE:
            self.kind, self.spans[-1].name = kind, kind.at(self._place)
        else:
            super().begin(kind, now_s)

    def leave(self, now_s: float) -> None:
        """Ends the running step."""
        if self.kind is not Kind.ELSEWHERE:
            self._fill(self.close(now_s))

    def pass_on(self) -> None:
        """Leaves the time of the running step to the next step."""
        self.kind, self.spans[-1].name = Kind.ELSEWHERE, ROUTER

    def begin_attempt(self, now_s: float) -> None:
        """Ends the running step, and notes the begin of an attempt."""
        self.leave(now_s)
        self.attempts_ms.append(self.spans[-1].start_ms)

    def plan(self, reason: str) -> None:
        """Notes the reason for the prompt's pool, when a new attempt computes the prompt."""
        self.timeline.prefill_worker, self.timeline.prefill_reason, self.source = "", reason, None

    def call(self, role: Role, worker: WorkerId, now_s: float) -> None:
        """Begins a call of a worker. A request's calls do not overlap."""
        sent_ms = self._end_step(now_s)
        self.kind = Kind.CALL
        self._append(Kind.CALL.at(role.value), worker, sent_ms)
        setattr(self.timeline, f"{role.value}_worker", worker)

    def end_call(self, now_s: float, told: Sequence[pb.Span] = (), error: str = "") -> Sequence[pb.Span]:
        """Replaces a call by the worker's spans, cut at the call's end; the last span has the call's error.

        Returns them, with `network` in the gaps. A call without a worker's spans stays a span.
        """
        ended_ms, place = self.close(now_s), len(self.spans) - 1
        call = self.spans.pop() if told else self.spans[-1]
        for span in told:
            begun_ms = self._reached(call.start_ms, place, min(call.start_ms + span.start_ms, ended_ms))
            self._append(span.name, call.worker, begun_ms)
            self.spans[-1].duration_ms = max(
                min(call.start_ms + span.start_ms + span.duration_ms, ended_ms) - begun_ms, 0.0
            )
            self.spans[-1].counts.update(span.counts)
        self.spans[-1].error = error
        self._reached(call.start_ms, place, ended_ms)
        spans = self.spans[place:]
        self._fill(ended_ms)
        return spans

    def gain(self, choice: int, num_tokens: int, now_s: float) -> float | None:
        """Notes gained tokens of a choice; returns the time of its last gain, None at the first."""
        self.num_output_tokens += num_tokens
        if self.ttft_s is None:
            self.ttft_s = self.age_s(now_s)
        last_s = self._gained_s.get(choice)
        self._gained_s[choice] = now_s
        return last_s

    def end(self, ended: pb.Complete | BatonError, now_s: float) -> None:
        """Ends the last span. If an error's message may quote the request, only its parameter is kept."""
        self.timeline.total_ms = self._end_step(now_s)
        if isinstance(ended, BatonError):
            may_quote = isinstance(ended, InvalidRequest | Unsupported)
            self.outcome, self.reason = outcome_of(ended), ended.reason
            self.message = ended.ids.get("param", "") if may_quote else ended.message
        else:
            reasons = (reason_from_pb(choice.finish_reason) for choice in ended.choices)
            self.finish_reasons = [reason.value for reason in reasons if reason is not None]

    def expect(self, left_s: float | None, now_s: float) -> None:
        """Notes the time until the end, as the router expects it."""
        self.forecast_s = None if left_s is None else self.age_s(now_s) + left_s

    @property
    def inter_token_s(self) -> float | None:
        """Mean time of a token behind the first of its choice; None without any."""
        num_later = self.num_output_tokens - len(self._gained_s)
        if self.ttft_s is None or num_later < 1:
            return None
        return sum(last_s - self._arrived_s - self.ttft_s for last_s in self._gained_s.values()) / num_later

    @property
    def at(self) -> str:
        """The present or last step or call of the request."""
        return next(span.name for span in reversed(self.spans) if span.name not in (ROUTER, NETWORK))

    @property
    def streams_s(self) -> Sequence[float]:
        """For each choice with a token, the time from the request's first token to the choice's last so far."""
        first_s = self._arrived_s + (self.ttft_s or 0.0)
        return [last_s - first_s for last_s in self._gained_s.values()]

    @property
    def num_attempts(self) -> int:
        return len(self.attempts_ms) or 1

    @property
    def num_moves(self) -> int:
        """Counts the attempts that ended because a worker returned the prompt."""
        return sum(span.error == PROMPT_RETURNED for span in self.spans)

    @property
    def cached(self) -> Mapping[str, int]:
        """Prompt tokens by the tier that had their KV."""
        return {} if self.source is None else tiers_from_pb(self.source.cached_tokens)

    @property
    def misses(self) -> Sequence[worker_pb2.MissRun]:
        """The causes of uncached blocks."""
        return () if self.source is None else self.source.misses

    @property
    def waits_s(self) -> Mapping[str, float]:
        """Time spent at each gate."""
        waits_s: dict[str, float] = {}
        for span in self.spans:
            if span.name in GATES:
                waits_s[span.name] = waits_s.get(span.name, 0.0) + span.duration_ms / 1000
        return waits_s

    def total(self, count: str) -> int:
        """Sums a count over the spans."""
        return sum(span.counts.get(count, 0) for span in self.spans)

    @property
    def values(self) -> Mapping[str, object]:
        """The fields of its line in the log; no text of prompt or answer."""
        timeline, waits_s, cached = self.timeline, self.waits_s, self.cached
        return {
            "request_id": self.request_id,
            "outcome": self.outcome,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            **{f"cached_{tier}": cached.get(tier, 0) for tier in Tier},
            "prefill_worker": timeline.prefill_worker or None,
            "decode_worker": timeline.decode_worker or None,
            "prefill_reason": timeline.prefill_reason or None,
            "attempts": self.num_attempts,
            "ttft_ms": None if self.ttft_s is None else round(self.ttft_s * 1000, 1),
            "total_ms": round(timeline.total_ms, 1),
            "waited_ms": round(sum(waits_s.values()) * 1000, 1),
            "longest_wait": max(waits_s, key=waits_s.__getitem__, default=None),
        }

    def _end_step(self, now_s: float) -> float:
        """Closes the running span; drops a span without a step that took no time."""
        ended_ms = self.close(now_s)
        if self.kind is Kind.ELSEWHERE and not self.spans[-1].duration_ms:
            self.spans.pop()
        return ended_ms

    def _reached(self, sent_ms: float, place: int, to_ms: float) -> float:
        """Fills the call from its last span to a time with `network`; returns the call's end so far, maybe later.

        sent_ms: the call's begin. place: index in `spans` of the call's first span. to_ms: the time to fill up to.
        """
        last = self.spans[-1]
        from_ms = sent_ms if len(self.spans) == place else last.start_ms + last.duration_ms
        if to_ms > from_ms:
            self._append(NETWORK, ROUTER, from_ms)
            self.spans[-1].duration_ms = to_ms - from_ms
        return max(from_ms, to_ms)

    def _fill(self, from_ms: float) -> None:
        self.kind = Kind.ELSEWHERE
        self._append(ROUTER, ROUTER, from_ms)
