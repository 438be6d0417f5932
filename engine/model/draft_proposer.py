"""A draft model as a proposer: it runs ahead of the sequences of an engine, greedily, on smaller pages of its own.

    known tokens           a b c d
    the draft has KV of    a b c, and of x y z, its guesses after c: x came true, it is d
    it runs                d -> u, u -> v, v -> w    over the KV of y and z; its next guesses are u v w

A sequence's KV is computed here from its tokens alone, a part a step, and is neither found, fetched nor published. What
it costs to lose it is to compute it again.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate, groupby, takewhile

import numpy as np
import torch

from engine.decode_rows import Ints
from engine.model.batch import Batch, Model
from engine.sampler import argmax
from engine.sequence import BlockTable, Sequence
from kv_store.device_pool import DevicePool
from kv_store.ledger import OutOfBlocks

MAX_CATCH_UP = 256
"""The most tokens of all sequences together that one step computes before it guesses."""
MAX_BEHIND = 2
"""Known tokens without KV that are run one by one: the last, and before it the last guess of a draft that came true."""


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


@dataclass(frozen=True)
class Ahead:
    """A sequence's known tokens without KV, which run one by one, and its guesses, which run after them."""

    kv: DraftKV
    known: Seq[int]
    num_guesses: int

    @property
    def num_runs(self) -> int:
        """Counts the runs: each but the last brings the token of the next, the last one a guess that does not run."""
        return len(self.known) + self.num_guesses - 1


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
        held = [sequence for sequence, num_guesses in wanted.items() if self._hold(sequence, num_guesses)]
        self._catch_up(held)
        ahead = {}
        for sequence in held:
            kv, num_known = self._kv[sequence], sequence.num_known
            if num_known - kv.num_computed <= MAX_BEHIND:
                ahead[sequence] = Ahead(kv, sequence.tokens(kv.num_computed, MAX_BEHIND), wanted[sequence])
        if ahead:
            self._run_ahead(sorted(ahead.values(), key=lambda one: -one.num_runs))
        return {sequence: one.kv.guesses for sequence, one in ahead.items()}

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

    def _catch_up(self, sequences: Seq[Sequence]) -> None:
        """Computes tokens of sequences that are far behind, as many as a step may."""
        room, spans = MAX_CATCH_UP, {}
        for sequence in sequences:
            start, stop = self._kv[sequence].num_computed, sequence.num_known - 1
            if room and stop - start >= MAX_BEHIND:
                spans[sequence] = range(start, min(stop, start + room))
                room -= len(spans[sequence])
        if spans:
            self._model.forward(self._chunks(spans), self.pool.kv)
        for sequence, span in spans.items():
            self._kv[sequence].num_computed = span.stop

    def _chunks(self, spans: Mapping[Sequence, range]) -> Batch:
        """Makes a batch of spans of known tokens; it wants one token, for none is of use."""
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
            cu_query_lens=self._on_device(np.array([*accumulate(map(len, spans.values()), initial=0)], dtype=np.int32)),
            num_decodes=0,
            sample_rows=self._on_device(np.zeros(1, dtype=np.int64)),
        )

    def _run_ahead(self, ahead: Seq[Ahead]) -> None:
        """Runs known tokens and then guesses, a token of each sequence at a time; ones of more runs come first."""
        drawn: list[torch.Tensor] = []
        for batch in self._batches(ahead, drawn):
            drawn.append(argmax(self._model.forward(batch, self.pool.kv)))
        guesses = [column.tolist() for column in drawn]
        for row, one in enumerate(ahead):
            one.kv.num_computed += len(one.known)
            one.kv.guesses = [column[row] for column in guesses[len(one.known) - 1 : one.num_runs]]

    def _batches(self, ahead: Seq[Ahead], drawn: Seq[torch.Tensor]) -> Iterator[Batch]:
        """Yields the batch of each run: known tokens, then the last that were drawn."""
        block_size, tables, rows = self._block_size, _tables([one.kv for one in ahead]), np.arange(len(ahead) + 1)
        most = max(one.num_runs for one in ahead)
        positions = np.array([one.kv.num_computed for one in ahead]) + np.arange(most)[:, None]
        pages = tables[rows[:-1], np.minimum(positions // block_size, tables.shape[1] - 1)].astype(np.int64)
        slots, context_lens = pages * block_size + positions % block_size, (positions + 1).astype(np.int32)
        for num, runs in groupby(range(most), lambda run: sum(one.num_runs > run for one in ahead)):
            span = [*runs]
            columns = [self._on_device(one[span, :num]).unbind() for one in (positions, slots, context_lens)]
            table, row, start = map(self._on_device, (tables[:num], rows[:num], rows[: num + 1].astype(np.int32)))
            for position, slot, context_len in zip(*columns, strict=True):
                token_ids = self._token_ids(ahead[:num], drawn)
                yield Batch(token_ids, position, slot, table, context_len, start, num, row)

    def _token_ids(self, ahead: Seq[Ahead], drawn: Seq[torch.Tensor]) -> torch.Tensor:
        """Takes the first known token of each sequence, later the last drawn, or the second known one in its place."""
        if not drawn:
            return self._on_device(np.array([one.known[0] for one in ahead]))
        token_ids = drawn[-1][: len(ahead)]
        late = [row for row, one in enumerate(ahead) if len(one.known) > len(drawn)] if len(drawn) < MAX_BEHIND else []
        if late:
            token_ids[late] = self._on_device(np.array([ahead[row].known[-1] for row in late]))
        return token_ids

    def _on_device(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(self._model.device)


def _tables(held: Seq[DraftKV]) -> Ints:
    """Stacks the pages of sequences, int32 [S, N], padded with 0."""
    tables = np.zeros((len(held), max(len(kv.pages) for kv in held)), dtype=np.int32)
    for table, kv in zip(tables, held, strict=True):
        table[: len(kv.pages)] = kv.pages.row
    return tables
