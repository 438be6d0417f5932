"""Controls of the choice of tokens that stay: what is gained over them is due to the weights."""

import torch

from engine.kv.dropping import Chooser, going, replaceable, with_latest
from wire.kv_policy import Rule


class Latest(Chooser):
    """A choice of the latest tokens."""

    def tokens(self, mass: torch.Tensor, num_kept: int, rule: Rule) -> torch.Tensor:
        return torch.arange(mass.shape[-1] - num_kept, mass.shape[-1], device=mass.device).expand(*mass.shape[:2], -1)

    def pages(self, mass: torch.Tensor, num_going: int, num_computed: int) -> list[int]:
        return [*range(num_going)]


class Drawn(Chooser):
    """A draw in place of weights, from a seed and the number of tokens."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def tokens(self, mass: torch.Tensor, num_kept: int, rule: Rule) -> torch.Tensor:
        num_latest, num_tokens = rule.num_latest(num_kept), mass.shape[-1]
        drawn = torch.rand(*mass.shape[:2], num_tokens - num_latest, generator=self._generator(num_tokens))
        return with_latest(drawn.argsort(-1).to(mass.device), num_kept, num_latest)

    def pages(self, mass: torch.Tensor, num_going: int, num_computed: int) -> list[int]:
        span = replaceable(len(mass), num_going)
        return going(torch.randperm(span.stop - span.start, generator=self._generator(num_computed)), num_going)

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed << 32 | number)
