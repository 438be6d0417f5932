"""A worker of the twin cluster: the real service and engine, on a model, a loop and transfers that take modelled time.

A step takes the time that costs give for its batch; its outcome comes when that time has gone by.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from cli.bench.plan.costs import WorkCosts
from engine.model.batch import Batch
from engine.model.hash_model import HashModel
from kernels.backend import KVPages
from kv_store.node.event_log import EventCursor
from kv_store.node.records import Records
from kv_store.transfers import Fetch, Prefetch, ThreadTransfers, Transfer
from wire.layout import KVLayout
from worker.loop import MAX_IDLE_S, Command, Inbox, StepReport, WorkerLoop

ANSWER = 0
"""The token of every answer."""


class VirtualInbox(Inbox):
    """An inbox whose `take` never blocks; news is a command, or a ring, since then."""

    def __init__(self) -> None:
        super().__init__()
        self._has_news = asyncio.Event()

    async def wait(self) -> None:
        """Waits for news, at most MAX_IDLE_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_IDLE_S):
                await self._has_news.wait()

    def put(self, command: Command) -> bool:
        self._has_news.set()
        return super().put(command)

    def ring(self) -> None:
        self._has_news.set()
        super().ring()

    def take(self, timeout_s: float) -> list[Command]:
        self._has_news.clear()
        return super().take(0.0)


class PacedModel(HashModel):
    """A model that computes nothing: its next token is ANSWER. It is for greedy requests without a policy.

    spent_s: the time of the steps since the loop last took it. busy_s: the time of all steps.
    """

    def __init__(self, costs: WorkCosts, layout: KVLayout, vocab_size: int, max_context_len: int) -> None:
        super().__init__(layout, vocab_size, max_context_len=1)  # its tables are for hashes, which nothing here reads
        self.max_context_len = max_context_len
        self.spent_s = self.busy_s = 0.0
        self._costs = costs
        self._row = torch.eye(1, vocab_size)

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        """Implements `CausalModel.forward`, but for KV."""
        took_s = self._time_of(batch)
        self.spent_s += took_s
        self.busy_s += took_s
        return self._row.expand(len(batch.sample_rows), -1)

    def _time_of(self, batch: Batch) -> float:
        """Returns the time of a step, by its batch."""
        costs, num_rows, lens = self._costs, batch.num_decodes, batch.context_lens.numpy()
        took_s = costs.step_s + costs.row_s * num_rows + costs.context_token_s * float(lens[:num_rows].sum())
        if num_rows < len(lens):
            chunks = np.diff(batch.cu_query_lens.numpy()[num_rows:])
            took_s += (
                costs.prompt_s
                + costs.prompt_token_s * float(chunks.sum())
                + costs.pair_s * float(chunks @ (lens[num_rows:] - chunks / 2))
            )
        return took_s


class PacedLoop(WorkerLoop):
    """The loop of an engine without a thread.

    Its reports reach the router when the model's time and a message's have gone by.
    """

    def __init__(self, model: PacedModel, message_s: float, clock: Callable[[], float], *parts: Any) -> None:
        engine, inbox, deliver, on_broken, _ = parts
        self._model = model
        under_way = deque[StepReport]()

        def send(report: StepReport) -> None:
            under_way.append(report)
            later_s = model.spent_s + message_s
            asyncio.get_running_loop().call_later(later_s, lambda: deliver(under_way.popleft()))

        super().__init__(engine, inbox, send, on_broken, clock)

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
            if not self._has_more_to_do:
                await self._inbox.wait()
            goes_on = self.run_or_wind_up()
            await asyncio.sleep(self._model.spent_s)
            self._model.spent_s = 0.0


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
        costs, took_s, num_blocks = self._costs, self._costs.transfer_s, len(transfer.pages)
        if isinstance(transfer, Fetch | Prefetch):
            took_s, num_blocks = costs.fetch_s, sum(self._records.exists([name.key for name in transfer.names]))
        took_s += costs.block_s * num_blocks
        self._free_s = max(self._free_s, self._clock()) + took_s
        asyncio.get_running_loop().call_at(self._free_s, self.run_one)


class PacedRecords(Records):
    """Records whose waits end at once, for they would hold up virtual time."""

    def wait_for_events(self, after: EventCursor, wait_s: float) -> bool:
        return super().wait_for_events(after, 0.0)
