"""A draft model as a proposer: it continues the sequences of an engine greedily, on smaller pages of its own.

    known tokens           a b c d e
    the draft has KV of    a b c, and of x y, its guesses after c but for the last: x was right, it is d
    it runs                e -> u, u -> v, v -> w    over the KV of y; its next guesses are u v w

All known tokens without KV run at once, usually one or two, and bring the first guess. If all layers of the draft have
windows, tokens before the windows do not run. A sequence's KV is computed here from its tokens alone, and is neither
looked up, fetched nor written through. Losing it costs its computation.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate, chain, takewhile

import numpy as np
import torch

from engine.kv.retention import BlockTable
from engine.model.batch import Batch, DraftModel
from engine.sequence import Sequence
from engine.step.work import Ints
from kv_store.device_pool import DevicePool
from kv_store.ledger import OutOfBlocks

MAX_CATCH_UP = 256
"""The most known tokens that one step computes, over all sequences."""
MAX_RECORDED = 16
"""The most known tokens that run as rows of a recorded program, which computes the logits of all of them."""


@dataclass
class DraftKV:
    """KV of a sequence's first `num_computed` tokens, and of the `guesses` after them except the last."""

    pages: BlockTable = field(default_factory=BlockTable)
    num_computed: int = 0
    guesses: Seq[int] = ()

    def settle(self, sequence: Sequence, reach: int) -> None:
        """Counts true guesses, and tokens farther back than `reach`, as computed; never the last known token."""
        known = sequence.tokens(self.num_computed, len(self.guesses))
        pairs = zip(known, self.guesses[:-1], strict=False)
        num_true = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        num_computed = min(self.num_computed + num_true, sequence.num_known - 1)
        self.num_computed = max(num_computed, sequence.num_known - reach)
        self.guesses = ()


class DraftProposer:
    """A Proposer that runs a smaller model with the vocabulary of the engine's."""

    def __init__(self, model: DraftModel, num_pages: int) -> None:
        self.pool = DevicePool(model.layout, num_pages, model.device)
        self._model = model
        self._block_size = model.layout.block_size
        layout, sees_all = model.layout, model.layout.window is None or model.layout.num_sinks > 0
        # A layer adds a window to what a row's KV depends on.
        self._reach = model.max_context_len if sees_all else layout.num_layers * ((layout.window or 0) - 1) + 1
        self._kv: dict[Sequence, DraftKV] = {}

    @torch.inference_mode()
    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int]]:
        """Guesses nothing for a sequence with many tokens to compute, or without pages."""
        longest = max(sequence.num_known for sequence in wanted)
        num_runs = min(max(wanted.values()), self._model.max_context_len - longest)
        spans = self._spans([sequence for sequence in wanted if self._hold(sequence, num_runs)])
        if not spans:
            return {}
        drawn = self._model.decode_greedily(self._batch(spans), self.pool.kv, num_runs).T.tolist()
        for (sequence, span), tokens in zip(spans.items(), drawn, strict=True):
            kv = self._kv[sequence]
            kv.num_computed = span.stop
            kv.guesses = tokens[: wanted[sequence]] if span.stop == sequence.num_known else ()
        return {sequence: kv.guesses for sequence in spans if (kv := self._kv[sequence]).guesses}

    def forget(self, sequence: Sequence) -> None:
        if (kv := self._kv.pop(sequence, None)) is not None:
            for page in kv.pages[:]:
                self.pool.ledger.free(page)

    def _hold(self, sequence: Sequence, num_runs: int) -> bool:
        """Brings a sequence's KV up to date, with pages for its next runs; False if there are too few."""
        kv = self._kv.setdefault(sequence, DraftKV())
        kv.settle(sequence, self._reach)
        num_blocks = -(-(sequence.num_known + num_runs - 1) // self._block_size)
        try:
            kv.pages.extend(self.pool.ledger.allocate(max(0, num_blocks - len(kv.pages))))
        except OutOfBlocks:
            return False
        return True

    def _spans(self, sequences: Seq[Sequence]) -> dict[Sequence, range]:
        """Lists the known tokens without KV, as many as a step may compute; spans of one token come first."""
        room, spans = MAX_CATCH_UP, {}
        for sequence in sequences:
            start = self._kv[sequence].num_computed
            if span := range(start, min(sequence.num_known, start + room)):
                spans[sequence] = span
                room -= len(span)
        return dict(sorted(spans.items(), key=lambda item: len(item[1]) > 1))

    def _batch(self, spans: Mapping[Sequence, range]) -> Batch:
        """Makes the batch of spans of known tokens."""
        held, block_size = [self._kv[sequence] for sequence in spans], self._block_size
        lengths = [len(span) for span in spans.values()]
        token_ids = chain.from_iterable(one.tokens(span.start, len(span)) for one, span in spans.items())
        positions, tables = np.array([*chain.from_iterable(spans.values())]), _tables(held)
        pages = tables[np.repeat(np.arange(len(held)), lengths), positions // block_size].astype(np.int64)
        starts = np.array([0, *accumulate(lengths)], dtype=np.int32)
        runs_all = len(positions) <= MAX_RECORDED
        return Batch(
            token_ids=torch.from_numpy(np.array([*token_ids])),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(pages * block_size + positions % block_size),
            block_tables=torch.from_numpy(tables),
            context_lens=torch.from_numpy(np.array([span.stop for span in spans.values()], dtype=np.int32)),
            cu_query_lens=torch.from_numpy(starts),
            num_decodes=lengths.count(1),
            sample_rows=torch.from_numpy(np.arange(len(positions)) if runs_all else starts[1:].astype(np.int64) - 1),
        )


def _tables(held: Seq[DraftKV]) -> Ints:
    """Stacks the pages of sequences, int32 [S, N], padded with 0."""
    tables = np.zeros((len(held), max(len(kv.pages) for kv in held)), dtype=np.int32)
    for table, kv in zip(tables, held, strict=True):
        table[: len(kv.pages)] = kv.pages.row
    return tables
