"""Which worker a request goes to. Pure policies: each has one method, `choose`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wire.ids import WorkerId

LONG_STEP_S = 5.0
"""An engine that takes longer may hang, or compute a long prompt on a CPU: it is chosen last, and that is all."""


@dataclass(frozen=True)
class Load:
    """What a worker was given and has not finished: choices, and tokens of prompts to prefill or contexts to decode.

    engine_silent_s: how long ago its engine last finished a step, as far as is known.
    """

    worker: WorkerId
    num_choices: int = 0
    num_tokens: int = 0
    engine_silent_s: float = 0.0

    @property
    def is_silent(self) -> bool:
        return self.engine_silent_s >= LONG_STEP_S


@dataclass(frozen=True)
class PrefillPlacement:
    """The worker that would be done first: fewest tokens to compute, with those queued there, then fewest choices.

    One that is silent only where all are.
    """

    def choose(self, loads: Sequence[Load], cached: Mapping[WorkerId, int], num_prompt_tokens: int) -> WorkerId:
        """`loads` of at least one worker; `cached`, tokens of this prompt that a worker is thought to have."""

        def cost(load: Load) -> tuple[bool, int, int]:
            num_tokens = load.num_tokens + num_prompt_tokens - cached.get(load.worker, 0)
            return (load.is_silent, num_tokens, load.num_choices)

        return min(loads, key=cost).worker


@dataclass(frozen=True)
class DecodePlacement:
    """The worker with the least to do per step, where a choice weighs as much as `choice_tokens` tokens of context.

    A step costs something for each sequence of the batch and something for each token that attention reads. Where
    decode workers prefill, a token that need not be computed there counts, too. One that is silent only where all are.
    """

    choice_tokens: int = 256

    def choose(self, loads: Sequence[Load], cached: Mapping[WorkerId, int]) -> WorkerId:
        """`loads` of at least one worker; `cached`, tokens of this prompt that need not be computed there."""

        def cost(load: Load) -> tuple[bool, int]:
            num_tokens = load.num_choices * self.choice_tokens + load.num_tokens - cached.get(load.worker, 0)
            return (load.is_silent, num_tokens)

        return min(loads, key=cost).worker
