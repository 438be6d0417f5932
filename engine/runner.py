"""Turns what is planned for a step into tensors, and runs the model on them."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.model.batch import Batch, Model
from engine.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """The next `num_tokens` known tokens of a sequence that has no KV for them yet, but pages to put it."""

    sequence: Sequence
    num_tokens: int

    @property
    def context_len(self) -> int:
        return self.sequence.num_computed + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether this chunk ends with the last known token, so that the next one can be chosen."""
        return self.context_len == self.sequence.num_known


class Runner:
    """A model and the KV it reads and writes."""

    def __init__(self, model: Model, kv: torch.Tensor) -> None:
        self._model = model
        self._kv = kv

    @torch.inference_mode()
    def run(self, chunks: Seq[Chunk]) -> torch.Tensor:
        """Computes the KV of all chunks; returns float32 logits [R, V], a row for each chunk that samples, in order.

        Chunks of one token must come first.
        """
        return self._model.forward(self._batch(chunks), self._kv)

    def _batch(self, chunks: Seq[Chunk]) -> Batch:
        ends = list(accumulate(chunk.num_tokens for chunk in chunks))
        positions = [range(chunk.sequence.num_computed, chunk.context_len) for chunk in chunks]
        tokens = [chunk.sequence.tokens(chunk.sequence.num_computed, chunk.num_tokens) for chunk in chunks]
        slots = [
            [chunk.sequence.slot(position) for position in run] for chunk, run in zip(chunks, positions, strict=True)
        ]
        return Batch(
            token_ids=self._flat(tokens),
            positions=self._flat(positions),
            slot_mapping=self._flat(slots),
            block_tables=self._tables(chunks),
            context_lens=self._int32([chunk.context_len for chunk in chunks]),
            cu_query_lens=self._int32([0, *ends]),
            num_decodes=sum(chunk.num_tokens == 1 for chunk in chunks),
            sample_rows=self._flat([[end - 1] for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]),
        )

    def _tables(self, chunks: Seq[Chunk]) -> torch.Tensor:
        width = max(len(chunk.sequence.pages) for chunk in chunks)
        return self._int32([[*chunk.sequence.pages, *[0] * (width - len(chunk.sequence.pages))] for chunk in chunks])

    def _flat(self, rows: Seq[Seq[int]]) -> torch.Tensor:
        values = [value for row in rows for value in row]
        return torch.tensor(values, dtype=torch.int64, device=self._model.device)

    def _int32(self, values: Seq[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._model.device)
