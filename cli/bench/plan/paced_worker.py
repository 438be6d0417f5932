"""A worker of the twin cluster: the real service and engine, on a model, a loop and transfers that take modelled time.

A step takes the time that costs give for its batch; its outcome comes when that time has gone by.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import torch

from cli.bench.plan.costs import WorkCosts
from engine.model.batch import Batch
from kernels.backend import KVPages
from kv_store.node.event_log import EventCursor
from kv_store.node.records import Records
from kv_store.transfers import Fetch, ThreadTransfers, Transfer
from wire.layout import KVLayout
from worker.loop import MAX_IDLE_S, Command, Inbox, StepReport, WorkerLoop

ANSWER = 0
"""The token of every answer."""
_NUM_ROWS = 256


class VirtualInbox(Inbox):
    """An inbox that never blocks; `has_news` is set from each command, or ring, to the next take."""

    def __init__(self) -> None:
        super().__init__()
        self.has_news = asyncio.Event()

    def put(self, command: Command) -> bool:
        self.has_news.set()
        return super().put(command)

    def ring(self) -> None:
        self.has_news.set()
        super().ring()

    def take(self, timeout_s: float) -> list[Command]:
        self.has_news.clear()
        return super().take(0.0)


class PacedModel:
    """A `CausalModel` that computes nothing: its next token is ANSWER. It is for greedy requests without a policy.

    spent_s: the time of the steps since the loop last took it. busy_s: the time of all steps.
    """

    device = torch.device("cpu")
    keeps_phases = False
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, costs: WorkCosts, layout: KVLayout, vocab_size: int, max_context_len: int) -> None:
        self.layout = layout
        self.vocab_size = vocab_size
        self.max_context_len = max_context_len
        self.spent_s = self.busy_s = 0.0
        self._costs = costs
        self._logits = self._make_logits(_NUM_ROWS)

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        """Implements `CausalModel.forward`, but for KV."""
        took_s = self._time_of(batch)
        self.spent_s += took_s
        self.busy_s += took_s
        num_rows = len(batch.sample_rows)
        return self._logits[:num_rows] if num_rows <= _NUM_ROWS else self._make_logits(num_rows)

    def new_queries(self, num_rows: int) -> torch.Tensor:
        return torch.empty(self.layout.num_layers, num_rows, 0)

    def weigh(self, queries: torch.Tensor, kv: KVPages, block_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return torch.zeros(self.layout.num_layers, self.layout.num_kv_heads, num_tokens)

    def _time_of(self, batch: Batch) -> float:
        """Returns the time of a step, by its batch."""
        costs, num_rows, lens = self._costs, batch.num_decodes, batch.context_lens.numpy()
        took_s = costs.step_s + costs.row_s * num_rows + costs.context_token_s * float(lens[:num_rows].sum())
        if num_rows < len(lens):
            chunks = batch.cu_query_lens.diff().numpy()[num_rows:]
            took_s += (
                costs.prompt_s
                + costs.prompt_token_s * float(chunks.sum())
                + costs.pair_s * float(chunks @ lens[num_rows:])
            )
        return took_s

    def _make_logits(self, num_rows: int) -> torch.Tensor:
        logits = torch.zeros(num_rows, self.vocab_size)
        logits[:, ANSWER] = 1.0
        return logits


class Pace(Protocol):
    """The modelled time of the steps since the loop last took it."""

    spent_s: float


class PacedLoop(WorkerLoop):
    """The loop of an engine without a thread: its outcomes come when the model's time has gone by."""

    def __init__(self, model: Pace, clock: Callable[[], float], *parts: Any) -> None:
        engine, inbox, self._pass_on, on_broken, _ = parts
        self._model = model
        self._held: list[StepReport] = []
        super().__init__(engine, inbox, self._held.append, on_broken, clock)

    def start(self) -> None:
        self._turning = asyncio.create_task(self._turn())

    def stop(self, timeout_s: float) -> bool:
        self.is_running = False
        self._inbox.ring()
        return True

    async def _turn(self) -> None:
        assert isinstance(self._inbox, VirtualInbox)
        goes_on = True
        while goes_on:
            if not (self._has_more_to_do or self._inbox.has_news.is_set()):
                with_news = asyncio.ensure_future(self._inbox.has_news.wait())
                await asyncio.wait([with_news], timeout=MAX_IDLE_S)
                with_news.cancel()
            goes_on = self.run_or_wind_up()
            await asyncio.sleep(self._model.spent_s)
            self._model.spent_s = 0.0
            for outcome in self._held:
                self._pass_on(outcome)
            self._held.clear()


class PacedTransfers(ThreadTransfers):
    """Transfers without a thread, one after another, each behind the step that ordered it.

    clock: the worker's. records: the directory's, for a fetch takes time for the blocks that are there.
    """

    def __init__(self, costs: WorkCosts, clock: Callable[[], float], records: Records, *parts: Any) -> None:
        super().__init__(*parts)
        self._costs = costs
        self._clock = clock
        self._records = records
        self._free_s = 0.0

    def start(self) -> None:
        """Begins nothing: orders have timers of their own."""

    def begin(self, transfer: Transfer) -> None:
        super().begin(transfer)
        num_blocks = len(transfer.pages)
        if isinstance(transfer, Fetch):
            num_blocks = sum(self._records.exists([name.key for name in transfer.names]))
        took_s = self._costs.transfer_s + self._costs.block_s * num_blocks
        self._free_s = max(self._free_s, self._clock()) + took_s
        asyncio.get_running_loop().call_at(self._free_s, self.run_one)


class PacedRecords(Records):
    """Records whose waits end at once, for they would hold up virtual time."""

    def wait_for_events(self, after: EventCursor, wait_s: float) -> bool:
        return super().wait_for_events(after, 0.0)
