"""A request to an engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.model.matcher import Matcher
from kv_store.node.messages import KeepHint
from wire.block_names import BlockName, PublicPart
from wire.errors import InvalidRequest, Unsupported
from wire.ids import AttemptId, NamespaceRoot
from wire.kv_policy import Dropping
from wire.load.fairness import PLAIN, Precedence
from wire.sampling import SamplingParams


@dataclass(frozen=True)
class ChoiceSoFar:
    """A choice to continue: its index, 0 to n - 1, and its tokens so far.

    matcher: the grammar's state after these tokens, from `Grammars.prepare`; None without a response format.
    """

    index: int
    output_ids: tuple[int, ...] = ()
    matcher: Matcher | None = None


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """A prompt and its unfinished choices. peers: block ports of other nodes that may have its blocks, by address.

    computes_all: reads no cached KV. num_scored: tokens of the prompt before the next to score, at least 1, for the
    first has no score; 0 to score none. A score is a token's log-probabilities, for sampling.prompt_logprobs. public:
    the part of the prompt whose block names all tenants share. dropping: the policy by which the request drops KV, if
    any. hint: how long to keep its KV afterwards.
    precedence: its place in queues, where requests of one root are one tenant's.

    `HandOff`, a subclass, asks for one token per choice: the engine then writes all blocks of the prompt, the tail
    included, and holds them for the request.
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
    precedence: Precedence = PLAIN

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def max_len(self) -> int:
        """Tokens of the prompt and of a choice at its longest."""
        return self.num_prompt + self.sampling.max_tokens

    def require_runnable(self, vocab_size: int, max_context_len: int) -> None:
        """Raises InvalidRequest if a model with this vocabulary and context cannot run the request."""
        if not self.prompt_ids or not self.choices:
            raise InvalidRequest("prompt", "must have a token and a choice to make")
        if not 0 <= min(self.prompt_ids) <= max(self.prompt_ids) < vocab_size:
            raise InvalidRequest("token_ids", f"must be from 0 to {vocab_size - 1}")
        if self.sampling.max_tokens < 1:
            raise InvalidRequest("max_tokens", "must be at least 1")
        if self.sampling.response_format is not None and not all(one.matcher for one in self.choices):
            raise Unsupported("response_format: this engine builds no grammars", param="response_format")
        if self.max_len > max_context_len:
            raise InvalidRequest("max_tokens", f"{self.max_len} tokens exceed the context ({max_context_len})")


@dataclass(frozen=True, kw_only=True)
class HandOff(EngineRequest):
    """A request for the prompt and one token per choice; another worker continues the choices.

    on_stored: takes the number of the prompt's first blocks that the store has, amid the prompt, on the copies' thread.
    """

    on_stored: Callable[[int], None] | None = None


@dataclass(frozen=True, kw_only=True)
class BlocksAhead:
    """Blocks of a prompt that an attempt will probably read here. peers: as in EngineRequest."""

    attempt_id: AttemptId
    names: Sequence[BlockName]
    peers: tuple[str, ...] = ()
