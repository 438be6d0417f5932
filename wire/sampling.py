"""Settings of sampling, each with its default and its range."""

from dataclasses import dataclass
from enum import Enum

from wire.errors import require

GREEDY_BELOW = 1e-5
DEFAULT_MAX_TOKENS = 256
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_TOLD_PROMPT_LEN = 1 << 15
"""Bound on the tokens of a prompt that is echoed, or whose log-probabilities are returned."""
MAX_STOPS = 8
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 16
MAX_REPETITION_PENALTY = 10.0
MAX_BIASES = 300
MAX_BIAS = 100.0
MAX_FORMAT_BYTES = 64 << 10
"""Bound on a response format: a worker takes 0.3 s to build the worst of this size."""
_RANGES = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "n": (1, MAX_CHOICES),
}


class FormatKind(Enum):
    """The kind of a response format: a JSON schema, a regular expression, or a grammar of llguidance.

    The values are the names of the message's fields.
    """

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True)
class ResponseFormat:
    """A language that a whole answer must be in, from its first token to its end."""

    kind: FormatKind
    source: str

    def require_in_range(self, param: str = "response_format") -> None:
        """Raises InvalidRequest, for the request's field `param`, if the source is empty or too long."""
        num_bytes = len(self.source.encode(errors="replace"))
        require(0 < num_bytes <= MAX_FORMAT_BYTES, param, f"must be 1 to {MAX_FORMAT_BYTES} bytes")


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
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, and the number to add to the logit of each."""
    prompt_logprobs: int | None = None
    echo: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    response_format: ResponseFormat | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def require_in_range(self, vocab_size: int) -> None:
        """Raises InvalidRequest for a setting out of its range; the router and each worker check every request."""
        for param, (low, high) in _RANGES.items():
            value = getattr(self, param)
            require(value is None or low <= value <= high, param, f"must be from {low} to {high}")
        require(self.top_k >= -1, "top_k", "must be at least 1, or 0 or -1 for off")
        is_penalty = 0 < self.repetition_penalty <= MAX_REPETITION_PENALTY
        require(is_penalty, "repetition_penalty", f"must be above 0 and at most {MAX_REPETITION_PENALTY:g}")
        require(self.seed >= 0, "seed", "must not be negative")
        require(self.min_tokens >= 0, "min_tokens", "must not be negative")
        require(self.max_tokens >= 1, "max_tokens", "must be at least 1")
        require(len(self.stop) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} strings")
        fit = all(1 <= len(stop) <= MAX_STOP_CHARS for stop in self.stop)
        require(fit, "stop", f"must be from 1 to {MAX_STOP_CHARS} characters")
        require(len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
        known = all(token_id < vocab_size for token_id in self.stop_token_ids)
        require(known, "stop_token_ids", f"must be below the vocabulary's size, {vocab_size}")
        self._require_biases(vocab_size)
        if self.response_format is not None:
            self.response_format.require_in_range()
            require(not self.ignore_eos, "ignore_eos", "an answer in a response_format ends where the format does")

    def _require_biases(self, vocab_size: int) -> None:
        require(len(self.logit_bias) <= MAX_BIASES, "logit_bias", f"at most {MAX_BIASES} tokens")
        for token_id, bias in self.logit_bias:
            require(token_id < vocab_size, "logit_bias", f"ids must be below the vocabulary's size, {vocab_size}")
            require(-MAX_BIAS <= bias <= MAX_BIAS, "logit_bias", f"must be from {-MAX_BIAS:g} to {MAX_BIAS:g}")


DEFAULTS = SamplingParams()


class FinishReason(Enum):
    """The reason why a choice ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the chosen token and of the likeliest tokens, from the model's own distribution."""

    chosen: float
    top: tuple[tuple[int, float], ...]
