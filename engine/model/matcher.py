"""The grammar of a request after the tokens of one of its choices."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from text.grammar import PARAM, fault_of
from wire.errors import BatonError, InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher


MAX_TOKEN_S = 0.02
"""The most processor time to take a token, on average over new tokens; llguidance's limits bound masks alone."""


class Matcher:
    """A grammar that has taken output tokens of a choice. Its state is a function of grammar and tokens.

    Only the fault of slow tokens depends on the machine; it ends a request and changes no token. Not thread-safe.
    """

    def __init__(self, state: "LLMatcher") -> None:
        self.state = state
        self._num_taken = 0
        self._is_slow = False

    def fork(self) -> "Matcher":
        """Copies a matcher that has taken no token."""
        return Matcher(self.state.deep_copy())

    def take(self, output_ids: Sequence[int]) -> None:
        """Takes the tokens of a choice that the matcher has not taken yet."""
        new = output_ids[self._num_taken :]
        if new:
            began_s = time.thread_time()
            self.state.consume_tokens([*new])
            self._num_taken += len(new)
            self._is_slow = time.thread_time() - began_s > MAX_TOKEN_S * len(new)

    def forced(self, output_ids: Sequence[int]) -> list[int]:
        """Returns tokens of the text that must follow; a model may split the text differently. Takes tokens as `take`
        does.
        """
        self.take(output_ids)
        return [] if self.state.is_error() else self.state.compute_ff_tokens()

    @property
    def fault(self) -> BatonError | None:
        """The error of a grammar that accepts neither a token nor an end, or that passes a limit; else None."""
        fault = "its tokens take too long" if self._is_slow else fault_of(self.state)
        return InvalidRequest(PARAM, f"goes on no more after {self._num_taken} tokens: {fault}") if fault else None
