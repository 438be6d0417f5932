"""The run of a step's plan: the model on its batch, then the sampler. A faulty sequence fails alone."""

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from engine.grammar.masks import Masker
from engine.kv.dropping import HEAVIEST, Chooser
from engine.kv.retention import Weighed
from engine.model.batch import Batch, CausalModel, Watched
from engine.model.sampler import (
    NO_MASKS,
    PLAIN,
    Chosen,
    Draw,
    Masks,
    Reading,
    choose,
    likeliest,
    logprobs_of,
    select,
)
from engine.pages.cache import KVCache
from engine.sequence import Sequence
from engine.step.decode_rows import DecodeRows
from engine.step.step_shape import StepShape
from engine.step.work import NO_ROWS, Drafts, Gains, Ints, Work
from kernels.backend import KVPages
from wire import errors
from wire.errors import BatonError, NonFiniteLogits
from wire.ids import PageId

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launched:
    """A step under way: its tokens on the device, and their copy to the host, which ends with the prompts' scores."""

    shape: StepShape
    chosen: Chosen
    reading: Reading


@dataclass(frozen=True)
class Ahead:
    """A forward pass of decoding rows that was launched before the last step was read.

    sequences: the sequence of each row of logits.
    """

    sequences: Seq[Sequence]
    logits: torch.Tensor

    def has(self, sequences: Seq[Sequence]) -> bool:
        return {*sequences} <= {*self.sequences}

    def of(self, sequences: Seq[Sequence]) -> torch.Tensor:
        """Picks the logits of the sequences that still decode, in the order of their rows now."""
        if sequences == self.sequences[: len(sequences)]:
            return self.logits[: len(sequences)]
        places = {one: place for place, one in enumerate(self.sequences)}
        return select(self.logits, [places[one] for one in sequences])


