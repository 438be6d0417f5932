from wire.pb import inference_pb2 as _inference_pb2
from wire.pb import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ("check", "recent")
    CHECK_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    check: bool
    recent: bool
    def __init__(self, check: _Optional[bool] = ..., recent: _Optional[bool] = ...) -> None: ...

class ClusterStatus(_message.Message):
    __slots__ = ("model", "address", "workers", "num_running", "num_queued", "events", "problems", "metrics_address", "prefix_cache", "tiers", "pools", "uncached_blocks", "batch_invariant")
    class UncachedBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    model: str
    address: str
    workers: _containers.RepeatedCompositeFieldContainer[_worker_pb2.WorkerStatus]
    num_running: int
    num_queued: int
    events: _containers.RepeatedCompositeFieldContainer[ClusterEvent]
    problems: _containers.RepeatedScalarFieldContainer[str]
    metrics_address: str
    prefix_cache: PrefixCache
    tiers: _containers.RepeatedCompositeFieldContainer[_worker_pb2.TierStatus]
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    uncached_blocks: _containers.ScalarMap[str, int]
    batch_invariant: bool
    def __init__(self, model: _Optional[str] = ..., address: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[_worker_pb2.WorkerStatus, _Mapping]]] = ..., num_running: _Optional[int] = ..., num_queued: _Optional[int] = ..., events: _Optional[_Iterable[_Union[ClusterEvent, _Mapping]]] = ..., problems: _Optional[_Iterable[str]] = ..., metrics_address: _Optional[str] = ..., prefix_cache: _Optional[_Union[PrefixCache, _Mapping]] = ..., tiers: _Optional[_Iterable[_Union[_worker_pb2.TierStatus, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., uncached_blocks: _Optional[_Mapping[str, int]] = ..., batch_invariant: _Optional[bool] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("role", "size", "num_ready", "limit", "last_order", "last_order_age_s")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_READY_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    LAST_ORDER_FIELD_NUMBER: _ClassVar[int]
    LAST_ORDER_AGE_S_FIELD_NUMBER: _ClassVar[int]
    role: str
    size: int
    num_ready: int
    limit: str
    last_order: str
    last_order_age_s: float
    def __init__(self, role: _Optional[str] = ..., size: _Optional[int] = ..., num_ready: _Optional[int] = ..., limit: _Optional[str] = ..., last_order: _Optional[str] = ..., last_order_age_s: _Optional[float] = ...) -> None: ...

class PrefixCache(_message.Message):
    __slots__ = ("queries", "hits")
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    queries: int
    hits: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TierTokens]
    def __init__(self, queries: _Optional[int] = ..., hits: _Optional[_Iterable[_Union[_inference_pb2.TierTokens, _Mapping]]] = ...) -> None: ...

class ClusterEvent(_message.Message):
    __slots__ = ("age_s", "text")
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    age_s: float
    text: str
    def __init__(self, age_s: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("prefill", "decode")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("prefill", "decode")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RollRequest(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: str
    def __init__(self, revision: _Optional[str] = ...) -> None: ...

class RollResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("worker_id", "prompt", "max_tokens")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    prompt: _inference_pb2.TokenIds
    max_tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., prompt: _Optional[_Union[_inference_pb2.TokenIds, _Mapping]] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("token_ids", "timeline")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    timeline: _inference_pb2.Timeline
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., timeline: _Optional[_Union[_inference_pb2.Timeline, _Mapping]] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("request_id", "after", "limit")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    after: int
    limit: int
    def __init__(self, request_id: _Optional[str] = ..., after: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[EndedRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[EndedRequest, _Mapping]]] = ...) -> None: ...

class EndedRequest(_message.Message):
    __slots__ = ("number", "request_id", "tenant", "outcome", "reason", "message", "ended_s", "prompt_tokens", "output_tokens", "attempts", "ttft_ms", "cached_tokens", "timeline", "causes", "misses")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    CAUSES_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    number: int
    request_id: str
    tenant: str
    outcome: str
    reason: str
    message: str
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    attempts: int
    ttft_ms: float
    cached_tokens: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TierTokens]
    timeline: _inference_pb2.Timeline
    causes: _containers.RepeatedScalarFieldContainer[str]
    misses: _containers.RepeatedCompositeFieldContainer[_worker_pb2.MissRun]
    def __init__(self, number: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., ended_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., attempts: _Optional[int] = ..., ttft_ms: _Optional[float] = ..., cached_tokens: _Optional[_Iterable[_Union[_inference_pb2.TierTokens, _Mapping]]] = ..., timeline: _Optional[_Union[_inference_pb2.Timeline, _Mapping]] = ..., causes: _Optional[_Iterable[str]] = ..., misses: _Optional[_Iterable[_Union[_worker_pb2.MissRun, _Mapping]]] = ...) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UsageReport(_message.Message):
    __slots__ = ("usage",)
    USAGE_FIELD_NUMBER: _ClassVar[int]
    usage: _containers.RepeatedCompositeFieldContainer[TenantUsage]
    def __init__(self, usage: _Optional[_Iterable[_Union[TenantUsage, _Mapping]]] = ...) -> None: ...

class TenantUsage(_message.Message):
    __slots__ = ("tenant", "key", "requests", "computed_tokens", "cached_tokens", "generated_tokens", "worker_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORKER_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    key: str
    requests: int
    computed_tokens: int
    cached_tokens: int
    generated_tokens: int
    worker_s: float
    def __init__(self, tenant: _Optional[str] = ..., key: _Optional[str] = ..., requests: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., worker_s: _Optional[float] = ...) -> None: ...

class ExplainMissesRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class MissExplanation(_message.Message):
    __slots__ = ("request", "problems")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    request: EndedRequest
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request: _Optional[_Union[EndedRequest, _Mapping]] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...

class ShutdownRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShutdownResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadKeysRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadKeysResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchBlocksRequest(_message.Message):
    __slots__ = ("after",)
    class AfterEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _worker_pb2.EventCursor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_worker_pb2.EventCursor, _Mapping]] = ...) -> None: ...
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: _containers.MessageMap[str, _worker_pb2.EventCursor]
    def __init__(self, after: _Optional[_Mapping[str, _worker_pb2.EventCursor]] = ...) -> None: ...

