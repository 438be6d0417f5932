"""A worker's model, with faults to order."""

import threading

import torch

from engine.batch import Batch, Model
from wire.layout import KVLayout

MAX_WAIT_S = 10.0


class FaultyModel:
    """A Model that is another one but for its faults.

    poison: steps with this token fail. spoilt: the logits after this token are no numbers.
    `pause` makes the next steps wait, `go_on` lets them go.
    """

    def __init__(self, model: Model) -> None:
        self.poison: int | None = None
        self.spoilt: int | None = None
        self.num_steps = 0
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
        return self._model.vocab_size

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

    def forward(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        assert self._may_go.wait(MAX_WAIT_S), "nobody let the model go on"
        self.num_steps += 1
        if self.poison is not None and self.poison in batch.token_ids:
            raise RuntimeError("a step that cannot be done")
        logits = self._model.forward(batch, kv)
        if self.spoilt is not None:
            logits[batch.token_ids[batch.sample_rows] == self.spoilt] = torch.nan
        return logits
