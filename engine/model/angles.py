"""Angles of a rotary embedding: a table of all positions, or, for an unbounded context, of their digits."""

from collections.abc import Sequence

import torch

from engine.checkpoint.rope import RopeConfig
from kernels.backend import Angles

ANGLES_AT_ONCE = 1 << 16
DIGIT = 1 << 10


def make_angles(ropes: Sequence[RopeConfig], head_dim: int, num_positions: int, device: torch.device) -> Angles:
    """Makes the angles of rotary embeddings for the first positions, with their columns side by side.

    Angles are float32 as in transformers; their cosines are computed in float64 and rounded, so that no bit depends on
    a position's place in the batch or on the number of threads.
    """
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * torch.cat(
        [one.frequencies(head_dim) for one in ropes]
    )
    parts = angles.split(ANGLES_AT_ONCE)
    factors = torch.cat([one.factors(head_dim) for one in ropes])
    cosines, sines = (
        torch.cat([(take(part.double()) * factors).float() for part in parts]) for take in (torch.cos, torch.sin)
    )
    return Angles(cosines.to(device), sines.to(device))


class FarAngles:
    """The angles of any position of a long context, and the angles that rotate rows back for sinks.

    A position is high * DIGIT + low, and its cosine and sine follow from its digits: a table of all positions
    would be larger than the pages. Angles and products are float64, for float32 has no second digit left far out; each
    product is rounded on its own, so that no bit depends on a batch.
    """

    def __init__(
        self, config: RopeConfig, head_dim: int, num_positions: int, last_near: int, device: torch.device
    ) -> None:
        """last_near: the position from which a query sees sinks that are farther away."""
        frequencies = config.frequencies(head_dim).double()
        low = torch.arange(DIGIT)[:, None] * frequencies
        high = torch.arange(0, num_positions + DIGIT, DIGIT)[:, None] * frequencies
        self._low, self._high = ((one.cos().to(device), one.sin().to(device)) for one in (low, high))
        self._last_near = last_near
        self._factors = config.factors(head_dim).to(device)

    def at(self, positions: torch.Tensor) -> Angles:
        """Makes the angles of positions int64 [T]."""
        turns = self._at((positions - self._last_near).clamp(min=0))
        own = self._at(positions, self._factors)
        return Angles(own.cosines, own.sines, turns)

    def write(self, positions: torch.Tensor, to: Angles) -> None:
        """Writes the angles of positions into the first rows of `to`."""
        found, num_rows = self.at(positions), len(positions)
        for source, target in ((found, to), (found.turns, to.turns)):
            if source is not None and target is not None:
                target.cosines[:num_rows] = source.cosines
                target.sines[:num_rows] = source.sines

    def _at(self, positions: torch.Tensor, factors: torch.Tensor | float = 1.0) -> Angles:
        high, low = positions // DIGIT, positions % DIGIT
        (cosine, sine), (other_cosine, other_sine) = (
            [table[digits] for table in tables] for tables, digits in ((self._high, high), (self._low, low))
        )
        cosines = cosine * other_cosine - sine * other_sine
        sines = sine * other_cosine + cosine * other_sine
        return Angles((cosines * factors).float(), (sines * factors).float())
