"""A step's plan, run: the model on the tensors of a batch, then the sampler. A sequence's fault fails that one only."""

import logging
from collections.abc import Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from engine.decode_rows import DecodeRows, Ints
from engine.kv_cache import KVCache
from engine.model.batch import Batch, Model
from engine.sampler import Draw, likeliest, sample
from engine.sequence import Sequence
from kernels.backend import KVPages
from wire import errors
from wire.errors import BatonError, NoNumber
from wire.ids import PageId
from wire.sampling import Logprobs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunk:
    """The next `num_tokens` known tokens of a sequence; they have pages, and no KV yet.

    num_samples: so many of its last rows are sampled, for the tokens that follow them.
    """

    sequence: Sequence
    num_tokens: int
    num_samples: int

    @classmethod
    def of(cls, sequence: Sequence, num_tokens: int) -> "Chunk":
        """Makes a chunk that brings the next token if it ends with the last known one."""
        return cls(sequence, num_tokens, int(sequence.num_computed + num_tokens == sequence.num_known))

    @property
    def context_len(self) -> int:
        return self.sequence.num_computed + self.num_tokens


@dataclass(frozen=True)
class Work:
    """The work of one step: a token of each of these decoding rows, and chunks, the ones of one token first."""

    rows: slice
    chunks: Seq[Chunk] = ()

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True)
class Gains:
    """The outcome of a run. Samples are the decoding rows, then the sampled rows of each chunk.

    token_ids: int64 [samples], -1 where the sequence failed. logprobs: by sample, where they are asked for.
    """

    token_ids: Ints
    logprobs: dict[int, Logprobs]
    failed: dict[Sequence, BatonError]

    def without(self, samples: Container[int]) -> "Gains":
        """Leaves samples out."""
        kept = [sample for sample in range(len(self.token_ids)) if sample not in samples]
        logprobs = {place: self.logprobs[one] for place, one in enumerate(kept) if one in self.logprobs}
        return Gains(self.token_ids[kept], logprobs, self.failed)

    def followed_by(self, later: "Gains") -> "Gains":
        """Joins the gains of two runs."""
        num = len(self.token_ids)
        logprobs = self.logprobs | {num + sample: one for sample, one in later.logprobs.items()}
        return Gains(np.concatenate([self.token_ids, later.token_ids]), logprobs, self.failed | later.failed)


NO_ROWS = slice(0, 0)


