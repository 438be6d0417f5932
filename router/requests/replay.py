"""The next step after a lost attempt: another attempt, another one alone, or the end."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import Enum

from wire.errors import BatonError, Cancelled, RequestExists, Unavailable, WireError, WorkerLeaving
from wire.ids import BlockKey, QualifiedId

MAX_ATTEMPTS = 3
MIN_PROGRESS = 16

_LOSSES = (Unavailable, Cancelled, WireError, RequestExists)
"""Errors that say something of the worker and nothing of the request: another attempt may do better.

RequestExists: the worker has not quite left an earlier request of that id.
"""


class NextStep(Enum):
    """RETRY_ALONE: the attempt may be the last, and is made while no other such attempt is. FAIL: with the error."""

    RETRY = "retry"
    RETRY_ALONE = "retry alone"
    GIVE_UP = "give up"
    FAIL = "fail"


@dataclass(frozen=True)
class AttemptHistory:
    """The attempts at a request: their number, the one under way included, and the number of the last in vain.

    reads_cache: false once an attempt that had read cached KV got logits that were NaN or infinite.

    An attempt that brought fewer than `MIN_PROGRESS` tokens was in vain. Several of these in a row say that the request
    itself may be what workers die of: a long request may outlive any number of them.
    """

    number: int = 1
    num_in_vain: int = 0
    num_tokens_before: int = 0
    reads_cache: bool = True

    def is_in_vain(self, num_tokens: int) -> bool:
        """Tells whether the attempt under way is, when the client has `num_tokens` tokens."""
        return num_tokens - self.num_tokens_before < MIN_PROGRESS

    def after(self, error: BatonError, num_tokens: int) -> "AttemptHistory":
        """Returns the next attempt, where this one ended with `error` when the client had `num_tokens` tokens.

        A worker that gives a request back because it leaves has not died of it.
        """
        num_in_vain = self.num_in_vain + (not isinstance(error, WorkerLeaving)) if self.is_in_vain(num_tokens) else 0
        return AttemptHistory(self.number + 1, num_in_vain, num_tokens, self.reads_cache)

    def without_cache(self) -> "AttemptHistory":
        """Returns the next attempt, after logits that were NaN or infinite: cached KV may be why, so it reads none."""
        return replace(self, number=self.number + 1, reads_cache=False)


def next_step(error: BatonError, following: AttemptHistory) -> NextStep:
    """Decides what follows an attempt that ended with this error; `following` is the attempt that would be next."""
    if not isinstance(error, _LOSSES):
        return NextStep.FAIL
    if following.num_in_vain >= MAX_ATTEMPTS:
        return NextStep.GIVE_UP
    return NextStep.RETRY_ALONE if following.num_in_vain == MAX_ATTEMPTS - 1 else NextStep.RETRY


class IsolatedRetries:
    """Attempts that may be the last of their requests, made one at a time.

    Of the requests that were on two workers when these died, one may be what they died of. Tried together, a third
    death would end them all; tried one by one, it ends the one.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._holder: QualifiedId | None = None
        self._open: set[QualifiedId] = set()

    @asynccontextmanager
    async def alone(self, request_id: QualifiedId) -> AsyncIterator[None]:
        """Waits in FIFO order to be the only such request, until `clear` or the end of the context."""
        self._open.add(request_id)
        try:
            await self._lock.acquire()
            self._holder = request_id
            yield
        finally:
            self.clear(request_id)

    def clear(self, request_id: QualifiedId) -> None:
        """Lets the next request be tried, once this one's attempt leads somewhere. Takes any request, at any time."""
        self._open.discard(request_id)
        if request_id == self._holder:
            self._holder = None
            self._lock.release()

    def check(self) -> list[str]:
        """Lists requests that are tried alone, or wait for it; none, once no request is open."""
        return [f"request {request_id} is tried alone, or waits for it" for request_id in sorted(self._open)]


class Quarantine:
    """Prompts over which workers were lost, by the key of their last block: each for `ttl_s`, the `max_prompts` latest.

    Pure: times are given.
    """

    def __init__(self, ttl_s: float = 60.0, max_prompts: int = 1024) -> None:
        self._ttl_s = ttl_s
        self._max_prompts = max_prompts
        self._ends: OrderedDict[BlockKey, float] = OrderedDict()

    def add(self, prompt: BlockKey, now_s: float) -> None:
        """Notes that a request with this prompt was given up."""
        self._ends[prompt] = now_s + self._ttl_s
        self._ends.move_to_end(prompt)
        while len(self._ends) > self._max_prompts:
            self._ends.popitem(last=False)

    def contains(self, prompt: BlockKey, now_s: float) -> bool:
        return now_s < self._ends.get(prompt, now_s)
