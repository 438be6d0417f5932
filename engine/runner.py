"""A step's plan, run: the model on the tensors of a batch, then the sampler. A sequence's fault fails that one only."""

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from engine.kv_cache import KVCache
from engine.model.batch import Batch, Model
from engine.sampler import Draw, Drawn, sample
from engine.sequence import Sequence
from wire import incident
from wire.errors import BatonError
from wire.ids import PageId

log = logging.getLogger(__name__)

Gain = Drawn | BatonError | None
"""Of a chunk: its sequence's next token, or why there is none; None if the last known token is not reached yet."""


@dataclass(frozen=True)
class Chunk:
    """The next `num_tokens` known tokens of a sequence; they have pages, and no KV yet."""

    sequence: Sequence
    num_tokens: int

    @property
    def context_len(self) -> int:
        return self.sequence.num_computed + self.num_tokens

    @property
    def samples(self) -> bool:
        """True if the chunk ends with the last known token: the next one can then be sampled."""
        return self.context_len == self.sequence.num_known


class Runner:
    """A model, the KV that it reads and writes, and the sampler behind it."""

    def __init__(self, model: Model, kv: torch.Tensor, cache: KVCache) -> None:
        self._model = model
        self._kv = kv
        self._cache = cache

    def run(self, chunks: Seq[Chunk]) -> list[Gain]:
        """Runs the chunks, ordered with one-token chunks first, and returns the gain of each.

        A run that fails is repeated chunk by chunk, so that it fails for the faulty ones only: to compute KV once more
        does no harm. Raises if all of them fail, and a probe of one token too: then the fault is the model's.
        """
        try:
            return self._run(chunks)
        except Exception as failure:  # of whatever kind a model, or what it runs on, may raise
            gains = [self._run_alone(chunk) for chunk in chunks]
            if all(isinstance(gain, BatonError) for gain in gains) and not self._is_sound():
                raise
            log.warning("a step failed, and was done for each sequence alone: %r", failure)
            return gains

    @torch.inference_mode()
    def _run(self, chunks: Seq[Chunk]) -> list[Gain]:
        logits = self._model.forward(self._batch(chunks), self._kv)
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
        """Probes the model with one token; without a free page it counts as unsound."""
        with self._cache.borrowed_page() as page:
            try:
                return page is not None and bool(self._model.forward(self._probe(page), self._kv).numel())
            except Exception:  # as above
                return False

    def _probe(self, page: PageId) -> Batch:
        zero = torch.zeros(1, dtype=torch.int64, device=self._model.device)
        slot = zero + page * self._model.layout.block_size
        return Batch(zero, zero, slot, self._int32([page]).unsqueeze(0), self._int32([1]), self._int32([0, 1]), 1, zero)

    def _batch(self, chunks: Seq[Chunk]) -> Batch:
        ends = list(accumulate(chunk.num_tokens for chunk in chunks))
        block_size = self._model.layout.block_size
        spans = [(chunk.sequence, chunk.sequence.num_computed, chunk.context_len) for chunk in chunks]
        return Batch(
            token_ids=self._int64([token for one, start, end in spans for token in one.tokens(start, end - start)]),
            positions=self._int64(np.concatenate([np.arange(start, end) for _, start, end in spans])),
            slot_mapping=self._int64(
                np.concatenate([one.pages.slots(start, end, block_size) for one, start, end in spans])
            ),
            block_tables=self._tables(chunks),
            context_lens=self._int32([end for _, _, end in spans]),
            cu_query_lens=self._int32([0, *ends]),
            num_decodes=sum(chunk.num_tokens == 1 for chunk in chunks),
            sample_rows=self._int64([end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]),
        )

    def _tables(self, chunks: Seq[Chunk]) -> torch.Tensor:
        rows = [chunk.sequence.pages.row for chunk in chunks]
        tables = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
        for table, row in zip(tables, rows, strict=True):
            table[: len(row)] = row
        return torch.from_numpy(tables).to(self._model.device)

    def _int64(self, values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._model.device)

    def _int32(self, values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=self._model.device)


def _draw(sequence: Sequence, model: Model) -> Draw:
    request = sequence.request
    return Draw(request.sampling, sequence.choice, request.prompt_ids, sequence.output_ids, sequence.banned_ids(model))


def _checked(drawn: Drawn) -> Drawn | BatonError:
    return BatonError("the model's output is not a number") if drawn.token_id is None else drawn
