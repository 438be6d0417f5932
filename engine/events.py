"""An engine's output: tokens of a step beside its events, and statistics.

A request that is not aborted ends with one Failed, or with a Finished for each choice that `EngineCore.end` has not
ended. A hand-off ends with HandedOff in place of the Finished of choices that go on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.schedule.batcher import Gate
from wire.errors import BatonError
from wire.ids import AttemptId
from wire.sampling import FinishReason, Logprobs
from wire.tier import LedgerCounts, MissRun


@dataclass(frozen=True)
class PromptTokens:
    """Prompt tokens by the tier that had their KV, without empty tiers; `computed` counts the rest.

    misses: the causes of the prompt's uncached blocks, in order; none where tokens were dropped.
    """

    found: Mapping[str, int] = field(default_factory=dict)
    computed: int = 0
    misses: tuple[MissRun, ...] = ()

    @property
    def num_found(self) -> int:
        return sum(self.found.values())


@dataclass(frozen=True)
class ChoiceId:
    """A choice of a request; a sequence keeps one object for all steps."""

    attempt_id: AttemptId
    index: int


@dataclass(frozen=True)
class ChoiceEvent:
    """An event of one choice of a request."""

    attempt_id: AttemptId
    choice: int


@dataclass(frozen=True)
class HeldUp(ChoiceEvent):
    """A waiting choice was not admitted to this step. Repeated only when its gate changes."""

    gate: Gate


class Scheduled(ChoiceEvent):
    """A choice left the queue: it has pages, and its fetch, if any, starts."""


@dataclass(frozen=True)
class Fetched(ChoiceEvent):
    """A choice's fetch has ended, and the choice joins the running batch; `tokens` covers prompt tokens only.

    Reported again after each preemption, with the tokens found then.
    """

    tokens: PromptTokens


@dataclass(frozen=True)
class Jumped(ChoiceEvent):
    """A choice has found blocks on the device that were read while it computed the blocks before them.

    span: all tokens of the blocks. tokens: the prompt's tokens, after this jump and all earlier jumps.
    """

    span: range
    tokens: PromptTokens

    @property
    def num_found(self) -> int:
        """Prompt tokens of the blocks."""
        return max(0, min(self.span.stop, self.tokens.num_found + self.tokens.computed) - self.span.start)


@dataclass(frozen=True)
class Scored(ChoiceEvent):
    """A run has scored tokens of the prompt, from the `first_position`-th on; each token is scored once."""

    first_position: int
    logprobs: tuple[Logprobs, ...]


class Started(ChoiceEvent):
    """A choice runs in a step for the first time; until then other sequences of the running batch came first."""


@dataclass(frozen=True)
class Finished(ChoiceEvent):
    """A choice ended with its token of this step, a stop token if `stop_token_id` is set; its pages are free."""

    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True)
class Drafted(ChoiceEvent):
    """A step had guesses of a choice's next tokens; accepted guesses are among the step's tokens."""

    num_guessed: int
    num_accepted: int


class Preempted(ChoiceEvent):
    """A choice lost its pages to an older choice and went back to the queue."""


@dataclass(frozen=True)
class HandedOff:
    """Every unfinished choice has its first token, and the store holds the blocks of the prompt for the request.

    `num_held` may be less than the prompt's blocks where the store had no room; the rest will be recomputed.
    """

    attempt_id: AttemptId
    num_held: int


@dataclass(frozen=True)
class HoldOrphaned:
    """The store holds the blocks of a request that was aborted meanwhile; the router releases the hold.

    The only event of a request after its end.
    """

    attempt_id: AttemptId


@dataclass(frozen=True)
class Failed:
    """The request ended with an error; its pages are free. Other requests are not touched."""

    attempt_id: AttemptId
    error: BatonError


Event = (
    HeldUp
    | Scheduled
    | Fetched
    | Jumped
    | Started
    | Scored
    | Drafted
    | Finished
    | HandedOff
    | HoldOrphaned
    | Preempted
    | Failed
)


@dataclass(kw_only=True)
class StepOutput:
    """The output of a step: the choices that gained a token, and the events before and after the model's run.

    before: events up to the run of the model. choices, positions, token_ids: as long as one another; `positions` counts
    a choice's output tokens from 0. logprobs: by place in `choices`, where they were asked for. after: what followed.
    """

    before: list[Event] = field(default_factory=list)
    choices: list[ChoiceId] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    after: list[Event] = field(default_factory=list)

    @property
    def events(self) -> list[Event]:
        return [*self.before, *self.after]

    @property
    def is_news(self) -> bool:
        return bool(self.token_ids or self.before or self.after)


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counts since the start, and the present numbers of pages and sequences."""

    blocks: LedgerCounts
    num_running: int
    num_waiting: int
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    num_preemptions: int
    num_drafts: int
    num_guessed_tokens: int
    num_accepted_tokens: int
