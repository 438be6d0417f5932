"""KV policies: rules that choose the tokens whose KV a sequence keeps.

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

POOLED = 7
"""Neighbours over which SnapKV takes a token's largest attention, as in its authors' settings for LongBench."""
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

    @property
    def names_kept(self) -> bool:
        """Whether blocks of kept tokens have names. With H2O they would lack the weights of their tokens."""
        return self is Rule.SNAPKV

    @property
    def num_pooled(self) -> int:
        """Neighbours whose largest weight counts as a token's; 1 counts its own alone."""
        return POOLED if self is Rule.SNAPKV else 1

    def num_latest(self, num_kept: int) -> int:
        """Counts the tokens at a prompt's end that stay at any weight: watched tokens, or half of the budget."""
        return min(self.num_watched, num_kept) if self is Rule.SNAPKV else num_kept // 2


@dataclass(frozen=True)
class Sinks:
    """A policy that keeps the first `num_sinks` tokens and the latest `window`."""

    num_sinks: int
    window: int

    def __str__(self) -> str:
        return f"sinks={self.num_sinks}+{self.window}"


@dataclass(frozen=True)
class Dropping:
    """A policy that keeps a budget of a prompt's tokens: `amount`, or that percentage if `unit` is "%"."""

    rule: Rule
    amount: int
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.rule}={self.amount}{self.unit}"

    @property
    def terms(self) -> str:
        """The policy and the other inputs of the choice, for the names of kept blocks."""
        return f"{self} by {self.rule.num_watched} rows, pooled over {self.rule.num_pooled}"

    def num_blocks(self, num_prompt: int, block_size: int) -> int:
        """Counts the blocks of the budget for a prompt."""
        wanted = -(-num_prompt * self.amount // 100) if self.unit else self.amount
        return max(_LEAST_BLOCKS, -(-wanted // block_size))

    def num_copied(self, num_prompt: int, block_size: int) -> int:
        """Counts the blocks that kept tokens of a prompt are copied to; 0 where the whole prompt stays."""
        num_blocks = self.num_blocks(num_prompt, block_size)
        return num_blocks if num_blocks * block_size < num_prompt else 0


KVPolicy = Sinks | Dropping | None
"""None keeps everything."""


def parse_kv_policy(text: str, kv_dtype: str = "auto") -> KVPolicy:
    """Reads a policy in the forms of the module's docstring.

    Raises ConfigError for other texts, senseless numbers, and policies that the KV dtype does not support.
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


def parse_dropping(text: str) -> Dropping | None:
    """Reads a policy; returns None unless it drops KV by attention. Raises ConfigError."""
    policy = parse_kv_policy(text)
    return policy if isinstance(policy, Dropping) else None
