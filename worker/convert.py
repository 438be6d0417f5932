"""Messages of a line: from a Begin to the engine's request, an attempt's end, the worker's state."""

import math
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.events import EngineStats
from engine.request import BlocksAhead, ChoiceSoFar, EngineRequest
from kv_store.block_store import StoreStatus
from kv_store.node.event_log import EventCursor, EventPage
from kv_store.node.messages import KeepHint
from kv_store.tiers.contents import Selection
from wire.block_names import BlockName, NameChain, PublicPart, digest_of, session_of
from wire.convert import (
    error_to_pb,
    sampling_from_pb,
)
from wire.errors import BatonError, ConfigError, InvalidRequest, require
from wire.ids import MAX_SESSION_LEN, AttemptId, BlockKey, NamespaceRoot, is_attempt_id
from wire.kv_policy import Dropping, parse_dropping
from wire.load.fairness import MAX_PRIORITY, MAX_WEIGHT, Precedence, deferred_between
from wire.pb import worker_pb2
from wire.tier import FAR_TIERS, READ_COUNTS, WRITE_COUNTS, FarStatus, Tier

ROOT_BYTES = 32
MAX_BLOCK_ADDRESSES = 16
MAX_FIRST_BLOCK = 1 << 20
MAX_AHEAD = 256
"""Blocks of one order to read ahead."""


def request_from_pb(
    message: worker_pb2.Begin,
    cls: type[EngineRequest],
    vocab_size: int,
    clock: Callable[[], float] = time.monotonic,
) -> EngineRequest:
    """Makes the engine's request, named by the attempt; the engine checks its length.

    clock: reads the worker's seconds, by which it is deferred.

    Raises InvalidRequest for a field out of range, which no router sends.
    """
    require(is_attempt_id(message.id), "id", "not an id that a router gives")
    require(len(message.namespace_root) == ROOT_BYTES, "namespace_root", f"must be {ROOT_BYTES} bytes")
    addresses = message.block_addresses
    require(len(addresses) <= MAX_BLOCK_ADDRESSES, "block_addresses", f"must be at most {MAX_BLOCK_ADDRESSES}")
    require(0 < message.time_left_s < math.inf, "time_left_s", "must be above 0 and finite")
    choices = tuple(ChoiceSoFar(choice.index, tuple(choice.output.ids)) for choice in message.choices)
    request = cls(
        attempt_id=AttemptId(message.id),
        root=NamespaceRoot(message.namespace_root),
        prompt_ids=tuple(message.prompt.ids),
        sampling=sampling_from_pb(message.sampling_params),
        choices=choices,
        peers=tuple(addresses),
        computes_all=message.computes_all,
        num_scored=message.num_scored,
        public=_public_part(message, len(message.prompt.ids)),
        dropping=_dropping(message.kv_policy),
        hint=_hint(message),
        precedence=_precedence(message, clock),
    )
    _require_in_range(request, vocab_size)
    return request


def ahead_from_pb(message: worker_pb2.Prefetch, block_size: int) -> BlocksAhead:
    """Makes the order to read blocks ahead, and names them. Raises InvalidRequest for a field out of range."""
    tokens, first = message.tokens.ids, message.first_block
    require(is_attempt_id(message.id), "id", "not an id that a router gives")
    require(len(message.namespace_root) == ROOT_BYTES, "namespace_root", f"must be {ROOT_BYTES} bytes")
    require(len(message.block_addresses) <= MAX_BLOCK_ADDRESSES, "block_addresses", "too many")
    require(first <= MAX_FIRST_BLOCK, "first_block", f"must be at most {MAX_FIRST_BLOCK}")
    require(len(message.parent) == (ROOT_BYTES if first else 0), "parent", "not the key of the block before")
    is_whole = not len(tokens) % block_size and len(tokens) <= MAX_AHEAD * block_size
    require(is_whole, "tokens", f"must be of whole blocks, at most {MAX_AHEAD}")
    before = BlockName(BlockKey(message.parent), b"", b"", b"")
    public = _public_part(message, MAX_FIRST_BLOCK)
    chain = NameChain(NamespaceRoot(message.namespace_root), block_size, public, [before] * first)
    chain.extend(tokens)
    names = chain.full(chain.num_tokens, first * block_size)
    return BlocksAhead(attempt_id=AttemptId(message.id), names=names, peers=tuple(message.block_addresses))


def _public_part(message: worker_pb2.Begin | worker_pb2.Prefetch, most: int) -> PublicPart | None:
    root, num_blocks = message.public_root, message.num_public_blocks
    require(num_blocks <= most, "num_public_blocks", "must be no more than the prompt has")
    require(len(root) == (ROOT_BYTES if num_blocks else 0), "public_root", f"must be {ROOT_BYTES} bytes, if any")
    return PublicPart(NamespaceRoot(root), num_blocks) if num_blocks else None


def _hint(message: worker_pb2.Begin) -> KeepHint | None:
    session, keep_s = message.session, message.keep_s if message.HasField("keep_s") else None
    require(len(session) <= MAX_SESSION_LEN, "session", f"must be at most {MAX_SESSION_LEN} characters")
    require(0 <= (keep_s or 0) < math.inf, "keep_s", "must be 0 or more, and finite")
    if not session and keep_s is None:
        return None
    root = NamespaceRoot(message.namespace_root)
    return KeepHint(digest_of(root), session_of(root, session) if session else b"", keep_s)


