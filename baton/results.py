"""Results of calls, as frozen values without protobuf."""

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import StringIO
from typing import Any, Protocol, Self, TypeVar

from wire.convert import reason_from_pb, tiers_from_pb
from wire.errors import InvalidRequest, WireError
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.sampling import FinishReason, Logprobs


class Typed(Protocol):
    """A class with a JSON schema of its objects, such as a pydantic model."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]: ...

    @classmethod
    def model_validate_json(cls, json_data: str) -> Self: ...


T = TypeVar("T", bound=Typed)


@dataclass(frozen=True)
class TokenLogprobs(Logprobs):
    """Log-probabilities of the chosen token and of the likeliest tokens, with their bytes of text.

    chosen: NaN where there is none, as for the first token of a prompt.
    """

    token: bytes = b""
    top_tokens: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """A choice's gain since its last chunk. `logprobs` has an entry for each token id, or none."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


class PromptPart(Chunk):
    """A part of the prompt, for all choices, if its echo or log-probabilities were asked for."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An answer of a request's n. `matched_stop` is the stop string or the stop token's id that ended it."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    matched_stop: str | int | None


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of a request. `cached_tokens` counts prompt tokens by the tier that had their KV; no tier has 0.

    guessed_tokens: the answer's tokens guessed by speculation; accepted_tokens: guesses that came true.
    reasoning_tokens: the answer's tokens in its reasoning channel.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: Mapping[str, int]
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Span:
    """A step of a request, in milliseconds since its arrival at the router. docs/timeline.md lists the names.

    error: the reason of the error that an attempt ended with here, "" for none.
    """

    name: str
    worker: str
    start_ms: float
    duration_ms: float
    counts: Mapping[str, int]
    error: str = ""


@dataclass(frozen=True)
class Counterfactual:
    """The times that a request would have taken otherwise, in milliseconds. docs/timeline.md lists the changes."""

    change: str
    ttft_ms: float
    total_ms: float


@dataclass(frozen=True)
class ExpectedTtft:
    """The time to the first token of recent requests with about as many uncached tokens: median and 90th percentile."""

    p50_ms: float
    p90_ms: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Spans in order of their start. A role that had no part in the request has no worker.

    prefill_reason: why the prompt went to a prefill worker, or to decode at once; a word of docs/timeline.md.
    counterfactuals: estimated by learned costs. expected_ttft: None until like requests have ended.
    """

    prefill_worker: str | None
    decode_worker: str | None
    spans: tuple[Span, ...]
    total_ms: float
    prefill_reason: str = ""
    counterfactuals: tuple[Counterfactual, ...] = ()
    expected_ttft: ExpectedTtft | None = None


@dataclass(frozen=True)
class Completion:
    """A whole answer. `choices` has one entry for each of the n, in order; `seed` repeats the answer."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    seed: int
    timeline: Timeline
    prompt: tuple[Chunk, ...] = ()
    """The prompt in parts, if its echo or its log-probabilities were asked for."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    def read(self, schema: type[T]) -> T:
        """Reads the answer as an object of a class. Raises InvalidRequest if max_tokens cut it."""
        if self.choices[0].finish_reason is not FinishReason.STOP:
            raise InvalidRequest("max_tokens", "the answer ended before its object was whole")
        return schema.model_validate_json(self.text)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that the cluster serves. `max_context_len` counts prompt and output tokens."""

    name: str
    max_context_len: int
    dtype: str
    fingerprint: str
    tool_format: str = ""
    """Format of tool calls in answers; "" if the model's template knows no tools."""
    reasoning_format: str = ""
    """Format of the channel of reasoning before answers; "" if the model's template has none."""


@dataclass(frozen=True)
class Tokens:
    """Token ids of a text, and the bytes that each stands for."""

    ids: tuple[int, ...]
    texts: tuple[bytes, ...]


