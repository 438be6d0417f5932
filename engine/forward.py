"""What is planned for a step, run: the model, then the sampler. What fails for one sequence fails for it alone."""

import logging
from collections.abc import Sequence as Seq

import torch

from engine.kv_cache import KVCache
from engine.model.batch import Batch, Model
from engine.runner import Chunk, Runner
from engine.sampler import Draw, Drawn, sample
from engine.sequence import Sequence
from engine.stop import may_not_come_yet
from wire import incident
from wire.errors import BatonError
from wire.ids import PageId

log = logging.getLogger(__name__)

Gain = Drawn | BatonError | None
"""Of a chunk: its sequence's next token, or why there is none; None if the last known token is not reached yet."""


class Forward:
    """A model with the sampler behind it."""

    def __init__(self, model: Model, kv: torch.Tensor, cache: KVCache) -> None:
        self._model = model
        self._kv = kv
        self._cache = cache
        self._runner = Runner(model, kv)

    def run(self, chunks: Seq[Chunk]) -> list[Gain]:
        """What each chunk gained; chunks of one token must come first.

        If the run fails, each chunk is run alone, to find out whom it failed for: to compute KV once more does no harm.
        Raises if it fails for all of them and for a token that is nobody's too: then it is not theirs.
        """
        try:
            return self._run(chunks)
        except Exception as failure:  # of whatever kind a model, or what it runs on, may raise
            gains = [self._run_alone(chunk) for chunk in chunks]
            if all(isinstance(gain, BatonError) for gain in gains) and not self._is_sound():
                raise
            log.warning("a step failed, and was done for each sequence alone: %r", failure)
            return gains

    def _run(self, chunks: Seq[Chunk]) -> list[Gain]:
        logits = self._runner.run(chunks)
        draws = [_draw(chunk.sequence, self._model) for chunk in chunks if chunk.samples]
        drawn = iter(sample(logits, draws) if draws else ())
        return [_checked(next(drawn)) if chunk.samples else None for chunk in chunks]

    def _run_alone(self, chunk: Chunk) -> Gain:
        try:
            [gain] = self._run([chunk])
        except Exception as failure:  # as above
            return incident.report(failure, request_id=chunk.sequence.request.request_id)
        return gain

    def _is_sound(self) -> bool:
        """Whether the model runs at all; if no page is left to try that with, it may not."""
        with self._cache.borrowed_page() as page:
            try:
                return page is not None and bool(self._model.forward(self._probe(page), self._kv).numel())
            except Exception:  # as above
                return False

    def _probe(self, page: PageId) -> Batch:
        """One token, at the start of a page."""

        def int32(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self._model.device)

        zero = torch.zeros(1, dtype=torch.int64, device=self._model.device)
        slot = zero + page * self._model.layout.block_size
        return Batch(zero, zero, slot, int32([page]).unsqueeze(0), int32([1]), int32([0, 1]), 1, zero)


def _draw(sequence: Sequence, model: Model) -> Draw:
    request = sequence.request
    banned = may_not_come_yet(sequence, model)
    return Draw(request.sampling, sequence.choice, request.prompt_ids, sequence.output_ids, banned)


def _checked(drawn: Drawn) -> Drawn | BatonError:
    return BatonError("the model's output is not a number") if drawn.token_id is None else drawn
