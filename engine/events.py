"""What an engine reports from a step. Every request ends with one Finished per choice, one HandedOff, or one Failed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.schedule.batcher import Gate
from wire.block_counts import BlockCounts
from wire.errors import BatonError
from wire.ids import RequestId
from wire.sampling import FinishReason, Logprobs


@dataclass(frozen=True)
class TierTokens:
    """Prompt tokens by the tier that had their KV, without tiers that had none; `computed` counts those left over."""

    found: Mapping[str, int] = field(default_factory=dict)
    computed: int = 0

    @property
    def num_found(self) -> int:
        return sum(self.found.values())


@dataclass(frozen=True)
class HeldUp:
    """A choice in the queue was not admitted to this step. Told again only when it waits for something else."""

    request_id: RequestId
    choice: int
    gate: Gate


@dataclass(frozen=True)
class Scheduled:
    """A choice left the queue: it has pages, and its fetch, if any, starts."""

    request_id: RequestId
    choice: int


@dataclass(frozen=True)
class Fetched:
    """A choice has from the store what it will get, and joins the running batch; `tokens` covers prompt tokens only.

    Reported again, with what was found then, each time the choice comes back from preemption.
    """

    request_id: RequestId
    choice: int
    tokens: TierTokens


@dataclass(frozen=True)
class Started:
    """A choice has the first turn of its life in this step: until then others of the running batch came before it."""

    request_id: RequestId
    choice: int


@dataclass(frozen=True)
class Emitted:
    """A choice gained one token, its `position`-th output token counted from 0."""

    request_id: RequestId
    choice: int
    position: int
    token_id: int
    logprobs: Logprobs | None


@dataclass(frozen=True)
class Finished:
    """A choice ended with the token just emitted, a stop token if `stop_token_id` is set; its pages are free."""

    request_id: RequestId
    choice: int
    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True)
class HandedOff:
    """Every unfinished choice has its first token, and all blocks of the prompt are in the store under a hold.

    `num_held` may be less than the prompt's blocks where the store had no room; what is missing will be recomputed.
    """

    request_id: RequestId
    num_held: int


@dataclass(frozen=True)
class Abandoned:
    """The blocks of a request that was aborted meanwhile are in the store, under a hold that nobody will use.

    The only thing ever said of a request after its end.
    """

    request_id: RequestId


@dataclass(frozen=True)
class Preempted:
    """A choice lost its pages to an older one and went back to the queue."""

    request_id: RequestId
    choice: int


@dataclass(frozen=True)
class Failed:
    """The request ended with an error; its pages are free. Other requests are not touched."""

    request_id: RequestId
    error: BatonError


Event = HeldUp | Scheduled | Fetched | Started | Emitted | Finished | HandedOff | Abandoned | Preempted | Failed


@dataclass(frozen=True)
class EngineStats:
    """Counts since the start, and pages and sequences as they are."""

    blocks: BlockCounts
    num_running: int
    num_waiting: int
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    num_preemptions: int
