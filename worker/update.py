"""An update about an attempt, from worker to router. A step makes one for each token: hence tuples, quick to make."""

from dataclasses import dataclass
from typing import NamedTuple

from engine.events import Finished, TierTokens
from wire.errors import BatonError
from wire.sampling import FinishReason, Logprobs
from worker.stopwatch import Span


class ChoiceTokens(NamedTuple):
    """Tokens of one choice, from its `first_position`-th output token on; and the reason of its end, if it ended.

    logprobs: of each token, or empty.
    """

    choice: int
    first_position: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    reason: FinishReason | None = None
    stop_token_id: int | None = None

    @classmethod
    def finished(cls, event: Finished, num_output: int) -> "ChoiceTokens":
        return cls(event.choice, num_output, (), (), event.reason, event.stop_token_id)

    def followed_by(self, later: "ChoiceTokens") -> "ChoiceTokens":
        """Joins tokens that follow directly."""
        return ChoiceTokens(
            self.choice,
            self.first_position,
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            later.reason,
            later.stop_token_id,
        )


@dataclass(frozen=True)
class End:
    """The end of an attempt at this worker: with an error, or because all choices have ended or were handed over."""

    error: BatonError | None = None
    spans: tuple[Span, ...] = ()


class Update(NamedTuple):
    """News of an attempt.

    prompt: the prompt's tokens by the source of their KV, told once. num_held: blocks of the prompt that the store
    keeps for the attempt. releases_hold: the hold is over. end: in the last update.
    """

    choices: tuple[ChoiceTokens, ...] = ()
    prompt: TierTokens | None = None
    num_held: int = 0
    releases_hold: bool = False
    end: End | None = None

    def followed_by(self, later: "Update") -> "Update":
        """Joins two updates of an attempt."""
        choices = {tokens.choice: tokens for tokens in self.choices}
        for tokens in later.choices:
            earlier = choices.get(tokens.choice)
            choices[tokens.choice] = tokens if earlier is None else earlier.followed_by(tokens)
        return Update(
            tuple(choices.values()),
            self.prompt or later.prompt,
            self.num_held + later.num_held,
            self.releases_hold or later.releases_hold,
            later.end,
        )


NOTHING_NEW = Update()
