"""Controls of the choice of tokens that stay: what is gained over them is due to the weights."""

import torch

from engine.kv.dropping import Chooser, going, replaceable, with_latest
from wire.kv_policy import Rule


class Latest(Chooser):
    """A choice of the latest tokens."""

    def tokens(self, attention: torch.Tensor, num_kept: int, rule: Rule) -> torch.Tensor:
        return torch.arange(attention.shape[-1] - num_kept, attention.shape[-1], device=attention.device).expand(
            *attention.shape[:2], -1
        )

    def pages(self, attention: torch.Tensor, num_going: int, num_computed: int) -> list[int]:
        return [*range(num_going)]


class Drawn(Chooser):
    """A draw in place of weights, from a seed and the number of tokens."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def tokens(self, attention: torch.Tensor, num_kept: int, rule: Rule) -> torch.Tensor:
        num_latest, num_tokens = rule.num_latest(num_kept), attention.shape[-1]
        drawn = torch.rand(*attention.shape[:2], num_tokens - num_latest, generator=self._generator(num_tokens))
        return with_latest(drawn.argsort(-1).to(attention.device), num_kept, num_latest)

    def pages(self, attention: torch.Tensor, num_going: int, num_computed: int) -> list[int]:
        span = replaceable(len(attention), num_going)
        return going(torch.randperm(span.stop - span.start, generator=self._generator(num_computed)), num_going)

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed << 32 | number)
