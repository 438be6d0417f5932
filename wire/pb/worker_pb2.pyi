from wire.pb import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConnectRequest(_message.Message):
    __slots__ = ("aborts", "renewals", "releases", "asks", "begins", "piece", "proof", "ended_choices", "prefetches", "recalls")
    ABORTS_FIELD_NUMBER: _ClassVar[int]
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    ENDED_CHOICES_FIELD_NUMBER: _ClassVar[int]
    PREFETCHES_FIELD_NUMBER: _ClassVar[int]
    RECALLS_FIELD_NUMBER: _ClassVar[int]
    aborts: _containers.RepeatedScalarFieldContainer[str]
    renewals: _containers.RepeatedScalarFieldContainer[str]
    releases: _containers.RepeatedScalarFieldContainer[str]
    asks: _containers.RepeatedCompositeFieldContainer[Ask]
    begins: _containers.RepeatedCompositeFieldContainer[Begin]
    piece: BeginPart
    proof: bytes
    ended_choices: _containers.RepeatedCompositeFieldContainer[EndedChoice]
    prefetches: _containers.RepeatedCompositeFieldContainer[Prefetch]
    recalls: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, aborts: _Optional[_Iterable[str]] = ..., renewals: _Optional[_Iterable[str]] = ..., releases: _Optional[_Iterable[str]] = ..., asks: _Optional[_Iterable[_Union[Ask, _Mapping]]] = ..., begins: _Optional[_Iterable[_Union[Begin, _Mapping]]] = ..., piece: _Optional[_Union[BeginPart, _Mapping]] = ..., proof: _Optional[bytes] = ..., ended_choices: _Optional[_Iterable[_Union[EndedChoice, _Mapping]]] = ..., prefetches: _Optional[_Iterable[_Union[Prefetch, _Mapping]]] = ..., recalls: _Optional[_Iterable[str]] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("updates", "answers", "ended_holds")
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    ENDED_HOLDS_FIELD_NUMBER: _ClassVar[int]
    updates: _containers.RepeatedCompositeFieldContainer[Update]
    answers: _containers.RepeatedCompositeFieldContainer[WorkerReply]
    ended_holds: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, updates: _Optional[_Iterable[_Union[Update, _Mapping]]] = ..., answers: _Optional[_Iterable[_Union[WorkerReply, _Mapping]]] = ..., ended_holds: _Optional[_Iterable[str]] = ...) -> None: ...

