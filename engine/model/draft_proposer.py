"""A draft model as a proposer: it runs ahead of the sequences of an engine, greedily, on smaller pages of its own.

    known tokens           a b c d e
    the draft has KV of    a b c, and of x y, guesses after c, of which it did not run the last: x came true, it is d
    it runs                e -> u, u -> v, v -> w    over the KV of y; its next guesses are u v w

All known tokens without KV run at once, as a rule one or two, and bring the first guess. A sequence's KV is computed
here from its tokens alone, and is neither found, fetched nor published. Losing it costs its computation.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import groupby, takewhile

import numpy as np
import torch

from engine.decode_rows import Ints
from engine.model.batch import Batch, Model
from engine.sampler import argmax
from engine.sequence import BlockTable, Sequence
from kv_store.device_pool import DevicePool
from kv_store.ledger import OutOfBlocks

MAX_CATCH_UP = 256
"""The most known tokens of all sequences together that one step computes."""
MAX_RECORDED = 16
"""The most known tokens of which all logits are computed: so many run as rows of a recorded program."""


@dataclass
class DraftKV:
    """KV of a sequence's first `num_computed` tokens, and of all `guesses` after them but the last."""

    pages: BlockTable = field(default_factory=BlockTable)
    num_computed: int = 0
    guesses: Seq[int] = ()

    def settle(self, sequence: Sequence) -> None:
        """Counts the guesses that came true; the last known token is left to run."""
        known = sequence.tokens(self.num_computed, len(self.guesses))
        pairs = zip(known, self.guesses[:-1], strict=False)
        num_true = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.num_computed = min(self.num_computed + num_true, sequence.num_known - 1)
        self.guesses = ()


