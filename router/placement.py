"""Which worker a request goes to. Pure policies: each has one method, `choose`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wire.ids import WorkerId


@dataclass(frozen=True)
class Load:
    """What a worker was given and has not finished: choices, and tokens of prompts to prefill or contexts to decode."""

    worker: WorkerId
    num_choices: int = 0
    num_tokens: int = 0


@dataclass(frozen=True)
class PrefillPlacement:
    """The worker that would be done first: fewest tokens to compute, with those queued there, then fewest choices."""

    def choose(self, loads: Sequence[Load], cached: Mapping[WorkerId, int], num_prompt_tokens: int) -> WorkerId:
        """`loads` of at least one worker; `cached`, tokens of this prompt that a worker is thought to have."""

        def cost(load: Load) -> tuple[int, int]:
            return (load.num_tokens + num_prompt_tokens - cached.get(load.worker, 0), load.num_choices)

        return min(loads, key=cost).worker


@dataclass(frozen=True)
class DecodePlacement:
    """The worker with the least to do per step, where a choice weighs as much as `choice_tokens` tokens of context.

    A step costs something for each sequence of the batch and something for each token that attention reads. Where
    decode workers prefill, a token that need not be computed there counts, too.
    """

    choice_tokens: int = 256

    def choose(self, loads: Sequence[Load], cached: Mapping[WorkerId, int]) -> WorkerId:
        """`loads` of at least one worker; `cached`, tokens of this prompt that need not be computed there."""

        def cost(load: Load) -> int:
            return load.num_choices * self.choice_tokens + load.num_tokens - cached.get(load.worker, 0)

        return min(loads, key=cost).worker