def _precedence(message: worker_pb2.Begin, clock: Callable[[], float]) -> Precedence:
    weight, output_cost = message.weight or 1.0, message.output_cost
    require(0 < weight <= MAX_WEIGHT, "weight", f"must be above 0 and at most {MAX_WEIGHT:g}")
    require(abs(message.priority) <= MAX_PRIORITY, "priority", f"must be at most {MAX_PRIORITY} from 0")
    require(0 <= output_cost < math.inf, "output_cost", "must be 0 or more, and finite")
    after_s, until_s = message.deferred_after_s, message.deferred_until_s
    require(0 <= after_s < math.inf, "deferred_after_s", "must be 0 or more, and finite")
    require(0 <= until_s < math.inf, "deferred_until_s", "must be 0 or more, and finite")
    return Precedence(weight, message.priority, output_cost, deferred_between(after_s, until_s, clock))


def ended_with(attempt: AttemptId, error: BatonError) -> worker_pb2.Update:
    """Makes the last update of an attempt that ends with an error."""
    return worker_pb2.Update(id=attempt, end=worker_pb2.End(error=error_to_pb(error)))


def cursor_from_pb(message: worker_pb2.EventCursor) -> EventCursor:
    return EventCursor(message.epoch, message.number, message.slot)


def selection_from_pb(message: worker_pb2.BlockSelection) -> Selection:
    return Selection(tuple(map(BlockKey, message.keys)), frozenset(message.namespaces))


def events_to_pb(page: EventPage) -> worker_pb2.EventPage:
    after, cursor = (worker_pb2.EventCursor(**vars(place)) for place in (page.after, page.cursor))
    events = [worker_pb2.BlockEvents(**vars(one)) for one in page.events]
    return worker_pb2.EventPage(after=after, cursor=cursor, events=events)


def status_to_pb(
    info: worker_pb2.WorkerInfo,
    state: str,
    engine_silent_s: float,
    stats: EngineStats,
    store: StoreStatus,
    problems: Sequence[str],
) -> worker_pb2.WorkerStatus:
    return worker_pb2.WorkerStatus(
        worker_id=info.worker_id,
        role=info.role,
        pid=info.pid,
        state=state,
        blocks=worker_pb2.BlockCounts(**vars(stats.blocks)),
        computed_prompt_tokens=stats.computed_prompt_tokens,
        cached_prompt_tokens=stats.cached_prompt_tokens,
        generated_tokens=stats.generated_tokens,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_preemptions=stats.num_preemptions,
        num_drafts=stats.num_drafts,
        num_guessed_tokens=stats.num_guessed_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        tiers=[_host_to_pb(store), *(_cold_to_pb(tier, store) for tier in FAR_TIERS)],
        problems=problems,
        engine_silent_s=engine_silent_s,
        prefill_token_s=store.prefill_token_s,
        node_id=info.node_id,
        load_s=info.load_s,
        mapped_bytes=info.mapped_bytes,
        release=info.release,
        protocol_version=info.protocol_version,
        memory_bytes=_own_memory_bytes(),
    )


def _own_memory_bytes() -> int:
    """Returns this process's private memory in bytes: no file's, and not shared."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * resource.getpagesize()


def _dropping(text: str) -> Dropping | None:
    try:
        policy = parse_dropping(text) if text else None
    except ConfigError as error:
        raise InvalidRequest("kv_policy", error.message) from error
    require(not text or policy, "kv_policy", "not one that drops KV by worth")
    return policy


def _require_in_range(request: EngineRequest, vocab_size: int) -> None:
    sampling, num_choices = request.sampling, len(request.choices)
    sampling.require_in_range(vocab_size)
    require(sampling.min_tokens <= sampling.max_tokens, "min_tokens", "must not be more than max_tokens")
    is_wanted = sampling.prompt_logprobs is not None or not request.num_scored
    require(is_wanted, "num_scored", "must be 0 without prompt_logprobs")
    indices = {choice.index for choice in request.choices}
    differ = 0 < len(indices) == num_choices and max(indices) < sampling.n
    require(differ, "choices", f"must be from 1 to n, each with an index of its own below n, which is {sampling.n}")
    outputs = [choice.output_ids for choice in request.choices]
    require(max(map(len, outputs)) < sampling.max_tokens, "choices", "must have fewer tokens than max_tokens")
    require(request.prompt_ids, "prompt", "has no tokens")
    highest = max(max(ids, default=0) for ids in (request.prompt_ids, *outputs))
    require(highest < vocab_size, "prompt", "has a token that is not in the model's vocabulary")


def _host_to_pb(store: StoreStatus) -> worker_pb2.TierStatus:
    message = worker_pb2.TierStatus(tier=Tier.HOST, block_bytes=store.block_bytes)
    directory = store.directory
    if directory is not None:
        message.epoch = directory.epoch
        message.blocks.MergeFrom(worker_pb2.BlockCounts(**vars(directory.counts)))
        counts = {"leases": directory.num_leases, "holds": directory.num_holds, "kept": directory.num_kept}
        message.counts.update(counts)
    return message


def _cold_to_pb(tier: Tier, store: StoreStatus) -> worker_pb2.TierStatus:
    """Joins the tier's states for the worker, which reads, and for the node's service, which writes."""
    found = next((status for status in store.cold if status.tier is tier), None)
    if found is None:
        return worker_pb2.TierStatus(tier=tier, state="off")
    told = store.directory.cold if store.directory is not None else []
    writer = next((status for status in told if status.tier is tier), FarStatus(tier=tier, state=found.state))
    message = worker_pb2.TierStatus(tier=tier, state=writer.state if found.state == "up" else found.state)
    message.counts.update({name: getattr(found, name) for name in READ_COUNTS})
    message.counts.update({name: getattr(writer, name) for name in WRITE_COUNTS})
    return message
