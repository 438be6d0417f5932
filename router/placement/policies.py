"""Which worker a request goes to. Pure policies: each has one method, `choose`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from wire.ids import WorkerId


class Load(Protocol):
    """A worker, as policies see it: its choices and its tokens, of prompts to prefill or of contexts to decode.

    is_silent: its engine may hang, or be in a long step.
    """

    @property
    def id(self) -> WorkerId: ...
    @property
    def num_choices(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def is_silent(self) -> bool: ...


L = TypeVar("L", bound=Load)


@dataclass(frozen=True)
class PrefillPlacement:
    """The worker that would be done first: fewest tokens to compute, queued ones included, then fewest choices.

    A silent worker is chosen only where all are.
    """

    def choose(self, loads: Sequence[L], cached: Mapping[WorkerId, int], num_prompt_tokens: int) -> L:
        """`loads` of at least one worker; `cached`, tokens of this prompt that a worker is thought to have."""

        def cost(load: L) -> tuple[bool, int, int]:
            num_tokens = load.num_tokens + num_prompt_tokens - cached.get(load.id, 0)
            return (load.is_silent, num_tokens, load.num_choices)

        return min(loads, key=cost)


@dataclass(frozen=True)
class DecodePlacement:
    """The worker with the least to do per step, where a choice weighs as much as `choice_tokens` tokens of context.

    A step costs something for each sequence of the batch and something for each token that attention reads. Where
    decode workers prefill, a token that need not be computed there counts, too. A silent worker is chosen only where
    all are.
    """

    choice_tokens: int = 256

    def choose(self, loads: Sequence[L], cached: Mapping[WorkerId, int]) -> L:
        """`loads` of at least one worker; `cached`, tokens of this prompt that need not be computed there."""

        def cost(load: L) -> tuple[bool, int]:
            num_tokens = load.num_choices * self.choice_tokens + load.num_tokens - cached.get(load.id, 0)
            return (load.is_silent, num_tokens)

        return min(loads, key=cost)
