"""KV policies: what of its KV a sequence keeps.

    full            every token
    sinks=4+1020    the first 4 tokens and the latest 1,020; attention sinks, arXiv 2309.17453
    snapkv=25%      a quarter of the prompt's tokens, chosen once at its end; SnapKV, arXiv 2404.14469
    h2o=25%         as many tokens as a quarter of the prompt, the lightest page going first; H2O, arXiv 2306.14048

`snapkv=1024` and `h2o=1024` are budgets in tokens.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from wire.errors import ConfigError

_LEAST_BLOCKS = 3
_LEAST_TOKENS = 128

_SINKS = re.compile(r"sinks=(\d{1,9})\+(\d{1,9})")
_DROPPING = re.compile(r"(snapkv|h2o)=(\d{1,9})(%?)")


class Rule(StrEnum):
    """The rule by which tokens of a prompt are dropped."""

    SNAPKV = "snapkv"
    H2O = "h2o"

    @property
    def num_watched(self) -> int:
        """Rows at the end of a prompt whose attention weighs its tokens. They are always run."""
        return 16 if self is Rule.SNAPKV else 64


@dataclass(frozen=True)
class Sinks:
    """The first `num_sinks` tokens and the latest `window` stay."""

    num_sinks: int
    window: int

    def __str__(self) -> str:
        return f"sinks={self.num_sinks}+{self.window}"


@dataclass(frozen=True)
class Dropping:
    """A budget for what is kept of a prompt: `amount` tokens, or percent of the prompt where `unit` is "%"."""

    rule: Rule
    amount: int
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.rule}={self.amount}{self.unit}"

    def num_kept(self, num_prompt: int, block_size: int) -> int:
        """Counts the tokens of a prompt that are kept: whole blocks, or the whole prompt where no block can go."""
        wanted = -(-num_prompt * self.amount // 100) if self.unit else self.amount
        kept = max(_LEAST_BLOCKS, -(-wanted // block_size)) * block_size
        return min(kept, num_prompt)


KVPolicy = Sinks | Dropping | None
"""None keeps everything."""


def parse_kv_policy(text: str, kv_dtype: str = "auto") -> KVPolicy:
    """Reads a policy as the module's docstring has them.

    Raises ConfigError for other texts, senseless numbers, and policies that a KV dtype is not served with.
    """
    if text == "full":
        return None
    if kv_dtype == "int4":
        raise ConfigError(f"kv_policy {text[:64]}: with kv_dtype int4 it must be full")
    if found := _SINKS.fullmatch(text):
        sinks = Sinks(int(found[1]), int(found[2]))
        if not sinks.num_sinks or sinks.window <= sinks.num_sinks:
            raise ConfigError(f"kv_policy {text}: wants a sink at least, and a window longer than the sinks")
        return sinks
    if found := _DROPPING.fullmatch(text):
        dropping = Dropping(Rule(found[1]), int(found[2]), found[3])
        least, most = (1, 99) if dropping.unit else (_LEAST_TOKENS, 1 << 30)
        if not least <= dropping.amount <= most:
            raise ConfigError(f"kv_policy {text}: a budget is 1 to 99 %, or at least {least} tokens")
        return dropping
    raise ConfigError(f"kv_policy {text[:64]!r}: known are full, sinks=4+1020, snapkv=25%, h2o=25% and other numbers")
