import torch

from decode_worker.lifecycle import DecodeLifecycle
from engine.model.batch import Batch
from engine.model.hash_model import HashModel
from engine.request import ChoiceSoFar, EngineRequest
from tests.kv_store.fake_clock import FakeClock
from tests.pair import ROOT, make_core
from tests.worker.workers import LAYOUT, PROMPT, VOCAB_SIZE, greedy
from wire.ids import RequestId
from worker.call import Call
from worker.commands import Begin
from worker.instructions import Send
from worker.lives import Lives


class SlowModel(HashModel):
    """Each step takes a second of a clock that stands still otherwise."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(LAYOUT, VOCAB_SIZE)
        self._clock = clock

    def forward(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        self._clock.now += 1.0
        return super().forward(batch, kv)


def test_a_step_counts_for_what_it_computes_and_not_for_the_fetch_before() -> None:
    clock = FakeClock()
    core = make_core(SlowModel(clock))
    lives = Lives(core, clock)
    request = EngineRequest(RequestId("r"), ROOT, PROMPT, greedy(5), (ChoiceSoFar(0),))
    lives.begin(Begin(Call(request.request_id, 1), DecodeLifecycle(request, clock(), LAYOUT.block_size)))
    while core.has_requests:
        began_s = clock()
        lives.tell(core.step(), began_s)
    (spans,) = (
        reply.update.spans
        for _, reply in lives.take_deliveries().replies
        if isinstance(reply, Send) and reply.update.spans
    )
    assert [(span.name, span.duration_ms) for span in spans] == [
        ("decode.queue", 0.0),
        ("decode.fetch", 0.0),
        ("decode.wait_turn", 0.0),
        ("decode.compute", 1000.0),
        ("decode.generate", 4000.0),
    ]
