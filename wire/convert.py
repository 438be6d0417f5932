"""Conversion between our dataclasses and protobuf messages."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from google.protobuf.message import Message

from wire.errors import BatonError, rebuild
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.sampling import DEFAULTS, FinishReason, FormatKind, Logprobs, ResponseFormat, SamplingParams
from wire.tier import WRITE_COUNTS, Cause, Miss, MissRun, Tier

_COMPOSED = ("stop", "stop_token_ids", "logit_bias", "response_format")
_SCALARS = tuple(field.name for field in fields(SamplingParams) if field.name not in _COMPOSED)
_REASON_TO_PB = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_REASON_FROM_PB = {value: reason for reason, value in _REASON_TO_PB.items()}


def given(message: Message, name: str) -> Any:
    """Returns a field of a message; None if it is not set."""
    return getattr(message, name) if message.HasField(name) else None


def sampling_from_pb(message: pb.SamplingParams, defaults: SamplingParams = DEFAULTS) -> SamplingParams:
    """Reads settings; unset fields take their defaults. Checks no range."""
    scalars = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    biases = tuple(sorted(message.logit_bias.items()))
    return replace(
        defaults,
        **scalars,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=biases,
        response_format=_format_from_pb(message.response_format) if message.HasField("response_format") else None,
    )


def sampling_to_pb(params: SamplingParams) -> pb.SamplingParams:
    """Writes settings with every scalar set, except `logprobs` if they are off."""
    scalars = {name: getattr(params, name) for name in _SCALARS}
    biases, answer = dict(params.logit_bias), params.response_format
    return pb.SamplingParams(
        **scalars,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        logit_bias=biases,
        response_format=None if answer is None else pb.ResponseFormat(**{answer.kind.value: answer.source}),
    )


def _format_from_pb(message: pb.ResponseFormat) -> ResponseFormat:
    """Reads a response format. A format without a kind becomes an empty one, which is out of range."""
    kind = message.WhichOneof("format") or "json_schema"
    return ResponseFormat(FormatKind(kind), getattr(message, kind))


def reason_to_pb(reason: FinishReason | None) -> pb.FinishReason:
    """Converts a finish reason; None, for an unfinished choice, to UNSPECIFIED."""
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _REASON_TO_PB[reason]


def reason_from_pb(value: pb.FinishReason) -> FinishReason | None:
    return _REASON_FROM_PB.get(value)


def tiers_to_pb(tokens: Mapping[str, int]) -> list[pb.TierTokens]:
    return [pb.TierTokens(tier=tier, tokens=number) for tier, number in tokens.items()]


def tiers_from_pb(tokens: Iterable[pb.TierTokens]) -> dict[str, int]:
    return {one.tier: one.tokens for one in tokens}


def misses_to_pb(runs: Iterable[MissRun]) -> list[worker_pb2.MissRun]:
    return [
        worker_pb2.MissRun(
            cause=run.miss.cause,
            how=run.miss.how,
            age_s=run.miss.age_s,
            first_token=run.first_token,
            blocks=run.num_blocks,
        )
        for run in runs
    ]


def misses_from_pb(runs: Iterable[worker_pb2.MissRun]) -> list[MissRun]:
    return [MissRun(Miss(Cause(run.cause), run.how, run.age_s), run.first_token, run.blocks) for run in runs]


def error_to_pb(error: BatonError) -> worker_pb2.Error:
    return worker_pb2.Error(reason=error.reason, message=error.message, ids=error.ids)


def error_from_pb(message: worker_pb2.Error) -> BatonError:
    return rebuild(message.reason, message.message, dict(message.ids))


def status_of(tier: str, statuses: Iterable[worker_pb2.TierStatus]) -> worker_pb2.TierStatus:
    """Finds the status of a tier; empty if there is none."""
    return next((status for status in statuses if status.tier == tier), worker_pb2.TierStatus(tier=tier))


def arenas_of(workers: Iterable[worker_pb2.WorkerStatus]) -> dict[str, worker_pb2.TierStatus]:
    """Returns each arena's status, by the arena's id."""
    return accounts_of(Tier.HOST, workers)


def accounts_of(tier: str, workers: Iterable[worker_pb2.WorkerStatus]) -> dict[str, worker_pb2.TierStatus]:
    """Returns the newest counts of a tier at each arena's service, by the arena's id: these counts only grow."""
    accounts: dict[str, worker_pb2.TierStatus] = {}
    for worker in workers:
        for status in worker.tiers:
            if status.tier == tier:
                known = accounts.setdefault(worker.node_id, status)
                accounts[worker.node_id] = max(known, status, key=_newness)
    return accounts


def _newness(status: worker_pb2.TierStatus) -> tuple[bool, bool, int]:
    written = sum(status.counts[name] for name in WRITE_COUNTS if name in status.counts)
    return bool(status.epoch), bool(status.counts), written


def logprobs_to_pb(tokens: Iterable[int], logprobs: Iterable[Logprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            token_id=token,
            logprob=one.chosen,
            top=[pb.TopLogprob(token_id=other, logprob=value) for other, value in one.top],
        )
        for token, one in zip(tokens, logprobs, strict=True)
    ]
