"""A request to an engine."""

from dataclasses import dataclass

from engine.model.matcher import Matcher
from kv_store.node.directory_port import KeepHint
from wire.block_names import PublicPart
from wire.errors import InvalidRequest, Unsupported
from wire.ids import AttemptId, NamespaceRoot
from wire.kv_policy import Dropping
from wire.sampling import SamplingParams


@dataclass(frozen=True)
class ChoiceSoFar:
    """A choice to continue: its index among the request's n, and its tokens so far.

    matcher: has taken these tokens; `Grammars.prepare` gives each choice of a request with a response format its own.
    """

    index: int
    output_ids: tuple[int, ...] = ()
    matcher: Matcher | None = None


@dataclass(frozen=True)
class EngineRequest:
    """A prompt and its unfinished choices. peers: addresses of block ports of other nodes that may have its blocks.

    computes_all: it reads no cached KV. num_scored: tokens of the prompt before the next one to score, at least 1, as
    the first has no score; 0 to score none. A score is a token's log-probabilities, as sampling.prompt_logprobs
    asks for them. public: the part of the prompt whose names all tenants share. dropping: the policy
    by which it drops KV, if any. hint: about its KV once it is over.

    `HandOff`, a subclass, asks for one more token per choice only: the engine then writes all blocks of the prompt,
    the partly filled last one included, and holds them for the request.
    """

    attempt_id: AttemptId
    root: NamespaceRoot
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    choices: tuple[ChoiceSoFar, ...] = (ChoiceSoFar(0),)
    peers: tuple[str, ...] = ()
    computes_all: bool = False
    num_scored: int = 0
    public: PublicPart | None = None
    dropping: Dropping | None = None
    hint: KeepHint | None = None

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def max_len(self) -> int:
        """Tokens of the prompt and of a choice at its longest."""
        return self.num_prompt + self.sampling.max_tokens

    def require_runnable(self, vocab_size: int, max_context_len: int) -> None:
        """Raises InvalidRequest if a model of that vocabulary and context cannot run the request."""
        if not self.prompt_ids or not self.choices:
            raise InvalidRequest("prompt", "must have a token and a choice to make")
        if not all(0 <= token < vocab_size for token in self.prompt_ids):
            raise InvalidRequest("token_ids", f"must be from 0 to {vocab_size - 1}")
        if self.sampling.max_tokens < 1:
            raise InvalidRequest("max_tokens", "must be at least 1")
        if self.sampling.response_format is not None and not all(one.matcher for one in self.choices):
            raise Unsupported("response_format: this engine builds no grammars", param="response_format")
        if self.max_len > max_context_len:
            raise InvalidRequest("max_tokens", f"{self.max_len} tokens exceed the context ({max_context_len})")


@dataclass(frozen=True)
class HandOff(EngineRequest):
    """A request for the prompt and one token per choice; another worker continues the choices."""
