"""A step's plan, run: the model on the tensors of a batch, then the sampler. A sequence's fault fails that one only."""

import logging
from collections.abc import Callable, Container, Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from engine.decode_rows import DecodeRows, Ints
from engine.grammar.masks import Masker
from engine.kv.cache import KVCache
from engine.kv.dropping import HEAVIEST, Chooser
from engine.kv.retention import Weighed
from engine.model.batch import Batch, CausalModel, Watched
from engine.model.sampler import NO_MASKS, PLAIN, Draw, Masks, likeliest, sample, score, select
from engine.sequence import Sequence
from engine.work import NO_ROWS, Drafts, Gains, PromptChunk, Work
from kernels.backend import KVPages
from wire import errors
from wire.errors import BatonError, NonFiniteLogits
from wire.ids import PageId
from wire.sampling import Logprobs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launched:
    """A forward pass under way: its logits, or its failure, and the masks of the samples by grammars."""

    logits: torch.Tensor | Exception
    draws: dict[int, Draw]
    masks: Callable[[], Masks] | None


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

    def launch(self, work: Work) -> Launched:
        """Begins the forward pass of a step, and its masks; a GPU may be at it yet. Returns what `read` takes.

        Call both in torch's inference mode.
        """
        draws = self._careful_draws(work)
        masks = self._masker.begin(draws) if any(draw.matcher for draw in draws.values()) else None
        try:
            return Launched(self._model.forward(self._batch(work), self._kv), draws, masks)
        except Exception as failure:  # of whatever kind a model, or what it runs on, may raise
            return Launched(failure, draws, masks)

    def read(self, work: Work, launched: Launched) -> Gains:
        """Samples from a launched pass, and waits for it.

        A run that fails is repeated sequence by sequence, so that it fails for the faulty ones only: to compute KV once
        more does no harm. Raises if all of them fail, and a probe of one token too: then the fault is the model's.
        """
        try:
            return self._sampled_from(work, launched)
        except Exception as failure:  # as above
            self._wait()
            alone = [self._run_alone(one) for one in _split(work)]
            if all(gains.failed for gains in alone) and not self._is_sound():
                raise
            log.warning("a step failed, and was done for each sequence alone: %r", failure)
            return reduce(Gains.followed_by, alone)

    def _sampled_from(self, work: Work, launched: Launched) -> Gains:
        """Raises a failure of the launch."""
        masks, logits = launched.masks() if launched.masks else NO_MASKS, launched.logits
        if isinstance(logits, Exception):
            raise logits
        scores: dict[Sequence, tuple[Logprobs, ...] | None] = {}
        if any(chunk.scored for chunk in work.chunks):
            logits, scores = self._score(work, logits)
        if any(chunk.siblings for chunk in work.chunks):
            logits = select(logits, self._shared(work))
        sampled = self._sampled(work)
        gains = Gains(sampled, *self._sample(logits, launched.draws, masks))
        places = [*launched.draws]
        faults = {sampled[places[row]]: fault for row, fault in masks.faults.items()}
        if work.drafts:
            gains = self._accept(work.drafts, gains)
        if scores:
            gains = replace(gains, scores={one: found for one, found in scores.items() if found is not None})
        faulty = [sequence for sequence, found in scores.items() if found is None]
        if not faulty and gains.token_ids.min(initial=0) >= 0:
            return gains
        faulty += [gains.sequences[one] for one in np.flatnonzero(gains.token_ids < 0)]
        return replace(gains, failed={sequence: faults.get(sequence, _non_finite()) for sequence in faulty})

    def _score(
        self, work: Work, logits: torch.Tensor
    ) -> tuple[torch.Tensor, dict[Sequence, tuple[Logprobs, ...] | None]]:
        """Scores the prompts of chunks; returns the logits to sample from, and the scores, None where one is no number.

        ```
        rows of logits   ... decoding ... | chunk: scored, then sampled | chunk | ...
        ```
        """
        place = work.num_rows + len(work.drafts)
        kept, scores = [*range(place)], {}
        for chunk in work.chunks:
            scored, request = chunk.scored, chunk.sequence.request
            if scored:
                token_ids = request.prompt_ids[scored.start : scored.stop]
                rows = logits[place : place + len(scored)]
                scores[chunk.sequence] = score(rows, token_ids, request.sampling.prompt_logprobs or 0)
            place += len(scored) + chunk.is_sampled
            kept += [place - 1] * chunk.is_sampled
        return select(logits, kept), scores

    def _accept(self, drafts: Drafts, gains: Gains) -> Gains:
        """Leaves out tokens that were drawn after a wrong guess."""
        num_rows, num_tokens, drawn = len(drafts.lengths), len(drafts.token_ids), gains.token_ids.tolist()
        end_ids = [sequence.ending.ids for sequence in self._rows.sequences[:num_rows]]
        kept = drafts.true_places(drawn, end_ids)
        num_gained = np.bincount(drafts.rows[kept], minlength=num_rows)
        return gains.keeping([*kept, *range(num_tokens, len(drawn))], num_gained)

    def _run_alone(self, work: Work) -> Gains:
        """Runs the work of one sequence."""
        try:
            return self._sampled_from(work, self.launch(work))
        except Exception as failure:  # as above
            self._wait()
            sequence = work.chunks[0].sequence if work.chunks else self._rows.sequences[work.rows.start]
            error = errors.report(failure, attempt_id=sequence.request.attempt_id)
            sampled = self._sampled(work)
            return Gains(sampled, np.full(len(sampled), -1), failed={sequence: error})

    def _wait(self) -> None:
        """Waits for the rest of a failed pass: its copies may still read the rows, which change next."""
        if self._model.device.type != "cpu":
            with suppress(RuntimeError):  # the failure itself
                torch.accelerator.synchronize(self._model.device)

    def _shared(self, work: Work) -> list[int]:
        """Lists the row of logits of each sample: siblings share that of their chunk."""
        num_before = work.num_rows + len(work.drafts)
        numbers = [len(chunk.sampled) for chunk in work.chunks if chunk.is_sampled]
        return [*range(num_before), *(num_before + row for row, number in enumerate(numbers) for _ in range(number))]

    def _sampled(self, work: Work) -> list[Sequence]:
        rows = self._rows.sequences[work.rows]
        of_rows = [rows[row] for row in work.drafts.rows] if work.drafts else rows
        return [*of_rows, *(sequence for chunk in work.chunks for sequence in chunk.sampled)]

    def _careful_draws(self, work: Work) -> dict[int, Draw]:
        """Maps sample index to Draw for samples that are not plain greedy."""
        careful = (~self._rows.is_plain[work.rows]).nonzero()[0].tolist()
        if work.drafts:
            draws = dict(self._draft_draws(work.drafts, {*careful})) if careful else {}
        else:
            draws = {row: self._rows.sequences[work.rows.start + row].draw() for row in careful}
        of_chunks = [sequence.draw() for chunk in work.chunks for sequence in chunk.sampled]
        num_before = work.num_rows + len(work.drafts)
        return draws | {num_before + index: draw for index, draw in enumerate(of_chunks) if not draw.is_plain}

    def _draft_draws(self, drafts: Drafts, careful: Container[int]) -> Iterator[tuple[int, Draw]]:
        """Yields index and Draw after each guess of careful rows, as if all guesses up to it were right."""
        for place, (row, offset) in enumerate(zip(drafts.rows, drafts.offsets, strict=True)):
            if row in careful:
                yield place, self._rows.sequences[row].draw(drafts.token_ids[place + 1 - offset : place + 1].tolist())

    def _sample(self, logits: torch.Tensor, careful: dict[int, Draw], masks: Masks) -> tuple[Ints, dict[int, Logprobs]]:
        if not careful:
            return likeliest(logits).numpy(), {}
        places, draws = [*careful], [*careful.values()]
        if not logits.is_cpu and len(places) < len(logits):  # all rows are read at once
            masks, places = masks.at(places), [*range(len(logits))]
            draws = [careful.get(place, PLAIN) for place in places]
        if len(places) == len(logits):
            token_ids, drawn = np.empty(len(places), dtype=np.int64), sample(logits, draws, masks)
        else:
            token_ids, drawn = likeliest(logits).numpy(), sample(select(logits, places), draws, masks)
        token_ids[places] = [-1 if one.token_id is None else one.token_id for one in drawn]
        logprobs = {place: one.logprobs for place, one in zip(places, drawn, strict=True) if one.logprobs is not None}
        return token_ids, logprobs

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
            self._cache.drop_pages(sequence, chosen)

    def _is_sound(self) -> bool:
        """Probes the model with one token; without a free page it counts as unsound."""
        with self._cache.borrowed_page() as page:
            try:
                return page is not None and bool(self._model.forward(self._probe(page), self._kv).numel())
            except Exception:  # as above
                return False

    def _probe(self, page: PageId) -> Batch:
        zero = torch.zeros(1, dtype=torch.int64)
        slot = zero + page * self._model.layout.block_size
        table, lens, starts = (torch.tensor(one, dtype=torch.int32) for one in ([[page]], [1], [0, 1]))
        return Batch(zero, zero, slot, table, lens, starts, 1, zero)

    def _batch(self, work: Work) -> Batch:
        """Makes the batch, and keeps it while the same rows run alone: its views change in place with them."""
        if work.chunks or work.drafts or self._rows.is_watched[work.rows].any():
            return self._make_batch(work)
        width, num_reserved = self._num_blocks(work.rows), len(self._rows.token_ids)
        key = (work.rows.start, work.rows.stop, width, num_reserved)
        if key != self._views_key:
            self._views_key, self._views = key, self._make_batch(work)
        assert self._views is not None
        return self._views

    def _make_batch(self, work: Work) -> Batch:
        """Puts the decoding rows first, each with its guesses, and the chunks behind them."""
        rows, chunks, drafts, block_size = self._rows, work.chunks, work.drafts, self._model.layout.block_size

        def column(values: Ints) -> Ints:
            return values[drafts.rows] + drafts.offsets if drafts else values[work.rows]

        num_tokens = work.num_rows + len(drafts)
        spans = [(chunk.sequence, chunk.sequence.num_computed, chunk.context_len) for chunk in chunks]
        known = [one.tokens(start, end - start) for one, start, end in spans]
        slots = [one.kv.table.slots(start, end, block_size) for one, start, end in spans]
        ends = [*accumulate((chunk.num_tokens for chunk in chunks), initial=num_tokens)][1:]
        samples = [
            [*(end - chunk.context_len + position - 1 for position in chunk.scored), *[end - 1] * chunk.is_sampled]
            for end, chunk in zip(ends, chunks, strict=True)
        ]
        context_lens = rows.context_lens[work.rows]
        if drafts:
            context_lens = context_lens + (drafts.lengths - 1).astype(np.int32)
        starts = np.append(0, drafts.lengths.cumsum()) if drafts else np.arange(num_tokens + 1)
        num_single = sum(chunk.num_tokens == 1 for chunk in chunks)
        return Batch(
            token_ids=self._join(drafts.token_ids if drafts else rows.token_ids[work.rows], known),
            positions=self._join(column(rows.positions), [range(start, end) for _, start, end in spans]),
            slot_mapping=self._join(column(rows.slots), slots),
            block_tables=self._tables(work),
            context_lens=self._join(context_lens, [[end - one.kv.table.num_dropped] for one, _, end in spans]),
            cu_query_lens=self._join(starts.astype(np.int32), [[end] for end in ends]),
            num_decodes=int((drafts.lengths > 1).argmax()) if drafts else num_tokens + num_single,
            sample_rows=self._join(np.arange(num_tokens), samples),
            num_scored=sum(len(chunk.scored) for chunk in chunks),
            watched=[*self._watched_rows(work, starts), *self._watched_chunks(chunks, [num_tokens, *ends])],
        )

    def _watched_rows(self, work: Work, starts: Ints) -> Iterator[Watched]:
        """Yields the decoding rows, and their guesses, that weigh the tokens of their sequence."""
        for row in self._rows.is_watched[work.rows].nonzero()[0].tolist():
            watch, position = self._rows.sequences[work.rows.start + row].kv.watch, self._rows.positions[work.rows][row]
            assert watch is not None
            yield from watch.rows(self._model, int(position), int(starts[row]), int(starts[row + 1]))

    def _watched_chunks(self, chunks: Seq[PromptChunk], starts: Seq[int]) -> Iterator[Watched]:
        for chunk, start, end in zip(chunks, starts, starts[1:], strict=False):
            if (watch := chunk.sequence.kv.watch) is not None:
                yield from watch.rows(self._model, chunk.sequence.num_computed, start, end)

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
        """Appends the values of chunks, if there are any: else the model reads the rows themselves."""
        if not chunks:
            return torch.from_numpy(decodes)
        # A list without values would be of floats.
        return torch.from_numpy(np.concatenate([decodes, *chunks], dtype=decodes.dtype, casting="unsafe"))

    def _int32(self, values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=self._model.device)


def _split(work: Work) -> list[Work]:
    rows = [Work(slice(row, row + 1)) for row in range(work.rows.start, work.rows.stop)]
    return [*rows, *(Work(NO_ROWS, (chunk,)) for chunk in work.chunks)]


def _non_finite() -> BatonError:
    return NonFiniteLogits("the model's logits are not finite")
