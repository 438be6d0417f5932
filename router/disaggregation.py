"""The choice between prefill pool and decode worker for computing a prompt: one rule, by learned times.

prefill pool        (queued + uncached tokens) * prefill of a token + hand-off of the uncached tokens
decode worker       (queued + uncached tokens * (1 + streams)) * prefill of a token: each stream waits for the prompt

A prompt goes where the total time of all requests, running streams included, grows least. Workers learn the time of a
token (`kv_store/prefix/costs.py`), the router the time of a hand-off, by length, from timelines. Cached blocks are read
either way.
"""

from collections.abc import Sequence
from enum import StrEnum
from statistics import median
from typing import Protocol

from router.config import Disaggregation
from router.sized_durations import SizedDurations
from wire.ids import WorkerId
from wire.journal import Kind
from wire.pb import inference_pb2 as pb
from wire.tier import FAR_TIERS, Duration, Tier

HAND_OFF_PRIOR_S = 0.01
LEFT_BEHIND = (*Kind.PUBLISH.names, *Kind.NETWORK.names)
"""Spans of a hand-off within its prefill call."""
_FETCHED = tuple(f"tokens_{tier}" for tier in (Tier.HOST, *FAR_TIERS))


class Load(Protocol):
    """A worker, as policies see it: its choices and its tokens, in prompts to prefill or in contexts to decode.

    num_prompt_tokens: prompt tokens that a decode worker has yet to prefill. is_silent: its engine may hang, or be in a
    long step. prefill_token_s: seconds of prefill a token; None before its first prompt.
    """

    @property
    def id(self) -> WorkerId: ...
    @property
    def num_choices(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def is_silent(self) -> bool: ...
    @property
    def prefill_token_s(self) -> float | None: ...


class PrefillReason(StrEnum):
    """The reason why the prefill pool computes a prompt, or a decode worker does; docs/timeline.md describes each."""

    ALWAYS = "always"
    NEVER = "never"
    ABSENT = "no_prefill_worker"
    PREFILL_SILENT = "prefill_silent"
    DECODE_SILENT = "decode_silent"
    NOT_LEARNED = "not_learned"
    SOONER = "sooner"
    CHEAPER = "cheaper"
    BUSY = "busy"

    @property
    def uses_prefill(self) -> bool:
        return self in (self.ALWAYS, self.DECODE_SILENT, self.NOT_LEARNED, self.SOONER)


def decide(
    mode: Disaggregation, prefill: Sequence[Load], decode: Sequence[Load], num_new_tokens: int, hand_off_s: float
) -> PrefillReason:
    """Chooses the pool that computes a prompt. Silent workers count only if all of their pool are silent.

    num_new_tokens: the prompt's tokens that no worker is thought to have. hand_off_s: the learned duration.
    """
    is_prefill_silent, is_decode_silent = (all(one.is_silent for one in pool) for pool in (prefill, decode))
    if mode is Disaggregation.NEVER:
        return PrefillReason.NEVER
    if not prefill:
        return PrefillReason.ABSENT
    if is_prefill_silent and not is_decode_silent:
        return PrefillReason.PREFILL_SILENT
    if mode is Disaggregation.ALWAYS:
        return PrefillReason.ALWAYS
    if not decode or (is_decode_silent and not is_prefill_silent):
        return PrefillReason.DECODE_SILENT
    return _sooner(_awake(prefill), _awake(decode), num_new_tokens, hand_off_s)


def _sooner(prefill: Sequence[Load], decode: Sequence[Load], num_new_tokens: int, hand_off_s: float) -> PrefillReason:
    """Compares the pools. A worker without a computed prompt counts like the others."""
    known = [one.prefill_token_s for one in (*prefill, *decode) if one.prefill_token_s is not None]
    if not known:
        return PrefillReason.NOT_LEARNED
    usual_s = median(known)
    idle_s = hand_off_s + num_new_tokens * min(one.prefill_token_s or usual_s for one in prefill)
    there_s = hand_off_s + min((one.num_tokens + num_new_tokens) * (one.prefill_token_s or usual_s) for one in prefill)
    here_s = min(
        (one.num_prompt_tokens + num_new_tokens * (1 + one.num_choices)) * (one.prefill_token_s or usual_s)
        for one in decode
    )
    if there_s <= here_s:
        return PrefillReason.SOONER
    return PrefillReason.CHEAPER if here_s < idle_s else PrefillReason.BUSY


def _awake(pool: Sequence[Load]) -> Sequence[Load]:
    return [one for one in pool if not one.is_silent] or pool


class HandOffDuration:
    """The learned duration of a hand-off, by the uncached tokens of its prompt, in seconds.

    Its line begins with two magnitudes of prompts; until then it is the mean of all.
    """

    def __init__(self) -> None:
        self._mean = Duration(HAND_OFF_PRIOR_S)
        self._by_tokens = SizedDurations()

    def learn(self, prefill: Sequence[pb.Span], decode: Sequence[pb.Span]) -> None:
        """Learns from the spans of both calls of an attempt."""
        took_s, num_tokens = hand_off_s(prefill, decode), num_computed(prefill)
        if took_s is not None:
            self._mean.learn(took_s)
            self._by_tokens.learn(num_tokens, took_s)

    def at(self, num_new_tokens: int) -> float:
        line = self._by_tokens.line
        return self._mean.mean_s if line is None else line.at(num_new_tokens)


def num_computed(spans: Sequence[pb.Span]) -> int:
    """Counts the tokens of the prompt that a call computed."""
    return sum(span.counts.get(Kind.COMPUTE.unit, 0) for span in spans)


def hand_off_s(prefill: Sequence[pb.Span], decode: Sequence[pb.Span]) -> float | None:
    """Duration of a hand-off without queueing: publish, network, and fetch, but for the share of cached blocks.

    None if either call has no spans.
    """
    if any(span.name in Kind.CALL.names for span in (*prefill, *decode)):
        return None
    fetches = [span for span in decode if span.name in Kind.FETCH.names]
    num_fetched = sum(span.counts.get(name, 0) for span in fetches for name in _FETCHED)
    share = min(num_computed(prefill) / num_fetched, 1.0) if num_fetched else 1.0
    behind_ms = sum(span.duration_ms for span in prefill if span.name in LEFT_BEHIND)
    return (behind_ms + share * sum(span.duration_ms for span in fetches)) / 1000
