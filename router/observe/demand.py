"""The demand on a router, in tokens and streams: sums over the journals of its requests, for the controller.

    journal of an ended request ─ add ─▶ sums ─┐
    journals of the open requests ─────────────┴─ read ─▶ Demand ─▶ controller

Each sum covers open requests as well, so that it grows while they run: a burst shows before its first request ends.
"""

import math
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated

from router.config import LatencyLimits
from router.observe.journal import OK, RequestJournal
from router.workers.members import Member, Members
from wire.errors import DeadlineExceeded
from wire.pools import Role
from wire.typed_reader import Between

MAX_SUM = 1e15
LEAST_S, MOST_S = 1e-9, 60.0
"""Bounds on the time of a token of a prompt; a worker that tells another is not believed."""
Sum = Annotated[float, Between(0, MAX_SUM)]
Count = Annotated[int, Between(0, MAX_SUM)]
JUDGED = (OK, DeadlineExceeded.status.grpc)
"""Outcomes of requests that kept or broke the limits; clients and bad requests end the others."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The demand on one router: sums since its start, which only grow, and the state of now. Times are seconds.

    started: drawn at its start; sums of different starts are not compared. num_prompts, prompt_tokens: all that
    arrived. known_tokens, uncached_tokens: prompts whose KV was looked up, and the part of them that was computed.
    gaps, gaps_s: tokens after the first of each choice, and the time that they took. num_judged: ended requests;
    late_first, late_next: ended requests beyond `slo.ttft_ms`, and beyond `slo.itl_ms`. waiting_tokens: prompts that
    have no first token now. num_streams: choices that generate now; streams_beside: their number in the worker of a
    mean stream. prefill_token_s: the median of the workers that compute prompts; None before one has learned it.
    """

    started: str
    num_prompts: Count = 0
    prompt_tokens: Count = 0
    known_tokens: Count = 0
    uncached_tokens: Count = 0
    gaps: Count = 0
    gaps_s: Sum = 0.0
    num_judged: Count = 0
    late_first: Count = 0
    late_next: Count = 0
    waiting_tokens: Count = 0
    num_streams: Count = 0
    streams_beside: Sum = 0.0
    prefill_token_s: Annotated[float, Between(LEAST_S, MOST_S)] | None = None


class DemandMeter:
    """The sums of a router's demand. `limits` decide which ended requests were late."""

    def __init__(self, limits: LatencyLimits, members: Members) -> None:
        self._limits = limits
        self._members = members
        self._started = secrets.token_hex(8)
        self._sums = Counter[str]()

    def add(self, journal: RequestJournal) -> None:
        """Adds an ended request."""
        self._sums.update(amounts := _amounts(journal))
        if journal.outcome in JUDGED:
            first_ms = journal.timeline.total_ms if journal.ttft_s is None else journal.ttft_s * 1000
            next_ms = amounts["gaps_s"] * 1000 / amounts["gaps"] if amounts["gaps"] else 0.0
            self._sums["num_judged"] += 1
            self._sums["late_first"] += first_ms > (self._limits.ttft_ms or math.inf)
            self._sums["late_next"] += next_ms > (self._limits.itl_ms or math.inf)

    def read(self, running: Iterable[RequestJournal]) -> Demand:
        """Returns the demand now. running: the journals of the open requests."""
        sums, now = Counter(self._sums), Counter[str]()
        for journal in running:
            sums.update(_amounts(journal))
            now["num_streams"] += len(journal.streams_s)
            now["waiting_tokens"] += journal.num_prompt_tokens if journal.ttft_s is None else 0
        loads = [one.num_choices for one in self._members.ready(Role.DECODE)]
        return Demand(
            started=self._started,
            streams_beside=sum(one * one for one in loads) / max(1, sum(loads)),
            prefill_token_s=self._prefill_token_s,
            **sums,
            **now,
        )

    @property
    def _prefill_token_s(self) -> float | None:
        known = (self._learned(self._members.ready(role)) for role in Role)
        return next((median(paces_s) for paces_s in known if paces_s), None)

    @staticmethod
    def _learned(members: Sequence[Member]) -> list[float]:
        """Lists what workers have learned, without what no worker can have."""
        return [pace_s for one in members if (pace_s := one.prefill_token_s) and LEAST_S <= pace_s <= MOST_S]


def _amounts(journal: RequestJournal) -> Counter[str]:
    """Returns what a request adds to the sums, open or ended."""
    num_tokens, streams_s = journal.num_prompt_tokens, journal.streams_s
    amounts = Counter[str](num_prompts=min(1, num_tokens), prompt_tokens=num_tokens)
    if journal.source is not None:
        amounts["known_tokens"] = num_tokens
        amounts["uncached_tokens"] = max(0, num_tokens - sum(journal.cached.values()))
    amounts["gaps"] = max(0, journal.num_output_tokens - len(streams_s))
    amounts["gaps_s"] = sum(streams_s)  # type: ignore[arg-type]
    return amounts
