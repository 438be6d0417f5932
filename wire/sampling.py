"""How the next token is chosen: every setting with its default. Ranges are checked once, by the router's validator."""

from dataclasses import dataclass
from enum import Enum

GREEDY_BELOW = 1e-5
DEFAULT_MAX_TOKENS = 256
MAX_CHOICES = 16


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request. `max_tokens` counts output tokens per choice; `seed` keys all its random numbers."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    seed: int = 0
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Logprobs:
    """Log-probability of the chosen token and of the likeliest ones, from the model's own distribution."""

    chosen: float
    top: tuple[tuple[int, float], ...]
