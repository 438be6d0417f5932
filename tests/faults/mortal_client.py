"""A connection to a worker that dies at a given token."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from router.workers.local_worker_client import LocalWorkerClient
from router.workers.worker_client import DecodeUpdates
from wire.errors import Unavailable
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from worker.service import WorkerService


class MortalClient(LocalWorkerClient):
    """`die_after`: so many tokens of a decode still come through, and at the next one the worker dies; None, never.

    `on_death` is called when the worker dies in any way but `close`.
    """

    def __init__(self, service: WorkerService, on_death: Callable[[], None]) -> None:
        super().__init__(service)
        self.die_after: int | None = None
        self._on_death = on_death

    def kill(self) -> None:
        if self._death is None:
            self._on_death()
        super().kill()

    async def decode(self, request: worker_pb2.DecodeRequest, timeout_s: float) -> DecodeUpdates:
        async with aclosing(super().decode(request, timeout_s)) as updates:
            async for update in updates:
                if self.die_after is None:
                    yield update
                    continue
                num_tokens = sum(len(choice.token_ids) for choice in update.choices)
                yield _cut(update, self.die_after)
                self.die_after -= num_tokens
                if self.die_after < 0:
                    self.kill()
                    raise Unavailable("the worker died")
                await asyncio.sleep(0)


def _cut(update: worker_pb2.DecodeUpdate, num_left: int) -> worker_pb2.DecodeUpdate:
    """What of an update comes through if no more than so many tokens do."""
    cut = worker_pb2.DecodeUpdate()
    cut.CopyFrom(update)
    for choice in cut.choices:
        if len(choice.token_ids) > num_left:
            choice.finish_reason = pb.FINISH_REASON_UNSPECIFIED
            choice.ClearField("stop_token_id")
            cut.ClearField("summary")
            del choice.token_ids[num_left:]
            del choice.logprobs[num_left:]
        num_left -= len(choice.token_ids)
    return cut