class Runner:
    """A model, the KV that it reads and writes, its decoding rows, and the sampler behind it."""

    def __init__(
        self, model: CausalModel, kv: KVPages, cache: KVCache, rows: DecodeRows, chooser: Chooser = HEAVIEST
    ) -> None:
        self._model = model
        self._kv = kv
        self._cache = cache
        self._rows = rows
        self._chooser = chooser
        self._masker = Masker(model.vocab_size)
        self._views: Batch | None = None
        self._views_key = (0, 0, 0, 0)
        self._ahead: Ahead | None = None
        self.launches_ahead = model.device.type != "cpu"
        """Whether `launch_ahead` gains time: a CPU has none to spare while a step is read."""

    @property
    def has_launched_ahead(self) -> bool:
        """Whether the forward pass of the decoding rows' next tokens is launched already."""
        return self._ahead is not None

    def launch(self, work: Work) -> Launched | Exception:
        """Begins the forward pass of a step and the choice of its tokens, without waiting for a GPU.

        Returns what `read` takes, or the failure. Call both in torch's inference mode.
        """
        try:
            return self._launch(self._shape(work))
        except Exception as failure:  # of whatever kind a model, or what it runs on, may raise
            return failure

    def read(self, work: Work, launched: Launched | Exception) -> Gains:
        """Waits for the tokens of a launched step.

        A failed step is repeated sequence by sequence, so that faulty sequences fail alone; KV may be computed twice.
        Raises the model's error if all sequences fail, and a probe of one token too.
        """
        try:
            if isinstance(launched, Exception):
                raise launched
            return self._gains(launched)
        except Exception as failure:  # as above
            self._wait()
            self._ahead = None  # its tokens are the failed step's
            alone = [self._run_alone(one) for one in _split(work)]
            if all(gains.failed for gains in alone) and not self._is_sound():
                raise
            log.warning("a step failed, and was done for each sequence alone: %r", failure)
            return reduce(Gains.followed_by, alone)

    def launch_ahead(self, launched: Launched, full: Seq[int], pages: Seq[PageId]) -> None:
        """Begins the forward pass after a launched step of all rows, one token each, without reading its tokens.

        The next step takes it, without rows that have left by then, unless the launched step fails. full: rows whose
        token after the next begins a further page. pages: these pages.
        """
        token_ids = launched.chosen.token_ids.clamp(min=0)  # the row of a fault runs in vain
        batch = self._rows.after(len(token_ids), token_ids, full, pages)
        try:
            self._ahead = Ahead([*self._rows.sequences], self._model.forward(batch, self._kv))
        except Exception as failure:  # of whatever kind a model, or what it runs on, may raise
            log.warning("a step was not launched ahead: %r", failure)

    def _shape(self, work: Work) -> StepShape:
        return StepShape.of(work, self._rows.sequences[work.rows])

    def _launch(self, shape: StepShape) -> Launched:
        """Launches the model, and computes grammars' masks while it runs; no other thread may use their matchers
        meanwhile.
        """
        draws = shape.careful_draws(self._rows.is_plain[shape.work.rows])
        masks = self._masker.begin(draws) if any(draw.matcher for draw in draws.values()) else None
        try:
            logits = self._forward(shape)
        finally:
            found = masks() if masks else NO_MASKS
        scores = [one.score(logits) for one in shape.scored]
        if (rows := shape.rows_of_samples) is not None:
            logits = select(logits, rows)
        chosen = _choose(logits, draws, found)
        return Launched(shape, chosen, Reading([chosen.token_ids, *[one.numbers for one in chosen.scores], *scores]))

    def _forward(self, shape: StepShape) -> torch.Tensor:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not (shape.chunks or shape.work.drafts) and ahead.has(shape.sequences):
            return ahead.of(shape.sequences)
        return self._model.forward(self._batch(shape), self._kv)

    def _gains(self, launched: Launched) -> Gains:
        shape, chosen, (token_ids, *parts) = launched.shape, launched.chosen, launched.reading.wait()
        gained = token_ids.long().numpy()
        if chosen.faults:
            gained[[*chosen.faults]] = -1
        found = [zip(one.rows, logprobs_of(part), strict=True) for one, part in zip(chosen.scores, parts, strict=False)]
        gains = Gains(sequences=shape.sequences, token_ids=gained, logprobs=dict(chain.from_iterable(found)))
        faults = {gains.sequences[row]: fault for row, fault in chosen.faults.items()}
        if shape.work.drafts:
            gains = self._accept(shape.work.drafts, gains)
        faulty = [gains.sequences[one] for one in np.flatnonzero(gains.token_ids < 0)]
        if scored := [one.chunk.sequence for one in shape.scored]:
            scores = dict(zip(scored, parts[len(found) :], strict=True))
            faulty += [one for one, part in scores.items() if not torch.isfinite(part[:, 0]).all()]
            gains = replace(gains, scores={one: tuple(logprobs_of(part)) for one, part in scores.items()})
        return replace(gains, failed={one: faults.get(one, _non_finite()) for one in faulty}) if faulty else gains

    def _accept(self, drafts: Drafts, gains: Gains) -> Gains:
        """Leaves out tokens that were drawn after a wrong guess."""
        num_rows, num_tokens, drawn = len(drafts.lengths), len(drafts.token_ids), gains.token_ids.tolist()
        end_ids = [sequence.ending.ids for sequence in self._rows.sequences[:num_rows]]
        kept = drafts.true_places(drawn, end_ids)
        num_gained = np.bincount(drafts.rows[kept], minlength=num_rows)
        return gains.keeping([*kept, *range(num_tokens, len(drawn))], num_gained)

    def _run_alone(self, work: Work) -> Gains:
        """Runs the work of one sequence."""
        shape = self._shape(work)
        try:
            return self._gains(self._launch(shape))
        except Exception as failure:  # as above
            self._wait()
            sequence = work.chunks[0].sequence if work.chunks else shape.sequences[0]
            error = errors.report(failure, attempt_id=sequence.request.attempt_id)
            return Gains(
                sequences=shape.sequences, token_ids=np.full(len(shape.sequences), -1), failed={sequence: error}
            )

    def _wait(self) -> None:
        """Waits for the rest of a failed pass: its copies may still read the rows, which change next."""
        if self._model.device.type != "cpu":
            with suppress(RuntimeError):  # the failure itself
                torch.accelerator.synchronize(self._model.device)

    @torch.inference_mode()
    def drop(self, sequence: Sequence) -> None:
        """Drops tokens of a sequence at its boundary."""
        kv = sequence.kv
        assert isinstance(kv, Weighed)
        assert kv.watch is not None, "nothing to drop"
        attention = kv.watch.weigh(self._model, self._kv, self._int32(kv.table.row), sequence.num_stored)
        chosen = kv.choose(kv.watch, attention, self._chooser)
        if isinstance(chosen, torch.Tensor):
            self._cache.keep_tokens(sequence, chosen)
        else:
            self._cache.allocator.drop(sequence, chosen)

    def _is_sound(self) -> bool:
        """Probes the model with one token; false without a free page."""
        with self._cache.allocator.borrowed_page() as page:
            try:
                return page is not None and bool(self._model.forward(self._probe(page), self._kv).numel())
            except Exception:  # as above
                return False

    def _probe(self, page: PageId) -> Batch:
        zero = torch.zeros(1, dtype=torch.int64)
        slot = zero + page * self._model.layout.block_size
        table, lens, starts = (torch.tensor(one, dtype=torch.int32) for one in ([[page]], [1], [0, 1]))
        return Batch(
            token_ids=zero,
            positions=zero,
            slot_mapping=slot,
            block_tables=table,
            context_lens=lens,
            cu_query_lens=starts,
            num_decodes=1,
            sample_rows=zero,
        )

    def _batch(self, shape: StepShape) -> Batch:
        """Makes the batch, and keeps it while the same rows run alone: its views change in place with them."""
        work = shape.work
        if work.chunks or work.drafts or self._rows.is_watched[work.rows].any():
            return self._make_batch(shape)
        width, num_reserved = self._num_blocks(work.rows), len(self._rows.token_ids)
        key = (work.rows.start, work.rows.stop, width, num_reserved)
        if key != self._views_key:
            self._views_key, self._views = key, self._make_batch(shape)
        assert self._views is not None
        return self._views

    def _make_batch(self, shape: StepShape) -> Batch:
        """Puts the decoding rows first, each with its guesses, then the chunks."""
        work, rows, block_size = shape.work, self._rows, self._model.layout.block_size
        chunks, drafts = work.chunks, work.drafts

        def column(values: Ints) -> Ints:
            return values[drafts.rows] + drafts.offsets if drafts else values[work.rows]

        spans = [(chunk.sequence, chunk.sequence.num_computed, chunk.context_len) for chunk in chunks]
        known = [one.tokens(start, end - start) for one, start, end in spans]
        slots = [one.kv.table.slots(start, end, block_size) for one, start, end in spans]
        context_lens = rows.context_lens[work.rows]
        if drafts:
            context_lens = context_lens + (drafts.lengths - 1).astype(np.int32)
        starts = shape.starts
        num_single = sum(chunk.is_decoding for chunk in chunks)
        return Batch(
            token_ids=self._join(drafts.token_ids if drafts else rows.token_ids[work.rows], known),
            positions=self._join(column(rows.positions), [range(start, end) for _, start, end in spans]),
            slot_mapping=self._join(column(rows.slots), slots),
            block_tables=self._tables(work),
            context_lens=self._join(context_lens, [[end - one.kv.table.num_dropped] for one, _, end in spans]),
            cu_query_lens=torch.from_numpy(starts.astype(np.int32)),
            num_decodes=int((drafts.lengths > 1).argmax()) if drafts else shape.num_decoding + num_single,
            sample_rows=self._join(np.arange(shape.num_decoding), [one.tokens_of_logits for one in shape.chunks]),
            num_scored=sum(len(chunk.scored) for chunk in chunks),
            watched=[*self._watched_rows(work, starts), *self._watched_chunks(shape)],
        )

    def _watched_rows(self, work: Work, starts: Ints) -> Iterator[Watched]:
        """Yields the decoding rows, and their guesses, that weigh the tokens of their sequence."""
        for row in self._rows.is_watched[work.rows].nonzero()[0].tolist():
            watch, position = self._rows.sequences[work.rows.start + row].kv.watch, self._rows.positions[work.rows][row]
            assert watch is not None
            yield from watch.rows(self._model, int(position), int(starts[row]), int(starts[row + 1]))

    def _watched_chunks(self, shape: StepShape) -> Iterator[Watched]:
        for one in shape.chunks:
            if (watch := one.chunk.sequence.kv.watch) is not None:
                yield from watch.rows(self._model, one.chunk.sequence.num_computed, one.start, one.end)

    def _tables(self, work: Work) -> torch.Tensor:
        of_chunks = [chunk.sequence.kv.table.row for chunk in work.chunks]
        width = max(self._num_blocks(work.rows), *map(len, of_chunks), 0)
        tables = self._rows.tables[work.rows, :width]
        if of_chunks:
            tables = np.concatenate([tables, np.zeros((len(of_chunks), width), dtype=np.int32)])
            for table, row in zip(tables[work.num_rows :], of_chunks, strict=True):
                table[: len(row)] = row
        return torch.from_numpy(tables)

    def _num_blocks(self, rows: slice) -> int:
        """Counts the blocks of the longest of these rows."""
        longest = int(self._rows.context_lens[rows].max(initial=0))
        return -(-longest // self._model.layout.block_size)

    def _join(self, decodes: Ints, chunks: Seq[npt.ArrayLike]) -> torch.Tensor:
        """Appends the values of chunks; without chunks returns the rows themselves."""
        if not chunks:
            return torch.from_numpy(decodes)
        # A list without values would be of floats.
        return torch.from_numpy(np.concatenate([decodes, *chunks], dtype=decodes.dtype, casting="unsafe"))

    def _int32(self, values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=self._model.device)


def _choose(logits: torch.Tensor, careful: dict[int, Draw], masks: Masks) -> Chosen:
    """Chooses the tokens of rows of logits. careful: the draws of rows that are not plain, by row."""
    if not careful:
        return Chosen(likeliest(logits))
    places, draws = [*careful], [*careful.values()]
    if len(places) == len(logits):
        return choose(logits, draws, masks)
    if logits.is_cpu:
        return choose(select(logits, places), draws, masks).among(likeliest(logits), places)
    return choose(logits, [careful.get(row, PLAIN) for row in range(len(logits))], masks.at(places))


def _split(work: Work) -> list[Work]:
    rows = [Work(slice(row, row + 1)) for row in range(work.rows.start, work.rows.stop)]
    return [*rows, *(Work(NO_ROWS, (chunk,)) for chunk in work.chunks)]


def _non_finite() -> BatonError:
    return NonFiniteLogits("the model's logits are not finite")