class Runner:
    """A model, the KV that it reads and writes, its decoding rows, and the sampler behind it."""

    def __init__(self, model: Model, kv: KVPages, cache: KVCache, rows: DecodeRows) -> None:
        self._model = model
        self._kv = kv
        self._cache = cache
        self._rows = rows
        self._views: Batch | None = None
        self._views_key = (0, 0, 0, 0)

    def run(self, work: Work) -> Gains:
        """Runs the work of a step and samples.

        A run that fails is repeated sequence by sequence, so that it fails for the faulty ones only: to compute KV once
        more does no harm. Raises if all of them fail, and a probe of one token too: then the fault is the model's.
        """
        try:
            return self._run(work)
        except Exception as failure:  # of whatever kind a model, or what it runs on, may raise
            alone = [self._run_alone(one) for one in _split(work)]
            if all(gains.failed for gains in alone) and not self._is_sound():
                raise
            log.warning("a step failed, and was done for each sequence alone: %r", failure)
            return reduce(Gains.followed_by, alone)

    @torch.inference_mode()
    def _run(self, work: Work) -> Gains:
        logits = self._model.forward(self._batch(work), self._kv)
        token_ids, logprobs = self._sample(logits, self._careful_draws(work))
        if token_ids.min(initial=0) >= 0:
            return Gains(token_ids, logprobs, {})
        sampled = self._sampled(work)
        return Gains(token_ids, logprobs, {sampled[one]: _no_number() for one in np.flatnonzero(token_ids < 0)})

    def _run_alone(self, work: Work) -> Gains:
        """Runs the work of one sequence."""
        try:
            return self._run(work)
        except Exception as failure:  # as above
            sequence = work.chunks[0].sequence if work.chunks else self._rows.sequences[work.rows.start]
            error = errors.report(failure, request_id=sequence.request.request_id)
            return Gains(np.full(len(self._sampled(work)), -1), {}, {sequence: error})

    def _sampled(self, work: Work) -> list[Sequence]:
        chunks = [chunk.sequence for chunk in work.chunks for _ in range(chunk.num_samples)]
        return [*self._rows.sequences[work.rows], *chunks]

    def _careful_draws(self, work: Work) -> dict[int, Draw]:
        """Tells how to choose the samples of which the likeliest token is not the whole answer."""
        careful = (~self._rows.is_plain[work.rows]).nonzero()[0].tolist()
        draws: dict[int, Draw] = {row: self._rows.sequences[work.rows.start + row].draw() for row in careful}
        ahead = [(chunk, num) for chunk in work.chunks for num in reversed(range(chunk.num_samples))]
        of_chunks = [chunk.sequence.draw(num) for chunk, num in ahead]
        return draws | {work.num_rows + index: draw for index, draw in enumerate(of_chunks) if not draw.is_plain}

    def _sample(self, logits: torch.Tensor, careful: dict[int, Draw]) -> tuple[Ints, dict[int, Logprobs]]:
        if not careful:
            return likeliest(logits).numpy(), {}
        places, draws = [*careful], [*careful.values()]
        if len(places) == len(logits):
            token_ids, drawn = np.empty(len(places), dtype=np.int64), sample(logits, draws)
        else:
            token_ids, drawn = likeliest(logits).numpy(), sample(logits[places], draws)
        token_ids[places] = [-1 if one.token_id is None else one.token_id for one in drawn]
        logprobs = {place: one.logprobs for place, one in zip(places, drawn, strict=True) if one.logprobs is not None}
        return token_ids, logprobs

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

    def _batch(self, work: Work) -> Batch:
        """Makes the batch; on a CPU keeps it while the same rows run alone: its views change in place with them."""
        if work.chunks or self._model.device.type != "cpu":
            return self._make_batch(work)
        width, num_reserved = self._num_blocks(work.rows), len(self._rows.token_ids)
        key = (work.rows.start, work.rows.stop, width, num_reserved)
        if key != self._views_key:
            self._views_key, self._views = key, self._make_batch(work)
        assert self._views is not None
        return self._views

    def _make_batch(self, work: Work) -> Batch:
        """Puts the slices of the decoding rows first, and the chunks behind them."""
        rows, chunks, num_rows = self._rows, work.chunks, work.num_rows
        block_size = self._model.layout.block_size
        spans = [(chunk.sequence, chunk.sequence.num_computed, chunk.context_len) for chunk in chunks]
        known = [one.tokens(start, end - start) for one, start, end in spans]
        slots = [one.pages.slots(start, end, block_size) for one, start, end in spans]
        ends = [*accumulate((chunk.num_tokens for chunk in chunks), initial=num_rows)][1:]
        samples = [range(end - chunk.num_samples, end) for end, chunk in zip(ends, chunks, strict=True)]
        return Batch(
            token_ids=self._join(rows.token_ids[work.rows], known),
            positions=self._join(rows.positions[work.rows], [range(start, end) for _, start, end in spans]),
            slot_mapping=self._join(rows.slots[work.rows], slots),
            block_tables=self._tables(work),
            context_lens=self._join(rows.context_lens[work.rows], [[end] for _, _, end in spans]),
            cu_query_lens=self._join(np.arange(num_rows + 1, dtype=np.int32), [[end] for end in ends]),
            num_decodes=num_rows + sum(chunk.num_tokens == 1 for chunk in chunks),
            sample_rows=self._join(np.arange(num_rows), samples),
        )

    def _tables(self, work: Work) -> torch.Tensor:
        of_chunks = [chunk.sequence.pages.row for chunk in work.chunks]
        width = max(self._num_blocks(work.rows), *map(len, of_chunks), 0)
        tables = self._rows.tables[work.rows, :width]
        if of_chunks:
            tables = np.concatenate([tables, np.zeros((len(of_chunks), width), dtype=np.int32)])
            for table, row in zip(tables[work.num_rows :], of_chunks, strict=True):
                table[: len(row)] = row
        return self._on_device(tables)

    def _num_blocks(self, rows: slice) -> int:
        """Counts the blocks of the longest of these rows."""
        longest = int(self._rows.context_lens[rows].max(initial=0))
        return -(-longest // self._model.layout.block_size)

    def _join(self, decodes: Ints, chunks: Seq[npt.ArrayLike]) -> torch.Tensor:
        """Appends the values of chunks, if there are any: else the model reads the rows themselves."""
        if not chunks:
            return self._on_device(decodes)
        # A list without values would be of floats.
        return self._on_device(np.concatenate([decodes, *chunks], dtype=decodes.dtype, casting="unsafe"))

    def _on_device(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(self._model.device, non_blocking=True)

    def _int32(self, values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=self._model.device)


def _split(work: Work) -> list[Work]:
    rows = [Work(slice(row, row + 1)) for row in range(work.rows.start, work.rows.stop)]
    return [*rows, *(Work(NO_ROWS, (chunk,)) for chunk in work.chunks)]


def _no_number() -> BatonError:
    return NoNumber("the model's output is not a number")
