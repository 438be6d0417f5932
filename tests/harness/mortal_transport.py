"""A connection to a worker that dies at a given token."""

from collections.abc import Callable, Iterator

from tests.harness.faulty_transport import Faults, FaultyTransport
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from worker.service import WorkerService


class MortalTransport(FaultyTransport):
    """`die_after`: so many tokens of the worker still come through, and at the next one it dies; None, never.

    `on_death` is called when the worker dies in any way but `close`.
    """

    def __init__(self, service: WorkerService, faults: Faults, on_death: Callable[[], None]) -> None:
        super().__init__(service, faults)
        self.die_after: int | None = None
        self._on_death = on_death

    def kill(self) -> None:
        if not self.faults.is_dead:
            self._on_death()
        super().kill()

    def survivors(self, response: worker_pb2.ConnectResponse) -> Iterator[worker_pb2.Update]:
        for update in super().survivors(response):
            if self.die_after is None:
                yield update
                continue
            num_tokens = sum(len(choice.token_ids) for choice in update.choices)
            yield _cut(update, self.die_after)
            self.die_after -= num_tokens
            if self.die_after < 0:
                self.kill()
                return


def _cut(update: worker_pb2.Update, num_left: int) -> worker_pb2.Update:
    """What of an update comes through if no more than so many tokens do."""
    cut = worker_pb2.Update()
    cut.CopyFrom(update)
    for choice in cut.choices:
        if len(choice.token_ids) > num_left:
            choice.finish_reason = pb.FINISH_REASON_UNSPECIFIED
            choice.ClearField("stop_token_id")
            cut.ClearField("end")
            del choice.token_ids[num_left:]
            del choice.logprobs[num_left:]
        num_left -= len(choice.token_ids)
    return cut