class CacheRequest(_message.Message):
    __slots__ = ("tenant", "model", "text", "token_ids", "everything")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EVERYTHING_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    text: str
    token_ids: _inference_pb2.TokenIds
    everything: bool
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_inference_pb2.TokenIds, _Mapping]] = ..., everything: _Optional[bool] = ...) -> None: ...

class CacheContents(_message.Message):
    __slots__ = ("rows", "dropped_pages", "prompt_blocks", "problems")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_PAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[CacheRow]
    dropped_pages: int
    prompt_blocks: int
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rows: _Optional[_Iterable[_Union[CacheRow, _Mapping]]] = ..., dropped_pages: _Optional[int] = ..., prompt_blocks: _Optional[int] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...

class CacheRow(_message.Message):
    __slots__ = ("tier", "node_id", "tenant", "model", "blocks", "bytes", "newest_s", "oldest_s", "share", "places")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    NEWEST_S_FIELD_NUMBER: _ClassVar[int]
    OLDEST_S_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    tier: str
    node_id: str
    tenant: str
    model: str
    blocks: int
    bytes: int
    newest_s: float
    oldest_s: float
    share: float
    places: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tier: _Optional[str] = ..., node_id: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., newest_s: _Optional[float] = ..., oldest_s: _Optional[float] = ..., share: _Optional[float] = ..., places: _Optional[_Iterable[int]] = ...) -> None: ...

class ComparePromptsRequest(_message.Message):
    __slots__ = ("tenant", "first", "second")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    first: str
    second: str
    def __init__(self, tenant: _Optional[str] = ..., first: _Optional[str] = ..., second: _Optional[str] = ...) -> None: ...

class PromptComparison(_message.Message):
    __slots__ = ("first_tokens", "second_tokens", "shared_tokens", "first_text", "second_text", "block_size", "shared_blocks", "held", "problems")
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECOND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TEXT_FIELD_NUMBER: _ClassVar[int]
    SECOND_TEXT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    first_tokens: int
    second_tokens: int
    shared_tokens: int
    first_text: str
    second_text: str
    block_size: int
    shared_blocks: int
    held: _containers.RepeatedCompositeFieldContainer[CacheRow]
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, first_tokens: _Optional[int] = ..., second_tokens: _Optional[int] = ..., shared_tokens: _Optional[int] = ..., first_text: _Optional[str] = ..., second_text: _Optional[str] = ..., block_size: _Optional[int] = ..., shared_blocks: _Optional[int] = ..., held: _Optional[_Iterable[_Union[CacheRow, _Mapping]]] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...