class DraftProposer:
    """A Proposer that runs a smaller model with the vocabulary of the engine's."""

    def __init__(self, model: Model, num_pages: int) -> None:
        self.pool = DevicePool(model.layout, num_pages, model.device)
        self._model = model
        self._block_size = model.layout.block_size
        self._kv: dict[Sequence, DraftKV] = {}

    @torch.inference_mode()
    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int]]:
        """Guesses nothing for a sequence that is far behind, nor for one for which there are no pages."""
        spans = self._spans([sequence for sequence, num_guesses in wanted.items() if self._hold(sequence, num_guesses)])
        if not spans:
            return {}
        drawn = self._catch_up(spans)
        rows = {sequence: row for row, (sequence, span) in enumerate(spans.items()) if span.stop == sequence.num_known}
        ahead = sorted(rows, key=lambda sequence: -wanted[sequence])
        if ahead:
            self._run_ahead({one: wanted[one] for one in ahead}, drawn[[rows[one] for one in ahead]])
        return {sequence: self._kv[sequence].guesses for sequence in ahead}

    def forget(self, sequence: Sequence) -> None:
        if (kv := self._kv.pop(sequence, None)) is not None:
            for page in kv.pages[:]:
                self.pool.ledger.free(page)

    def _hold(self, sequence: Sequence, num_guesses: int) -> bool:
        """Brings a sequence's KV up to date, with pages for its next run; False if there are too few."""
        kv = self._kv.setdefault(sequence, DraftKV())
        kv.settle(sequence)
        num_blocks = -(-(sequence.num_known + num_guesses - 1) // self._block_size)
        try:
            kv.pages.extend(self.pool.ledger.allocate(max(0, num_blocks - len(kv.pages))))
        except OutOfBlocks:
            return False
        return True

    def _spans(self, sequences: Seq[Sequence]) -> dict[Sequence, range]:
        """Lists the known tokens without KV, as many as a step may compute; single ones come first."""
        room, spans = MAX_CATCH_UP, {}
        for sequence in sequences:
            start = self._kv[sequence].num_computed
            if span := range(start, min(sequence.num_known, start + room)):
                spans[sequence] = span
                room -= len(span)
        return dict(sorted(spans.items(), key=lambda item: len(item[1]) > 1))

    def _catch_up(self, spans: Mapping[Sequence, range]) -> torch.Tensor:
        """Computes spans of known tokens; returns the token after each span."""
        lengths = np.array([*map(len, spans.values())])
        ends = lengths.cumsum()
        runs_all = ends[-1] <= MAX_RECORDED
        batch = self._chunks(spans, ends, np.arange(ends[-1]) if runs_all else ends - 1)
        drawn = argmax(self._model.forward(batch, self.pool.kv))
        for sequence, span in spans.items():
            self._kv[sequence].num_computed = span.stop
        return drawn[self._on_device(ends - 1)] if runs_all else drawn

    def _chunks(self, spans: Mapping[Sequence, range], ends: Ints, sample_rows: Ints) -> Batch:
        """Makes a batch of spans of known tokens, each with its end in the batch."""
        held = [self._kv[sequence] for sequence in spans]
        token_ids = [sequence.tokens(span.start, len(span)) for sequence, span in spans.items()]
        slots = [
            kv.pages.slots(span.start, span.stop, self._block_size)
            for kv, span in zip(held, spans.values(), strict=True)
        ]
        return Batch(
            token_ids=self._on_device(np.concatenate(token_ids, dtype=np.int64)),
            positions=self._on_device(np.concatenate([*spans.values()], dtype=np.int64)),
            slot_mapping=self._on_device(np.concatenate(slots)),
            block_tables=self._on_device(_tables(held)),
            context_lens=self._on_device(np.array([span.stop for span in spans.values()], dtype=np.int32)),
            cu_query_lens=self._on_device(np.append(0, ends).astype(np.int32)),
            num_decodes=sum(len(span) == 1 for span in spans.values()),
            sample_rows=self._on_device(sample_rows),
        )

    def _run_ahead(self, wanted: Mapping[Sequence, int], first: torch.Tensor) -> None:
        """Runs the first guess of each sequence, and then the next ones; sequences that want more come first."""
        drawn = [first]
        for batch in self._batches(wanted, drawn):
            drawn.append(argmax(self._model.forward(batch, self.pool.kv)))
        guesses = [column.tolist() for column in drawn]
        for row, (sequence, num_guesses) in enumerate(wanted.items()):
            self._kv[sequence].guesses = [column[row] for column in guesses[:num_guesses]]

    def _batches(self, wanted: Mapping[Sequence, int], drawn: Seq[torch.Tensor]) -> Iterator[Batch]:
        """Yields the batch of each run: the tokens that were drawn last."""
        block_size, rows, nums = self._block_size, np.arange(len(wanted) + 1), [*wanted.values()]
        tables = _tables([self._kv[sequence] for sequence in wanted])
        positions = np.array([sequence.num_known for sequence in wanted]) + np.arange(nums[0] - 1)[:, None]
        pages = tables[rows[:-1], np.minimum(positions // block_size, tables.shape[1] - 1)].astype(np.int64)
        slots, context_lens = pages * block_size + positions % block_size, (positions + 1).astype(np.int32)
        for num, runs in groupby(range(nums[0] - 1), lambda run: sum(one > run + 1 for one in nums)):
            span = [*runs]
            columns = [self._on_device(one[span, :num]).unbind() for one in (positions, slots, context_lens)]
            table, row, start = map(self._on_device, (tables[:num], rows[:num], rows[: num + 1].astype(np.int32)))
            for position, slot, context_len in zip(*columns, strict=True):
                yield Batch(drawn[-1][:num], position, slot, table, context_len, start, num, row)

    def _on_device(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(self._model.device)


def _tables(held: Seq[DraftKV]) -> Ints:
    """Stacks the pages of sequences, int32 [S, N], padded with 0."""
    tables = np.zeros((len(held), max(len(kv.pages) for kv in held)), dtype=np.int32)
    for table, kv in zip(tables, held, strict=True):
        table[: len(kv.pages)] = kv.pages.row
    return tables
