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

    def cut(self, num_tokens: int) -> tuple["ChoiceTokens", "ChoiceTokens"]:
        """Cuts behind so many tokens; the end is in the second part."""
        head = ChoiceTokens(self.choice, self.first_position, self.token_ids[:num_tokens], self.logprobs[:num_tokens])
        return head, self._replace(
            first_position=self.first_position + len(head.token_ids),
            token_ids=self.token_ids[num_tokens:],
            logprobs=self.logprobs[num_tokens:],
        )

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


class PromptScores(NamedTuple):
    """Log-probabilities of the prompt's tokens from the `first_position`-th on."""

    first_position: int
    logprobs: tuple[Logprobs, ...]

    def followed_by(self, later: "PromptScores | None") -> "PromptScores":
        """Joins log-probabilities that follow directly."""
        return self if later is None else self._replace(logprobs=self.logprobs + later.logprobs)


@dataclass(frozen=True)
class End:
    """The end of an attempt at this worker: with an error, or because all choices have ended or were handed over."""

    error: BatonError | None = None
    spans: tuple[Span, ...] = ()


class Update(NamedTuple):
    """News of an attempt.

    prompt: the prompt's tokens by the source of their KV, told once. num_held: blocks of the prompt that the store
    keeps for the attempt. releases_hold: the hold is over. end: in the last update. scores: of the prompt.
    """

    choices: tuple[ChoiceTokens, ...] = ()
    prompt: TierTokens | None = None
    num_held: int = 0
    releases_hold: bool = False
    end: End | None = None
    scores: PromptScores | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that it tells of, the prompt's included."""
        return sum(len(one.token_ids) for one in self.choices) + len(self.scores.logprobs if self.scores else ())

    def cut(self, num_tokens: int) -> tuple["Update", "Update"]:
        """Cuts an update behind so many tokens, the prompt's first; all but tokens goes to the second part."""
        head, rest = NOTHING_NEW, self
        if self.scores is not None:
            first, logprobs = self.scores
            head = Update(scores=PromptScores(first, logprobs[:num_tokens]))
            left = PromptScores(first + num_tokens, logprobs[num_tokens:]) if len(logprobs) > num_tokens else None
            rest, num_tokens = rest._replace(scores=left), max(0, num_tokens - len(logprobs))
        parts = []
        for one in self.choices:
            parts.append(one.cut(num_tokens))
            num_tokens -= len(parts[-1][0].token_ids)
        head = head._replace(choices=tuple(one for one, _ in parts if one.token_ids))
        return head, rest._replace(choices=tuple(one for _, one in parts))

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
            self.scores.followed_by(later.scores) if self.scores else later.scores,
        )


NOTHING_NEW = Update()
