"""The masks of a step. Slow masks are computed while the model runs, on a thread and llguidance's own threads."""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.model.matcher import Matcher
from engine.model.sampler import Draw, Masks
from text.grammar import PARAM
from wire.errors import BatonError, InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

WORD_BITS = 32
MAX_HERE_S = 500e-6
"""Masks expected to take less are computed by the step itself: a thread begins in 20 us, on busy cores in a ms."""
Alone = list[tuple["LLMatcher", int]]
"""Matchers, and the rows of their masks."""


class Masker:
    """The masks of steps: computed by the step if the last step's were quick, else on a thread."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._draw_s = 0.0

    def begin(self, draws: Mapping[int, Draw]) -> Callable[[], Masks]:
        """Begins the masks of draws, by their place in the step. Draws with one matcher are adjacent.

        The first draw of a matcher follows the known tokens, the next draws one guess each. Returns a function that
        computes the masks or waits for them; call it once the model runs.
        """
        if self._draw_s * len(draws) <= MAX_HERE_S:
            return partial(self._compute, list(draws.values()), _fill)
        return self._thread.submit(self._compute, list(draws.values()), self._executor.unsafe_compute_mask_ptr).result

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "masks")

    @cached_property
    def _executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor()

    def _compute(self, draws: Seq[Draw], fill: "Callable[[Alone, int, int, int], None]") -> Masks:
        began_s = time.perf_counter()
        rows = [row for row, draw in enumerate(draws) if draw.matcher]
        masked = [draws[row] for row in rows]
        allowed, faults = self._allowed(masked, fill)
        self._draw_s = (time.perf_counter() - began_s) / len(draws)
        for place, draw in enumerate(masked):
            allowed[place, list(draw.banned)] = 0
        for place in np.flatnonzero(~allowed.any(axis=1)).tolist():
            faults.setdefault(place, InvalidRequest(PARAM, "no token may come next, for the end is before min_tokens"))
        forbidden = torch.from_numpy(allowed).logical_not_()
        return Masks(rows, forbidden, {rows[place]: fault for place, fault in faults.items()})

    def _allowed(
        self, draws: Seq[Draw], fill: "Callable[[Alone, int, int, int], None]"
    ) -> tuple["np.ndarray[tuple[int, int], np.dtype[np.bool_]]", dict[int, BatonError]]:
        """Returns the tokens that may come next, bool [draws, V], and the error of each draw without any, by place."""
        bits = np.full((len(draws), -(-self._vocab_size // WORD_BITS)), -1, dtype=np.int32)
        alone: Alone = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        firsts: dict[int, Matcher] = {}
        for matcher, group in groupby(range(len(draws)), lambda place: draws[place].matcher):
            assert matcher is not None
            first, *others = group
            firsts[first] = matcher
            known = draws[first].output_ids
            matcher.take(known)
            if others:
                drafted.append((matcher.state, first, [*draws[others[-1]].output_ids[len(known) :]]))
            else:
                alone.append((matcher.state, first))
        where = bits.ctypes.data, bits.shape[1] * bits.itemsize, len(bits)
        if alone:
            fill(alone, *where)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        faults = {place: fault for place, matcher in firsts.items() if (fault := matcher.fault)}
        return np.unpackbits(bits.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little").view(bool), faults


def _fill(alone: Alone, address: int, row_bytes: int, _: int) -> None:
    """Computes masks one after another, on this thread."""
    for matcher, row in alone:
        matcher.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
