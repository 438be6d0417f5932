"""The state of the cluster for the page: read from the operator's service once for all readers."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import Any
from urllib.parse import unquote

from google.protobuf.message import Message

from baton import AsyncClient
from gateway.exchange import Events, Request, Streamed
from wire.convert import arenas_of, misses_from_pb, tiers_from_pb
from wire.errors import Unavailable
from wire.journal import comparisons_of, row_of
from wire.load.limit import Limit
from wire.pb import cluster_pb2
from wire.pb.cluster_pb2_grpc import ClusterStub
from wire.tier import BLOCK_STATES, words_of

PAGE, STATUS, REQUESTS, EVENTS = "/ui", "/ui/status", "/ui/requests", "/ui/events"
FILES = {PAGE: "index.html", f"{PAGE}/": "index.html", f"{PAGE}/page.css": "page.css", f"{PAGE}/page.js": "page.js"}
"""Files of gateway/ui by path; they have nothing of a cluster."""
MIN_AGE_S = 1.0
"""Age at which a snapshot is read anew."""
MAX_READERS = 64
MAX_STREAM_S = 60.0
"""Length of a stream of changes; a reader then opens a new stream and shows its key again."""
TIMEOUT_S = 6.0
NUM_REQUESTS = 100
WORKER = ("role", "node_id", "state", "num_running", "num_waiting", "num_preemptions", "memory_bytes")
COUNTS = ("computed_prompt_tokens", "cached_prompt_tokens", "generated_tokens")
REQUEST = ("number", "request_id", "tenant", "outcome", "reason", "message")
TOKENS = ("prompt_tokens", "output_tokens", "attempts")

State = Mapping[str, Any]


class OperatorClient(AsyncClient):
    """A connection to the operator's service; `with_key` gives it the key of a caller."""

    _service = ClusterStub

    def __init__(self, address: str) -> None:
        super().__init__(address, timeout_s=TIMEOUT_S, api_key="")

    async def status(self) -> cluster_pb2.ClusterStatus:
        status: cluster_pb2.ClusterStatus = await self._call("GetStatus", cluster_pb2.GetStatusRequest(recent=True))
        return status

    async def requests(self, **asked: Any) -> list[dict[str, Any]]:
        """Lists requests that have ended. Raises BatonError."""
        listed = await self._call("ListRequests", cluster_pb2.ListRequestsRequest(**asked))
        return [describe_request(one) for one in listed.requests]


@dataclass(frozen=True)
class Snapshot:
    """The state at one time, in parts; the event with the changes since the last snapshot; and recent requests."""

    number: int
    read_s: float
    state: State
    changes: bytes
    requests: tuple[Mapping[str, Any], ...]

    @cached_property
    def whole(self) -> bytes:
        return event({"parts": self.state, "requests": self.requests, "is_whole": True})


class ClusterWatch:
    """The newest snapshot; the first reader that wants a newer snapshot reads it, with its own key.

    `routes`: the page's reads, by path. The operator's service checks each caller's key; files need no key.
    """

    def __init__(self, client: OperatorClient) -> None:
        folder = files("gateway").joinpath("ui")
        self._files = {path: folder.joinpath(name).read_bytes() for path, name in FILES.items()}
        self.routes: dict[str, Callable[[Request], Awaitable[bytes | Streamed]]] = {
            STATUS: self._status,
            REQUESTS: self._requests,
            EVENTS: self._events,
            **dict.fromkeys(FILES, self._file),
        }
        self._client = client
        self.readers = Limit(MAX_READERS, "pages read the state of the cluster from this gateway")
        self._last = Snapshot(0, -MIN_AGE_S, {}, b"", ())
        self._lock = asyncio.Lock()

    async def _file(self, request: Request) -> bytes:
        return self._files[request.path]

    async def _status(self, request: Request) -> bytes:
        client = self._client.with_key(request.key)
        return json.dumps({"parts": describe(await client.status())}).encode()

    async def _requests(self, request: Request) -> bytes:
        """Returns the last requests, or the requests of the id that the path ends in. Raises RequestNotFound."""
        request_id = unquote(request.path.removeprefix(REQUESTS)[1:])
        return json.dumps(
            {"requests": await self._client.with_key(request.key).requests(request_id=request_id)}
        ).encode()

    async def _events(self, request: Request) -> Streamed:
        return Streamed(self.events(self._client.with_key(request.key)))

    async def snapshot(self, client: OperatorClient) -> Snapshot:
        """Returns a snapshot that is at most MIN_AGE_S old. Raises BatonError if the key is refused."""
        async with self._lock:  # TIMEOUT_S bounds each holder
            if time.monotonic() - self._last.read_s >= MIN_AGE_S:
                self._last = await self._read(client)
            return self._last

    async def events(self, client: OperatorClient) -> Events:
        """Yields the whole state, then changes as they come, for MAX_STREAM_S. Raises BatonError."""
        with self.readers.taken():
            await client.requests(limit=1)  # the key of this reader opens it
            number, ends_s = -1, time.monotonic() + MAX_STREAM_S
            while time.monotonic() < ends_s:
                snapshot = await self.snapshot(client)
                if snapshot.number != number:
                    yield snapshot.changes if snapshot.number == number + 1 else snapshot.whole
                number = snapshot.number
                await asyncio.sleep(max(0.0, snapshot.read_s + MIN_AGE_S - time.monotonic()))

    async def _read(self, client: OperatorClient) -> Snapshot:
        """Reads the next snapshot. If the router does not answer, only the part `link` changes."""
        last, began_s = self._last, time.monotonic()
        after = last.requests[-1]["number"] if last.requests else 0
        new, link = list[Mapping[str, Any]](), ""
        try:
            status, new = await asyncio.gather(client.status(), client.requests(after=after, limit=NUM_REQUESTS))
            parts = describe(status)
        except Unavailable as error:
            parts, link = dict(last.state), error.message
        state = {**parts, "link": {"error": link}}
        changed = {name: part for name, part in state.items() if last.state.get(name) != part}
        changed |= dict.fromkeys(last.state.keys() - state.keys())
        requests = deque([*last.requests, *new], NUM_REQUESTS)
        return Snapshot(last.number + 1, began_s, state, event({"parts": changed, "requests": new}), tuple(requests))


