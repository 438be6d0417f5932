"""Which worker a request goes to. Pure policies: each has one method, `choose`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from wire.ids import WorkerId


class Load(Protocol):
    """A worker, as policies see it: its choices and its tokens, of prompts to prefill or of contexts to decode.

    num_prompt_tokens: of prompts that a decode worker has yet to prefill. is_silent: its engine may hang, or be in a
    long step.
    """

    @property
    def id(self) -> WorkerId: ...
    @property
    def num_choices(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def is_silent(self) -> bool: ...


L = TypeVar("L", bound=Load)


@dataclass(frozen=True)
class ConditionalPrefill:
    """The pool that would be done first with a prompt, prompts before it included: prefill's, or straight decode's.

    decode_slowdown: a prompt is taken to last so many times as long on a decode worker, which has streams to go on
    with. A silent worker counts only where all of both pools are.
    """

    decode_slowdown: float

    def uses_prefill(self, prefill: Sequence[Load], decode: Sequence[Load], num_new_tokens: int) -> bool:
        """`num_new_tokens`: tokens of the prompt that are in no tier. False without prefill workers."""
        there = [(load.is_silent, load.num_tokens + num_new_tokens) for load in prefill]
        here = [(load.is_silent, self.decode_slowdown * (load.num_prompt_tokens + num_new_tokens)) for load in decode]
        return bool(there) and (not here or min(there) <= min(here))


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
    decode workers prefill, tokens that they have yet to compute count, too. A silent worker is chosen only
    where all are.
    """

    choice_tokens: int = 256

    def choose(self, loads: Sequence[L], cached: Mapping[WorkerId, int]) -> L:
        """`loads` of at least one worker; `cached`, tokens of this prompt that need not be computed there."""

        def cost(load: L) -> tuple[bool, int]:
            num_tokens = load.num_choices * self.choice_tokens + load.num_tokens + load.num_prompt_tokens
            return (load.is_silent, num_tokens - cached.get(load.id, 0))

        return min(loads, key=cost)
