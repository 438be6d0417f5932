"""A connection to a worker in this process, with faults to order."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from router.workers.local_transport import LocalTransport, WorkerPort
from wire.errors import Unavailable
from wire.pb import worker_pb2


@dataclass
class Faults:
    """Faults from now on.

    delay_s: before each message from the worker.
    bytes_per_s: how fast messages to the worker go; None, at once.
    fail_after: updates until the worker dies; None, never.
    drop: updates that never arrive, by their number on the connection, from 0.
    spoil: changes the answers of a message, or takes some out.
    is_dead: the worker is no more, for this connection and later ones.
    """

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    fail_after: int | None = None
    drop: frozenset[int] = frozenset()
    spoil: Callable[[list[worker_pb2.WorkerReply]], list[worker_pb2.WorkerReply]] = list
    is_dead: bool = False


class FaultyTransport(LocalTransport):
    """A Transport with faults, which outlive the connection."""

    def __init__(self, worker: WorkerPort, faults: Faults | None = None) -> None:
        super().__init__(worker)
        self.faults = faults or Faults()
        self._num_updates = 0

    def kill(self) -> None:
        self.faults.is_dead = True
        super().kill()

    async def write(self, request: worker_pb2.ConnectRequest) -> None:
        rate = self.faults.bytes_per_s
        await asyncio.sleep(0 if rate is None else request.ByteSize() / rate)
        await super().write(request)

    async def read(self) -> worker_pb2.ConnectResponse | None:
        response = await super().read()
        if response is None:
            return None
        await asyncio.sleep(self.faults.delay_s)
        self._require_alive()
        updates = self.survivors(response)
        answers = self.faults.spoil([*response.answers])
        return worker_pb2.ConnectResponse(updates=updates, answers=answers, ended_holds=response.ended_holds)

    def survivors(self, response: worker_pb2.ConnectResponse) -> Iterator[worker_pb2.Update]:
        """Yields the updates that come through before the worker dies, if it does."""
        for update in response.updates:
            if self.faults.fail_after == 0:
                self.kill()
                return
            if self.faults.fail_after is not None:
                self.faults.fail_after -= 1
            if self._num_updates not in self.faults.drop:
                yield update
            self._num_updates += 1

    def _require_alive(self) -> None:
        if self.faults.is_dead:
            raise Unavailable("the worker died")
        super()._require_alive()
