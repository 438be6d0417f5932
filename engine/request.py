"""What an engine is asked to do."""

from dataclasses import dataclass

from wire.errors import InvalidRequest
from wire.ids import NamespaceRoot, RequestId
from wire.sampling import SamplingParams


@dataclass(frozen=True)
class ChoiceSoFar:
    """A choice to go on with: its index among the request's n, and what was emitted for it already."""

    index: int
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class EngineRequest:
    """A prompt and its unfinished choices.

    An engine that is to hand the request over after one more token per choice is told so by `HandOff`, a subclass: it
    then publishes all blocks of the prompt, the partly filled last one included, and holds them for the request.
    """

    request_id: RequestId
    root: NamespaceRoot
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    choices: tuple[ChoiceSoFar, ...] = (ChoiceSoFar(0),)

    @property
    def max_len(self) -> int:
        """Tokens of the prompt and of a choice at its longest."""
        return len(self.prompt_ids) + self.sampling.max_tokens

    def require_runnable(self, vocab_size: int, max_context_len: int) -> None:
        """Raises InvalidRequest for what a model of that vocabulary and context cannot run."""
        if not self.prompt_ids or not self.choices:
            raise InvalidRequest("prompt", "must have a token and a choice to make")
        if not all(0 <= token < vocab_size for token in self.prompt_ids):
            raise InvalidRequest("token_ids", f"must be from 0 to {vocab_size - 1}")
        if self.sampling.max_tokens < 1:
            raise InvalidRequest("max_tokens", "must be at least 1")
        if self.max_len > max_context_len:
            raise InvalidRequest("max_tokens", f"{self.max_len} tokens exceed the context ({max_context_len})")


@dataclass(frozen=True)
class HandOff(EngineRequest):
    """A request whose prompt is computed here and whose choices go on elsewhere after their first token."""
