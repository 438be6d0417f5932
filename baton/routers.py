"""The routers of a cluster as a client sees them: which one it asks, and how a stream outlives one.

order ─▶ a call ─┬─▶ its answer
                 └─▶ Unreachable: the router is left out for a while ─▶ the next router, with the tokens so far
"""

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType

from wire.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RequestExists,
    RequestNotFound,
    RouterLeaving,
    Unavailable,
    Unreachable,
)
from wire.ids import SEED_BITS
from wire.pb import inference_pb2 as pb
from wire.rpc import MAX_MESSAGE_BYTES
from wire.sampling import MAX_CHOICES

OUT_S = 1.0
"""Time for which a router is left out after it has not answered; doubled for each time in a row, up to MAX_OUT_S."""
MAX_OUT_S = 16.0
LOSSES = (Unreachable, RouterLeaving)
PAUSE_S = 0.1
"""Time until a resumption that was refused is tried again; doubled for each time in a row, up to MAX_PAUSE_S."""
MAX_PAUSE_S = 1.6
MAX_DARK_S = 15.0
"""Bound on the time without an answer of any router after which a stream ends."""
RECONNECT_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 2000),
)
"""Channel options for one of several routers: a router that came back is reached soon. The last bounds a connection's
beginning, TLS included: that of a far router takes some of its round trips, that of a hung one for ever.
"""


class Routers:
    """The routers of a cluster, as HOST:PORT, in the order in which a caller asks them. `clock` is monotonic.

    Rendezvous hashing: each caller's place gives each router a weight, and its requests go to the heaviest one that
    answers. A router that does not is left out for a while. A weight is of a router's number, not of its address: with
    TLS a gateway has other addresses than a client.
    """

    def __init__(self, addresses: str, clock: Callable[[], float] = time.monotonic) -> None:
        """addresses: with commas between, in the cluster's own order. Raises InvalidRequest for equal or empty ones."""
        self.addresses = [one.strip() for one in addresses.split(",")]
        are_apart = all(self.addresses) and len(set(self.addresses)) == len(self.addresses)
        if len(self.addresses) > 1 and not are_apart:
            raise InvalidRequest("address", "must be HOST:PORT, or several different ones with commas between")
        self.clock = clock
        self._num_failures: dict[str, int] = {}
        self._back_s: dict[str, float] = {}

    def order(self, place: str) -> list[str]:
        """Lists the routers that answer, by weight, then the left out ones, by the time at which they are back."""
        now_s = self.clock()
        rank = [
            (max(0.0, self._back_s.get(one, 0.0) - now_s), hashlib.sha256(f"{place} {number}".encode()).digest(), one)
            for number, one in enumerate(self.addresses)
        ]
        return [address for _, _, address in sorted(rank)]

    def is_out(self, address: str) -> bool:
        """Whether a router is left out now."""
        return self.clock() < self._back_s.get(address, 0.0)

    def note(self, address: str, answers: bool) -> None:
        """Takes a router back, or leaves it out."""
        if answers:
            self._num_failures.pop(address, None)
            self._back_s.pop(address, None)
        elif not self.is_out(address):
            number = self._num_failures[address] = self._num_failures.get(address, 0) + 1
            self._back_s[address] = self.clock() + min(OUT_S * 2 ** (number - 1), MAX_OUT_S)

    def tries(self, place: str, timeout_s: float) -> Iterator["Try"]:
        """Yields the context of a call to each router in turn, with an equal part of the time that is left.

        The caller returns from within it.
        """
        order, ends_s = self.order(place), self.clock() + timeout_s
        for num_left, address in zip(range(len(order), 0, -1), order, strict=True):
            yield Try(self, address, max(0.001, ends_s - self.clock()) / num_left, is_last=num_left == 1)


class Try(AbstractContextManager["Try"]):
    """A call to one router. Suppresses the error of a router that is gone, leaves, is late, or has no such request.

    The last router's error is raised.
    """

    def __init__(self, routers: Routers, address: str, timeout_s: float, is_last: bool) -> None:
        self.address, self.timeout_s = address, timeout_s
        self._routers = routers
        self._is_last = is_last

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        is_gone = isinstance(error, LOSSES)
        if error is None or is_gone:
            self._routers.note(self.address, not is_gone)
        return (is_gone or isinstance(error, RequestNotFound | DeadlineExceeded)) and not self._is_last


class Resumption:
    """A request that another router goes on with: its id, its seed, and what has come of its answer."""

    def __init__(self, request: pb.GenerateRequest, routers: Routers, place: str, timeout_s: float) -> None:
        """Draws id and seed where the request has none."""
        self._routers = routers
        self._place = place
        self._clock = routers.clock
        self._ends_s = self._clock() + timeout_s
        self.address = routers.order(place)[0]
        self.request = request
        if not request.HasField("request_id"):
            request.request_id = secrets.token_hex(12)
        if not request.sampling_params.HasField("seed"):
            request.sampling_params.seed = secrets.randbits(SEED_BITS)
        num_choices = request.sampling_params.n if request.sampling_params.HasField("n") else 1
        self._known = pb.Resume(choices=[pb.ResumedChoice() for _ in range(min(num_choices, MAX_CHOICES))])
        self._lost_s: float | None = None
        self._is_silent = True
        self._pause_s = PAUSE_S

    @property
    def left_s(self) -> float:
        """The time until the caller's deadline."""
        return max(0.001, self._ends_s - self._clock())

    def accept(self, response: pb.GenerateResponse) -> None:
        """Notes what a message brings."""
        if self._is_silent:
            self._lost_s, self._is_silent, self._pause_s = None, False, PAUSE_S
            self._routers.note(self.address, answers=True)
        self._known.fingerprint = response.fingerprint or self._known.fingerprint
        event, chunk = response.WhichOneof("event"), response.chunk
        if event == "prompt":
            self._known.prompt_tokens += len(response.prompt.tokens)
        elif event == "chunk" and chunk.index < len(self._known.choices):
            choice = self._known.choices[chunk.index]
            choice.token_ids.extend(chunk.token_ids)
            if chunk.HasField("ended"):
                choice.ended.CopyFrom(chunk.ended)

    def lost(self, error: BatonError) -> float | None:
        """Turns to the next router; returns the seconds to wait before, None if the answer ends with this error.

        Raises Unavailable if the answer so far is too long for a message to that router.
        """
        now_s, self._is_silent = self._clock(), True
        self._lost_s = now_s if self._lost_s is None else self._lost_s
        left_s = min(self._lost_s + MAX_DARK_S, self._ends_s) - now_s
        is_again = self.request.HasField("resume")
        retry_after_s = (isinstance(error, Overloaded) and error.retry_after_s) or 0.0
        is_refused = retry_after_s or isinstance(error, RequestExists)
        is_lost = isinstance(error, LOSSES)
        if not (is_lost or (is_again and is_refused)) or left_s <= 0:
            return None
        if is_lost:
            self._routers.note(self.address, answers=False)
        self.address = self._routers.order(self._place)[0]
        self.request.resume.CopyFrom(self._known)
        if (num_bytes := self.request.ByteSize()) > MAX_MESSAGE_BYTES:
            needed = f"the request and its answer so far have {num_bytes} bytes, at most {MAX_MESSAGE_BYTES}"
            raise Unavailable(f"resume: {needed} can go on at another router") from error
        if not is_refused:
            return PAUSE_S if self._routers.is_out(self.address) else 0.0
        pause_s, self._pause_s = max(retry_after_s, self._pause_s), min(2 * self._pause_s, MAX_PAUSE_S)
        return min(pause_s, left_s)