class Draft:
    """A completion in the making; grows with each response, by little more than the bytes of its tokens."""

    def __init__(self) -> None:
        self.prompt: list[PromptPart] = []
        self._choices: defaultdict[int, _ChoiceDraft] = defaultdict(_ChoiceDraft)
        self._completion: Completion | None = None

    def require_completion(self) -> Completion:
        """Raises WireError before the last response has come."""
        if self._completion is None:
            raise WireError("the stream ended, or was left, before the answer was complete")
        return self._completion

    def forget(self) -> None:
        """Drops the chunks so far, and the prompt: the completion is without them."""
        self.prompt.clear()
        self._choices.clear()

    def accept(self, response: pb.GenerateResponse) -> Chunk | None:
        """Adds a response; returns its chunk or part of the prompt, None for the last response."""
        event = response.WhichOneof("event")
        if event == "complete":
            self._completion = self._complete(response.request_id, response.complete)
            return None
        if event == "prompt":
            self.prompt.append(_read_part(response.request_id, response.prompt))
            return self.prompt[-1]
        chunk = _read_chunk(response.request_id, response.chunk)
        self._choices[chunk.index].add(chunk)
        return chunk

    def _complete(self, request_id: str, complete: pb.Complete) -> Completion:
        choices = tuple(self._choice(choice) for choice in complete.choices)
        usage, timeline = _read_usage(complete.usage), read_timeline(complete.timeline)
        return Completion(request_id, choices, usage, complete.seed, timeline, tuple(self.prompt))

    def _choice(self, choice: pb.Choice) -> Choice:
        drafted = self._choices[choice.index]
        stop = choice.WhichOneof("matched_stop")
        return Choice(
            index=choice.index,
            text=drafted.text.getvalue(),
            token_ids=tuple(drafted.token_ids),
            logprobs=tuple(drafted.logprobs),
            finish_reason=reason_from_pb(choice.finish_reason),
            matched_stop=None if stop is None else getattr(choice, stop),
        )


class _ChoiceDraft:
    """The gain of one choice so far. It keeps no object per token, which each full garbage collection would visit."""

    def __init__(self) -> None:
        self.text = StringIO()
        self.token_ids = array("I")
        self.logprobs: list[TokenLogprobs] = []

    def add(self, chunk: Chunk) -> None:
        self.text.write(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        self.logprobs += chunk.logprobs


def read_models(response: pb.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(
        Model(
            name=one.name,
            max_context_len=one.max_context_len,
            dtype=one.dtype,
            fingerprint=one.fingerprint,
            tool_format=one.tool_format,
            reasoning_format=one.reasoning_format,
        )
        for one in response.models
    )


def read_tokens(response: pb.TokenizeResponse) -> Tokens:
    return Tokens(tuple(response.token_ids), tuple(response.tokens))


def _read_chunk(request_id: str, chunk: pb.Chunk) -> Chunk:
    return Chunk(request_id, chunk.index, chunk.text, tuple(chunk.token_ids), _read_logprobs(chunk.logprobs))


def _read_part(request_id: str, part: pb.PromptPart) -> PromptPart:
    ids = tuple(one.token_id for one in part.tokens)
    return PromptPart(request_id, 0, part.text, ids, _read_logprobs(part.tokens))


def _read_logprobs(logprobs: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    if not logprobs:
        return ()
    return tuple(
        TokenLogprobs(
            token.logprob if token.HasField("logprob") else math.nan,
            tuple((other.token_id, other.logprob) for other in token.top),
            token.token,
            tuple(other.token for other in token.top),
        )
        for token in logprobs
    )


def _read_usage(usage: pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=tiers_from_pb(usage.cached_tokens),
        guessed_tokens=usage.guessed_tokens,
        accepted_tokens=usage.accepted_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


def read_timeline(timeline: pb.Timeline) -> Timeline:
    spans = tuple(
        Span(
            name=one.name,
            worker=one.worker,
            start_ms=one.start_ms,
            duration_ms=one.duration_ms,
            counts=dict(one.counts),
            error=one.error,
        )
        for one in timeline.spans
    )
    otherwise = tuple(Counterfactual(one.change, one.ttft_ms, one.total_ms) for one in timeline.counterfactuals)
    has_like, like = timeline.HasField("expected_ttft"), timeline.expected_ttft
    expected = ExpectedTtft(like.p50_ms, like.p90_ms) if has_like else None
    return Timeline(
        prefill_worker=timeline.prefill_worker or None,
        decode_worker=timeline.decode_worker or None,
        spans=spans,
        total_ms=timeline.total_ms,
        prefill_reason=timeline.prefill_reason,
        counterfactuals=otherwise,
        expected_ttft=expected,
    )


@dataclass(frozen=True)
class BlockCursor:
    """A place in a node's events: after event `number` of an epoch. slot: progress of a snapshot under way, or 0.

    epoch: empty once the node is gone.
    """

    epoch: str
    number: int
    slot: int


@dataclass(frozen=True)
class BlockEvent:
    """Blocks "stored" in a node's tier, or "removed" from it, by their keys of 32 bytes; "cleared": all are gone."""

    kind: str
    tier: str
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class BlockPage:
    """The events of a node between two places. A subscriber continues after `cursor`."""

    node_id: str
    after: BlockCursor
    cursor: BlockCursor
    events: tuple[BlockEvent, ...]


def read_page(page: worker_pb2.EventPage) -> BlockPage:
    events = tuple(BlockEvent(one.kind, one.tier, tuple(one.keys)) for one in page.events)
    return BlockPage(page.node_id, _cursor(page.after), _cursor(page.cursor), events)


def _cursor(message: worker_pb2.EventCursor) -> BlockCursor:
    return BlockCursor(message.epoch, message.number, message.slot)
