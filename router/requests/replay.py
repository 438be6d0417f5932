"""The next step after a lost attempt: another attempt, an isolated retry, or the end."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import Enum

from wire.errors import (
    BatonError,
    Cancelled,
    PromptReturned,
    RequestExists,
    Unavailable,
    WireError,
    WorkerLeaving,
)
from wire.ids import BlockKey, QualifiedId

MAX_ATTEMPTS = 3
MIN_PROGRESS = 16

_LOSSES = (Unavailable, Cancelled, WireError, RequestExists)
"""Errors about the worker, not the request: another attempt may succeed.

RequestExists: the worker is still ending an earlier request with this id.
"""


class NextStep(Enum):
    """The next step after an attempt. RETRY_ALONE: an isolated retry, maybe the last. FAIL: ends the request."""

    RETRY = "retry"
    RETRY_ALONE = "retry alone"
    GIVE_UP = "give up"
    FAIL = "fail"


@dataclass(frozen=True)
class AttemptHistory:
    """The attempts at a request: their number, the running attempt included, and how many of the last were in vain.

    reads_cache: false after NaN or infinite logits in an attempt that had read cached KV. is_moved: whether the last
    worker has returned the prompt for another one.

    An attempt with fewer than `MIN_PROGRESS` new tokens was in vain. Several in a row suggest that the request itself
    kills workers; a long request may outlive any number of workers.
    """

    number: int = 1
    num_in_vain: int = 0
    num_tokens_before: int = 0
    reads_cache: bool = True
    is_moved: bool = False

    def is_in_vain(self, num_tokens: int) -> bool:
        """Tells whether the running attempt was in vain if the client now has `num_tokens` tokens."""
        return num_tokens - self.num_tokens_before < MIN_PROGRESS

    def after(self, error: BatonError, num_tokens: int) -> "AttemptHistory":
        """Returns the next attempt, after this attempt ended with `error` when the client had `num_tokens` tokens.

        A leaving worker that gives a request back has not died of it.
        """
        num_in_vain = self.num_in_vain + (not isinstance(error, WorkerLeaving)) if self.is_in_vain(num_tokens) else 0
        is_moved = isinstance(error, PromptReturned)
        return AttemptHistory(self.number + 1, num_in_vain, num_tokens, self.reads_cache, is_moved)

    def without_cache(self) -> "AttemptHistory":
        """Returns the next attempt after NaN or infinite logits: it reads no cached KV, which may be the cause."""
        return replace(self, number=self.number + 1, reads_cache=False)


def next_step(error: BatonError, following: AttemptHistory) -> NextStep:
    """Decides the step after an attempt that ended with this error; `following` would be the next attempt."""
    if not isinstance(error, _LOSSES):
        return NextStep.FAIL
    if following.num_in_vain >= MAX_ATTEMPTS:
        return NextStep.GIVE_UP
    return NextStep.RETRY_ALONE if following.num_in_vain == MAX_ATTEMPTS - 1 else NextStep.RETRY


class IsolatedRetries:
    """The queue of isolated retries: attempts that may be the last of their requests, made one at a time.

    Of the requests that two workers had when they died, one may be the cause. Together, a third death would end all of
    these requests; tried one at a time, the cause ends alone.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._holder: QualifiedId | None = None
        self._open: set[QualifiedId] = set()

    @asynccontextmanager
    async def alone(self, request_id: QualifiedId) -> AsyncIterator[None]:
        """Waits in FIFO order, then is the only such request until `clear` or the context's end."""
        self._open.add(request_id)
        try:
            await self._lock.acquire()
            self._holder = request_id
            yield
        finally:
            self.clear(request_id)

    def clear(self, request_id: QualifiedId) -> None:
        """Admits the next request once this request's attempt makes progress. Takes any request, at any time."""
        self._open.discard(request_id)
        if request_id == self._holder:
            self._holder = None
            self._lock.release()

    def check(self) -> list[str]:
        """Lists requests in or before an isolated retry; empty once no request is open."""
        return [f"request {request_id} is tried alone, or waits for it" for request_id in sorted(self._open)]


class Quarantine:
    """Prompts over which workers were lost, by the key of their last block: the `max_prompts` latest, each for `ttl_s`.

    Pure: callers pass times.
    """

    def __init__(self, ttl_s: float = 60.0, max_prompts: int = 1024) -> None:
        self._ttl_s = ttl_s
        self._max_prompts = max_prompts
        self._ends: OrderedDict[BlockKey, float] = OrderedDict()

    def add(self, prompt: BlockKey, now_s: float) -> None:
        """Notes that a request with this prompt was abandoned."""
        self._ends[prompt] = now_s + self._ttl_s
        self._ends.move_to_end(prompt)
        while len(self._ends) > self._max_prompts:
            self._ends.popitem(last=False)

    def contains(self, prompt: BlockKey, now_s: float) -> bool:
        return now_s < self._ends.get(prompt, now_s)
