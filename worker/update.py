"""What a worker has to tell the caller of a request."""

from dataclasses import dataclass

from engine.events import Emitted, Finished, TierTokens
from wire.sampling import FinishReason, Logprobs
from worker.stopwatch import Span


@dataclass(frozen=True)
class ChoiceTokens:
    """Tokens of one choice, the first being its `first_position`-th output token; and how it ended, if it did.

    logprobs: one for each token, or none at all.
    """

    index: int
    first_position: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    reason: FinishReason | None = None
    stop_token_id: int | None = None

    @classmethod
    def emitted(cls, event: Emitted) -> "ChoiceTokens":
        logprobs = () if event.logprobs is None else (event.logprobs,)
        return cls(event.choice, event.position, (event.token_id,), logprobs)

    @classmethod
    def finished(cls, event: Finished, num_output: int) -> "ChoiceTokens":
        return cls(event.choice, num_output, (), (), event.reason, event.stop_token_id)

    def followed_by(self, later: "ChoiceTokens") -> "ChoiceTokens":
        """Both as one; `later` goes on where this one ends."""
        return ChoiceTokens(
            self.index,
            self.first_position,
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            later.reason,
            later.stop_token_id,
        )


@dataclass(frozen=True)
class Update:
    """What is new about a request.

    prompt: where the prompt's KV came from, told once. num_held: blocks of the prompt that the store keeps for the
    request. spans: told once, at the end.
    """

    choices: tuple[ChoiceTokens, ...] = ()
    prompt: TierTokens | None = None
    num_held: int = 0
    spans: tuple[Span, ...] = ()

    def followed_by(self, later: "Update") -> "Update":
        """Both as one."""
        choices = {choice.index: choice for choice in self.choices}
        for choice in later.choices:
            earlier = choices.get(choice.index)
            choices[choice.index] = choice if earlier is None else earlier.followed_by(choice)
        return Update(
            tuple(choices.values()),
            self.prompt or later.prompt,
            self.num_held + later.num_held,
            self.spans + later.spans,
        )


NOTHING_NEW = Update()