class EndedChoice(_message.Message):
    __slots__ = ("attempt", "index")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    index: int
    def __init__(self, attempt: _Optional[str] = ..., index: _Optional[int] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("id", "namespace_root", "prompt", "sampling_params", "choices", "time_left_s", "block_addresses", "computes_all", "public_root", "num_public_blocks", "num_scored", "session", "keep_s", "kv_policy", "weight", "priority", "output_cost", "deferred_after_s", "deferred_until_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ROOT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_ALL_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_ROOT_FIELD_NUMBER: _ClassVar[int]
    NUM_PUBLIC_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCORED_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEEP_S_FIELD_NUMBER: _ClassVar[int]
    KV_POLICY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_COST_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_UNTIL_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    namespace_root: bytes
    prompt: _inference_pb2.TokenIds
    sampling_params: _inference_pb2.SamplingParams
    choices: _containers.RepeatedCompositeFieldContainer[UnfinishedChoice]
    time_left_s: float
    block_addresses: _containers.RepeatedScalarFieldContainer[str]
    computes_all: bool
    public_root: bytes
    num_public_blocks: int
    num_scored: int
    session: str
    keep_s: float
    kv_policy: str
    weight: float
    priority: int
    output_cost: float
    deferred_after_s: float
    deferred_until_s: float
    def __init__(self, id: _Optional[str] = ..., namespace_root: _Optional[bytes] = ..., prompt: _Optional[_Union[_inference_pb2.TokenIds, _Mapping]] = ..., sampling_params: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., choices: _Optional[_Iterable[_Union[UnfinishedChoice, _Mapping]]] = ..., time_left_s: _Optional[float] = ..., block_addresses: _Optional[_Iterable[str]] = ..., computes_all: _Optional[bool] = ..., public_root: _Optional[bytes] = ..., num_public_blocks: _Optional[int] = ..., num_scored: _Optional[int] = ..., session: _Optional[str] = ..., keep_s: _Optional[float] = ..., kv_policy: _Optional[str] = ..., weight: _Optional[float] = ..., priority: _Optional[int] = ..., output_cost: _Optional[float] = ..., deferred_after_s: _Optional[float] = ..., deferred_until_s: _Optional[float] = ...) -> None: ...

class UnfinishedChoice(_message.Message):
    __slots__ = ("index", "output")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    index: int
    output: _inference_pb2.TokenIds
    def __init__(self, index: _Optional[int] = ..., output: _Optional[_Union[_inference_pb2.TokenIds, _Mapping]] = ...) -> None: ...

class Prefetch(_message.Message):
    __slots__ = ("id", "namespace_root", "tokens", "first_block", "parent", "public_root", "num_public_blocks", "block_addresses")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ROOT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_ROOT_FIELD_NUMBER: _ClassVar[int]
    NUM_PUBLIC_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    id: str
    namespace_root: bytes
    tokens: _inference_pb2.TokenIds
    first_block: int
    parent: bytes
    public_root: bytes
    num_public_blocks: int
    block_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., namespace_root: _Optional[bytes] = ..., tokens: _Optional[_Union[_inference_pb2.TokenIds, _Mapping]] = ..., first_block: _Optional[int] = ..., parent: _Optional[bytes] = ..., public_root: _Optional[bytes] = ..., num_public_blocks: _Optional[int] = ..., block_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class BeginPart(_message.Message):
    __slots__ = ("id", "data", "last")
    ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    id: str
    data: bytes
    last: bool
    def __init__(self, id: _Optional[str] = ..., data: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...

class Update(_message.Message):
    __slots__ = ("id", "choices", "prompt", "num_held_blocks", "end", "scores", "num_stored_blocks")
    ID_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    NUM_STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    id: str
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceTokens]
    prompt: PromptSource
    num_held_blocks: int
    end: End
    scores: PromptScores
    num_stored_blocks: int
    def __init__(self, id: _Optional[str] = ..., choices: _Optional[_Iterable[_Union[ChoiceTokens, _Mapping]]] = ..., prompt: _Optional[_Union[PromptSource, _Mapping]] = ..., num_held_blocks: _Optional[int] = ..., end: _Optional[_Union[End, _Mapping]] = ..., scores: _Optional[_Union[PromptScores, _Mapping]] = ..., num_stored_blocks: _Optional[int] = ...) -> None: ...

class PromptScores(_message.Message):
    __slots__ = ("first_position", "logprobs")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    def __init__(self, first_position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class ChoiceTokens(_message.Message):
    __slots__ = ("index", "first_position", "token_ids", "logprobs", "finish_reason", "stop_token_id")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    index: int
    first_position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    finish_reason: _inference_pb2.FinishReason
    stop_token_id: int
    def __init__(self, index: _Optional[int] = ..., first_position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class PromptSource(_message.Message):
    __slots__ = ("cached_tokens", "computed_tokens", "misses")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TierTokens]
    computed_tokens: int
    misses: _containers.RepeatedCompositeFieldContainer[MissRun]
    def __init__(self, cached_tokens: _Optional[_Iterable[_Union[_inference_pb2.TierTokens, _Mapping]]] = ..., computed_tokens: _Optional[int] = ..., misses: _Optional[_Iterable[_Union[MissRun, _Mapping]]] = ...) -> None: ...

class MissRun(_message.Message):
    __slots__ = ("cause", "how", "age_s", "first_token", "blocks")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    cause: str
    how: str
    age_s: float
    first_token: int
    blocks: int
    def __init__(self, cause: _Optional[str] = ..., how: _Optional[str] = ..., age_s: _Optional[float] = ..., first_token: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("spans", "error")
    SPANS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[_inference_pb2.Span]
    error: Error
    def __init__(self, spans: _Optional[_Iterable[_Union[_inference_pb2.Span, _Mapping]]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("reason", "message", "ids")
    class IdsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    ids: _containers.ScalarMap[str, str]
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., ids: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("number", "info", "status", "events", "count", "clear", "drop_pages", "room")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    DROP_PAGES_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    number: int
    info: GetInfo
    status: GetStatus
    events: GetEvents
    count: BlockSelection
    clear: BlockSelection
    drop_pages: BlockSelection
    room: ShareRoom
    def __init__(self, number: _Optional[int] = ..., info: _Optional[_Union[GetInfo, _Mapping]] = ..., status: _Optional[_Union[GetStatus, _Mapping]] = ..., events: _Optional[_Union[GetEvents, _Mapping]] = ..., count: _Optional[_Union[BlockSelection, _Mapping]] = ..., clear: _Optional[_Union[BlockSelection, _Mapping]] = ..., drop_pages: _Optional[_Union[BlockSelection, _Mapping]] = ..., room: _Optional[_Union[ShareRoom, _Mapping]] = ...) -> None: ...

class ShareRoom(_message.Message):
    __slots__ = ("router", "blocks")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    router: str
    blocks: int
    def __init__(self, router: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...

class HoldRoom(_message.Message):
    __slots__ = ("blocks_of_others", "routers")
    BLOCKS_OF_OTHERS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    blocks_of_others: int
    routers: int
    def __init__(self, blocks_of_others: _Optional[int] = ..., routers: _Optional[int] = ...) -> None: ...

class BlockSelection(_message.Message):
    __slots__ = ("keys", "namespaces")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    namespaces: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., namespaces: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("tier", "namespace", "blocks", "bytes", "newest_s", "oldest_s", "places")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    NEWEST_S_FIELD_NUMBER: _ClassVar[int]
    OLDEST_S_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    tier: str
    namespace: bytes
    blocks: int
    bytes: int
    newest_s: float
    oldest_s: float
    places: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tier: _Optional[str] = ..., namespace: _Optional[bytes] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., newest_s: _Optional[float] = ..., oldest_s: _Optional[float] = ..., places: _Optional[_Iterable[int]] = ...) -> None: ...

class Holdings(_message.Message):
    __slots__ = ("holdings", "problems")
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...

class GetInfo(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEvents(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: EventCursor
    def __init__(self, after: _Optional[_Union[EventCursor, _Mapping]] = ...) -> None: ...

class EventCursor(_message.Message):
    __slots__ = ("epoch", "number", "slot")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    number: int
    slot: int
    def __init__(self, epoch: _Optional[str] = ..., number: _Optional[int] = ..., slot: _Optional[int] = ...) -> None: ...

class EventPage(_message.Message):
    __slots__ = ("node_id", "after", "cursor", "events")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    after: EventCursor
    cursor: EventCursor
    events: _containers.RepeatedCompositeFieldContainer[BlockEvents]
    def __init__(self, node_id: _Optional[str] = ..., after: _Optional[_Union[EventCursor, _Mapping]] = ..., cursor: _Optional[_Union[EventCursor, _Mapping]] = ..., events: _Optional[_Iterable[_Union[BlockEvents, _Mapping]]] = ...) -> None: ...

class BlockEvents(_message.Message):
    __slots__ = ("kind", "tier", "keys")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    tier: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, kind: _Optional[str] = ..., tier: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GetStatus(_message.Message):
    __slots__ = ("check",)
    CHECK_FIELD_NUMBER: _ClassVar[int]
    check: bool
    def __init__(self, check: _Optional[bool] = ...) -> None: ...

class WorkerReply(_message.Message):
    __slots__ = ("number", "info", "status", "error", "events", "holdings", "room")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    number: int
    info: WorkerInfo
    status: WorkerStatus
    error: Error
    events: EventPage
    holdings: Holdings
    room: HoldRoom
    def __init__(self, number: _Optional[int] = ..., info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., status: _Optional[_Union[WorkerStatus, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., events: _Optional[_Union[EventPage, _Mapping]] = ..., holdings: _Optional[_Union[Holdings, _Mapping]] = ..., room: _Optional[_Union[HoldRoom, _Mapping]] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "role", "protocol_version", "epoch", "fingerprint", "layout", "max_context_len", "num_blocks", "num_arena_blocks", "vocab_size", "eos_token_ids", "pid", "node_id", "block_address", "load_s", "mapped_bytes", "oldest_protocol_version", "release")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_ARENA_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    MAPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    protocol_version: int
    epoch: str
    fingerprint: bytes
    layout: bytes
    max_context_len: int
    num_blocks: int
    num_arena_blocks: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    pid: int
    node_id: str
    block_address: str
    load_s: float
    mapped_bytes: int
    oldest_protocol_version: int
    release: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., protocol_version: _Optional[int] = ..., epoch: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., layout: _Optional[bytes] = ..., max_context_len: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_arena_blocks: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., pid: _Optional[int] = ..., node_id: _Optional[str] = ..., block_address: _Optional[str] = ..., load_s: _Optional[float] = ..., mapped_bytes: _Optional[int] = ..., oldest_protocol_version: _Optional[int] = ..., release: _Optional[str] = ...) -> None: ...

class BlockCounts(_message.Message):
    __slots__ = ("free", "owned", "published", "cached", "draining", "total")
    FREE_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    free: int
    owned: int
    published: int
    cached: int
    draining: int
    total: int
    def __init__(self, free: _Optional[int] = ..., owned: _Optional[int] = ..., published: _Optional[int] = ..., cached: _Optional[int] = ..., draining: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "role", "pid", "state", "blocks", "computed_prompt_tokens", "cached_prompt_tokens", "generated_tokens", "num_running", "num_waiting", "num_preemptions", "num_drafts", "num_guessed_tokens", "num_accepted_tokens", "tiers", "problems", "load_s", "mapped_bytes", "memory_bytes", "engine_silent_s", "node_id", "prefill_token_s", "release", "protocol_version")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_GUESSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    MAPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_SILENT_S_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    pid: int
    state: str
    blocks: BlockCounts
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_drafts: int
    num_guessed_tokens: int
    num_accepted_tokens: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    problems: _containers.RepeatedScalarFieldContainer[str]
    load_s: float
    mapped_bytes: int
    memory_bytes: int
    engine_silent_s: float
    node_id: str
    prefill_token_s: float
    release: str
    protocol_version: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., blocks: _Optional[_Union[BlockCounts, _Mapping]] = ..., computed_prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_drafts: _Optional[int] = ..., num_guessed_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., problems: _Optional[_Iterable[str]] = ..., load_s: _Optional[float] = ..., mapped_bytes: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., engine_silent_s: _Optional[float] = ..., node_id: _Optional[str] = ..., prefill_token_s: _Optional[float] = ..., release: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("tier", "state", "epoch", "blocks", "block_bytes", "counts")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TIER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    state: str
    epoch: str
    blocks: BlockCounts
    block_bytes: int
    counts: _containers.ScalarMap[str, int]
    def __init__(self, tier: _Optional[str] = ..., state: _Optional[str] = ..., epoch: _Optional[str] = ..., blocks: _Optional[_Union[BlockCounts, _Mapping]] = ..., block_bytes: _Optional[int] = ..., counts: _Optional[_Mapping[str, int]] = ...) -> None: ...