def event(values: Mapping[str, Any]) -> bytes:
    """Writes an event of a stream, with the time, so that a reader can tell an unchanged state from a dead stream."""
    return b"data: %b\n\n" % json.dumps({"at_s": round(time.time(), 3), **values}, separators=(",", ":")).encode()


def describe(status: cluster_pb2.ClusterStatus) -> dict[str, Any]:
    """Returns the parts of a state by their names. A kind of parts has names of the form KIND/NAME."""
    now_s = time.time()
    return {
        "cluster": pick(status, "model", "num_running", "num_queued"),
        "problems": list(status.problems),
        "events": [{"at_s": round(now_s - one.age_s), "text": one.text} for one in status.events],
        "cache": {"queries": status.prefix_cache.queries, "hits": tiers_from_pb(status.prefix_cache.hits)},
        **{f"pool/{pool.role}": pick(pool, "size", "num_ready", "limit", "last_order") for pool in status.pools},
        **{f"worker/{name}": worker for name, worker in _workers(status)},
        **{f"node/{name}": _tier(arena) for name, arena in arenas_of(status.workers).items()},
        **{f"tier/{tier.tier}": _tier(tier) for tier in status.tiers},
    }


def describe_request(ended: cluster_pb2.EndedRequest) -> dict[str, Any]:
    """Describes an ended request; a span is name, worker, start, duration, counts, error and phase."""
    timeline = ended.timeline
    spans = [
        (
            one.name,
            one.worker,
            round(one.start_ms, 2),
            round(one.duration_ms, 2),
            dict(one.counts),
            one.error,
            row_of(one.name).phase,
        )
        for one in timeline.spans
    ]
    return pick(ended, *REQUEST, *TOKENS) | {
        "ended_s": round(ended.ended_s, 3),
        "total_ms": round(timeline.total_ms, 2),
        "ttft_ms": round(ended.ttft_ms, 2) if ended.HasField("ttft_ms") else None,
        "cached": tiers_from_pb(ended.cached_tokens),
        "prefill": timeline.prefill_worker,
        "decode": timeline.decode_worker,
        "causes": [*ended.causes, *(f"not cached: {words_of(run)}" for run in misses_from_pb(ended.misses))],
        "otherwise": [*comparisons_of(timeline)],
        "spans": spans,
    }


def _workers(status: cluster_pb2.ClusterStatus) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the workers; workers that did not answer lack counts and pages."""
    for worker in status.workers:
        known = pick(worker, *WORKER) | {"silent_s": int(worker.engine_silent_s), "problems": list(worker.problems)}
        answered = pick(worker, *COUNTS) | {"pages": _pages(worker.blocks)} if worker.HasField("blocks") else {}
        yield worker.worker_id, known | answered


def _tier(tier: Any) -> dict[str, Any]:
    return pick(tier, "state", "block_bytes") | {"counts": dict(tier.counts), "pages": _pages(tier.blocks)}


def _pages(blocks: Any) -> dict[str, Any]:
    return pick(blocks, *BLOCK_STATES, "total")


def pick(message: Message, *names: str) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names}
