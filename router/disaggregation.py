"""Whether the prefill pool computes a prompt, or the decode worker that goes on with it: one rule, by learned times.

prefill pool        (queued + uncached tokens) * prefill of a token + hand-off
decode worker       (queued + uncached tokens * (1 + streams)) * prefill of a token: each stream waits for the prompt

A prompt goes where the sum over all requests, this one and the streams, grows least. Workers learn the time of a token
(`kv_store/prefix/costs.py`), the router that of a hand-off, from timelines. Cached blocks are read either way.
"""

from collections.abc import Sequence
from enum import StrEnum
from statistics import median
from typing import Protocol

from router.config import Disaggregation
from router.observe.timeline import TimedCall
from wire.ids import WorkerId
from wire.journal import Kind
from wire.pools import Role

HAND_OFF_PRIOR_S = 0.01
PUBLISH, FETCH = Kind.PUBLISH.at(Role.PREFILL.value), Kind.FETCH.at(Role.DECODE.value)


class Load(Protocol):
    """A worker, as policies see it: its choices and its tokens, of prompts to prefill or of contexts to decode.

    num_prompt_tokens: of prompts that a decode worker has yet to prefill. is_silent: its engine may hang, or be in a
    long step. prefill_token_s: seconds of prefill a token; None before it has computed a prompt.
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
    """Chooses the pool that computes a prompt. Silent workers count only where all of their pool are.

    num_new_tokens: the tokens of the prompt that no worker is thought to have. hand_off_s: as learned.
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
    """Compares the pools. A worker that has computed no prompt counts as the others do."""
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


def hand_off_s(prefill: TimedCall, decode: TimedCall) -> float | None:
    """Measures what a hand-off took beside waits: to publish, to reach the router, to fetch.

    None for a call whose worker told no spans.
    """
    if prefill.ended_ms is None or not (prefill.spans and decode.spans):
        return None
    elsewhere_ms = sum(span.duration_ms for span in prefill.spans if span.name != PUBLISH)
    fetch_ms = sum(span.duration_ms for span in decode.spans if span.name == FETCH)
    return max(prefill.ended_ms - prefill.sent_ms - elsewhere_ms, 0.0) / 1000 + fetch_ms / 1000
