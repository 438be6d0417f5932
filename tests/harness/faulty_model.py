"""A worker's model, with faults to order."""

import threading
from collections.abc import Callable

import torch

from engine.model.batch import Batch, CausalModel
from kernels.backend import KVPages
from wire.layout import KVLayout

MAX_WAIT_S = 10.0
NEVER = -1e4
SPOILT = 0x7FF8DEAD


class FaultyModel:
    """A CausalModel that is another one but for its faults, and for one more token, the last, which it never says.

    on_step: called before each step with its number, from 1.
    poison: steps with this token fail, and `on_poison` is called before.
    spoilt: the logits after this token are no numbers.
    spoilt_kv: the KV of this token is not what it should be, and the logits wherever it is read are no numbers.
    is_broken: no step can be done.

    `pause` makes the next steps wait, `go_on` lets them go.
    """

    keeps_phases = False

    def __init__(self, model: CausalModel) -> None:
        self.poison: int | None = None
        self.on_poison: Callable[[], None] = lambda: None
        self.spoilt: int | None = None
        self.spoilt_kv: int | None = None
        self.is_broken = False
        self.num_steps = 0
        self.on_step: Callable[[int], None] = lambda number: None
        self._model = model
        self._may_go = threading.Event()
        self._may_go.set()

    @property
    def layout(self) -> KVLayout:
        return self._model.layout

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size + 1

    @property
    def max_context_len(self) -> int:
        return self._model.max_context_len

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._model.eos_token_ids

    def pause(self) -> None:
        self._may_go.clear()

    def go_on(self) -> None:
        self._may_go.set()

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        self.num_steps += 1
        self.on_step(self.num_steps)
        assert self._may_go.wait(MAX_WAIT_S), "nobody let the model go on"
        if self.is_broken:
            raise RuntimeError("the device is lost")
        if self.poison is not None and self.poison in batch.token_ids:
            self.on_poison()
            raise RuntimeError("a step that cannot be done")
        logits = torch.nn.functional.pad(self._model.forward(batch, kv), (0, 1), value=NEVER)
        if self.spoilt is not None:
            logits[batch.token_ids[batch.sample_rows] == self.spoilt] = torch.nan
        if self.spoilt_kv is not None:
            self._spoil(batch, kv.data.view(torch.int64), logits)
        return logits

    def new_queries(self, num_rows: int) -> torch.Tensor:
        return self._model.new_queries(num_rows)

    def weigh(self, queries: torch.Tensor, kv: KVPages, block_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return self._model.weigh(queries, kv, block_table, num_tokens)

    def _spoil(self, batch: Batch, words: torch.Tensor, logits: torch.Tensor) -> None:
        slots = batch.slot_mapping[batch.token_ids == self.spoilt_kv]
        words[slots // self.layout.block_size, :, :, :, slots % self.layout.block_size] = SPOILT
        for row, sequence in enumerate(torch.searchsorted(batch.cu_query_lens, batch.sample_rows, right=True) - 1):
            num_blocks = -(-int(batch.context_lens[sequence]) // self.layout.block_size)
            if (words[batch.block_tables[sequence, :num_blocks]] == SPOILT).any():
                logits[row] = torch.nan
