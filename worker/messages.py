"""Between a worker's own values and the messages of its service."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TypeVar

from engine.events import EngineStats, TierTokens
from engine.request import ChoiceSoFar, EngineRequest, HandOff
from kv_store.block_store import StoreStatus
from wire.block_counts import BlockCounts
from wire.convert import logprobs_to_pb, reason_to_pb, sampling_from_pb, tiers_to_pb
from wire.errors import InvalidRequest
from wire.ids import NamespaceRoot, RequestId
from wire.pb import inference_pb2, worker_pb2
from wire.sampling import MAX_CHOICES
from wire.tier import Tier
from worker.stopwatch import Span
from worker.update import ChoiceTokens, Update

ROOT_BYTES = 32
R = TypeVar("R", bound=EngineRequest)


def hand_off_from_pb(message: worker_pb2.PrefillRequest, vocab_size: int) -> HandOff:
    """Raises InvalidRequest for what would upset the engine: an empty prompt, tokens that the model does not have."""
    sampling = sampling_from_pb(message.sampling_params)
    if not 1 <= sampling.n <= MAX_CHOICES:
        raise InvalidRequest("n", f"must be from 1 to {MAX_CHOICES}")
    choices = tuple(ChoiceSoFar(index) for index in range(sampling.n))
    request = HandOff(_request_id(message), _root(message), tuple(message.prompt.ids), sampling, choices)
    return _checked(request, vocab_size)


def decode_request_from_pb(message: worker_pb2.DecodeRequest, vocab_size: int) -> EngineRequest:
    """Raises InvalidRequest as above, and if the choices are none, too many or the same."""
    sampling = sampling_from_pb(message.sampling_params)
    choices = tuple(ChoiceSoFar(choice.index, tuple(choice.output.ids)) for choice in message.choices)
    request = EngineRequest(_request_id(message), _root(message), tuple(message.prompt.ids), sampling, choices)
    return _checked(request, vocab_size)


def prefill_response_to_pb(attempt: int, update: Update, worker_id: str) -> worker_pb2.PrefillResponse:
    prompt = update.prompt or TierTokens()
    return worker_pb2.PrefillResponse(
        attempt=attempt,
        choices=[_choice_to_pb(choice) for choice in update.choices],
        cached_tokens=tiers_to_pb(prompt.found),
        computed_tokens=prompt.computed,
        num_held_blocks=update.num_held,
        spans=_spans_to_pb(update.spans, worker_id),
    )


def decode_update_to_pb(attempt: int, update: Update, worker_id: str) -> worker_pb2.DecodeUpdate:
    message = worker_pb2.DecodeUpdate(attempt=attempt, choices=[_choice_to_pb(choice) for choice in update.choices])
    if update.prompt is not None:
        message.fetched.fetched_tokens.extend(tiers_to_pb(update.prompt.found))
        message.fetched.computed_tokens = update.prompt.computed
    if update.spans:
        message.summary.spans.extend(_spans_to_pb(update.spans, worker_id))
    return message


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
        blocks=_counts_to_pb(stats.blocks),
        computed_prompt_tokens=stats.computed_prompt_tokens,
        cached_prompt_tokens=stats.cached_prompt_tokens,
        generated_tokens=stats.generated_tokens,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_preemptions=stats.num_preemptions,
        tiers=[_host_to_pb(store), _redis_to_pb(store)],
        problems=problems,
        engine_silent_s=engine_silent_s,
    )


def _request_id(message: worker_pb2.PrefillRequest | worker_pb2.DecodeRequest) -> RequestId:
    if not message.request_id:
        raise InvalidRequest("request_id", "missing")
    return RequestId(message.request_id)


def _root(message: worker_pb2.PrefillRequest | worker_pb2.DecodeRequest) -> NamespaceRoot:
    if len(message.namespace_root) != ROOT_BYTES:
        raise InvalidRequest("namespace_root", f"must be {ROOT_BYTES} bytes")
    return NamespaceRoot(message.namespace_root)


def _checked(request: R, vocab_size: int) -> R:
    indices = {choice.index for choice in request.choices}
    if not indices or len(indices) < len(request.choices) or len(indices) > MAX_CHOICES:
        raise InvalidRequest("choices", f"must be from 1 to {MAX_CHOICES}, each with an index of its own")
    if not request.prompt_ids:
        raise InvalidRequest("prompt", "has no tokens")
    tokens = [request.prompt_ids, *(choice.output_ids for choice in request.choices)]
    if max(max(ids, default=0) for ids in tokens) >= vocab_size:
        raise InvalidRequest("prompt", "has a token that is not in the model's vocabulary")
    return request


def _choice_to_pb(choice: ChoiceTokens) -> worker_pb2.ChoiceTokens:
    return worker_pb2.ChoiceTokens(
        index=choice.index,
        first_position=choice.first_position,
        token_ids=choice.token_ids,
        logprobs=logprobs_to_pb(choice.token_ids, choice.logprobs) if choice.logprobs else (),
        finish_reason=reason_to_pb(choice.reason),
        stop_token_id=choice.stop_token_id,
    )


def _spans_to_pb(spans: Iterable[Span], worker_id: str) -> list[inference_pb2.Span]:
    return [
        inference_pb2.Span(
            name=span.name,
            worker=worker_id,
            start_ms=span.start_ms,
            duration_ms=span.duration_ms,
            counts=dict(span.counts),
        )
        for span in spans
    ]


def _counts_to_pb(counts: BlockCounts) -> worker_pb2.BlockCounts:
    return worker_pb2.BlockCounts(**asdict(counts))


def _host_to_pb(store: StoreStatus) -> worker_pb2.TierStatus:
    message = worker_pb2.TierStatus(tier=Tier.HOST, block_bytes=store.block_bytes)
    directory = store.directory
    if directory is not None:
        message.epoch = directory.epoch
        message.blocks.CopyFrom(_counts_to_pb(directory.counts))
        message.counts.update(leases=directory.num_leases, holds=directory.num_holds)
    return message


def _redis_to_pb(store: StoreStatus) -> worker_pb2.TierStatus:
    """Blocks are read by the worker itself, and written by its node's service."""
    if store.cold is None:
        return worker_pb2.TierStatus(tier=Tier.REDIS, state="off")
    counts = asdict(store.cold)
    counts["written"] += 0 if store.directory is None else store.directory.copied
    return worker_pb2.TierStatus(tier=Tier.REDIS, state=counts.pop("state"), counts=counts)
