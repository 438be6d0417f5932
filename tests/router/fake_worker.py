"""A worker without a model, whose output is known beforehand."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from router.workers.worker_client import DecodeUpdates
from wire.convert import tiers_to_pb
from wire.errors import BatonError
from wire.ids import PROTOCOL_VERSION, WorkerId
from wire.layout import KVLayout
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.pools import Role

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
FINGERPRINT = b"a model's fingerprint"
CHARACTERS = "abcdefgh €äß😀\n"


def oracle(prompt: Sequence[int], choice: int, seed: int, length: int) -> list[int]:
    """The output for a prompt: bytes of UTF-8, some characters taking several."""
    return list(_oracle(tuple(prompt), choice, seed, length))


@lru_cache
def _oracle(prompt: tuple[int, ...], choice: int, seed: int, length: int) -> bytes:
    draw = random.Random(f"{prompt} {choice} {seed}")
    text = "".join(draw.choice(CHARACTERS) for _ in range(length))
    return text.encode()[:length]


@dataclass
class FakeWorker:
    """Serves what `WorkerService` serves. `open_calls` and lists tell tests what it was asked.

    Before it answers a prefill and before each token it waits for `may_go`, and raises `refusal` if there is one;
    asked for its status, `status_refusal`.
    """

    worker_id: WorkerId
    role: Role
    num_arena_blocks: int = 1000
    num_blocks: int = 1000
    fingerprint: bytes = FINGERPRINT
    state: str = "ready"
    refusal: BatonError | None = None
    num_logprobs: int = 0
    epoch: str = ""
    engine_silent_s: float = 0.0
    status_refusal: BatonError | None = None
    redis: worker_pb2.TierStatus = field(default_factory=worker_pb2.TierStatus)
    may_go: asyncio.Event = field(default_factory=asyncio.Event)
    open_calls: int = 0
    prefills: list[worker_pb2.PrefillRequest] = field(default_factory=list)
    decodes: list[worker_pb2.DecodeRequest] = field(default_factory=list)
    renewed: list[list[str]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.may_go.set()

    async def get_info(self, request: worker_pb2.GetInfoRequest) -> worker_pb2.WorkerInfo:
        return worker_pb2.WorkerInfo(
            worker_id=self.worker_id,
            role=self.role.value,
            protocol_version=PROTOCOL_VERSION,
            fingerprint=self.fingerprint,
            layout=LAYOUT.encode(),
            num_blocks=self.num_blocks,
            num_arena_blocks=self.num_arena_blocks,
            pid=1,
        )

    async def get_status(self, request: worker_pb2.GetWorkerStatusRequest) -> worker_pb2.WorkerStatus:
        if self.status_refusal is not None:
            raise self.status_refusal
        status = worker_pb2.WorkerStatus(
            worker_id=self.worker_id, role=self.role.value, state=self.state, engine_silent_s=self.engine_silent_s
        )
        status.tiers.add(tier="host", epoch=self.epoch, counts={"holds": len(self.prefills)})
        status.tiers.add(tier="redis").MergeFrom(self.redis)
        status.problems.extend(["a page is lost"] if request.check and self.state == "broken" else [])
        return status

    async def prefill(self, request: worker_pb2.PrefillRequest) -> worker_pb2.PrefillResponse:
        self.prefills.append(request)
        self.open_calls += 1
        try:
            await self._consent()
        finally:
            self.open_calls -= 1
        num_prompt = len(request.prompt.ids)
        return worker_pb2.PrefillResponse(
            attempt=request.attempt,
            choices=[self._next(request, index, ()) for index in range(request.sampling_params.n)],
            cached_tokens=tiers_to_pb({"host": 1}),
            computed_tokens=num_prompt - 1,
            num_held_blocks=-(-num_prompt // LAYOUT.block_size),
            spans=[pb.Span(name="prefill.compute", worker=self.worker_id, start_ms=0.0, duration_ms=0.01)],
        )

    async def decode(self, request: worker_pb2.DecodeRequest) -> DecodeUpdates:
        self.decodes.append(request)
        self.open_calls += 1
        try:
            so_far = {choice.index: list(choice.output.ids) for choice in request.choices}
            fetched = worker_pb2.Fetched(fetched_tokens=tiers_to_pb({"device": 2}))
            yield worker_pb2.DecodeUpdate(attempt=request.attempt, fetched=fetched)
            while so_far:
                await self._consent()
                gained = [self._next(request, index, output) for index, output in so_far.items()]
                yield worker_pb2.DecodeUpdate(attempt=request.attempt, choices=gained)
                for tokens in gained:
                    so_far[tokens.index].extend(tokens.token_ids)
                    if tokens.finish_reason:
                        del so_far[tokens.index]
                await asyncio.sleep(0)
            spans = [pb.Span(name="decode.run", worker=self.worker_id, start_ms=0.0, duration_ms=0.01)]
            yield worker_pb2.DecodeUpdate(attempt=request.attempt, summary=worker_pb2.DecodeSummary(spans=spans))
        finally:
            self.open_calls -= 1

    async def renew(self, request: worker_pb2.RenewRequest) -> worker_pb2.RenewResponse:
        self.renewed.append(list(request.request_ids))
        return worker_pb2.RenewResponse()

    async def release(self, request: worker_pb2.ReleaseRequest) -> worker_pb2.ReleaseResponse:
        self.released.extend(request.request_ids)
        return worker_pb2.ReleaseResponse()

    async def start_drain(self, request: worker_pb2.StartDrainRequest) -> worker_pb2.StartDrainResponse:
        self.state = "draining"
        return worker_pb2.StartDrainResponse()

    async def _consent(self) -> None:
        await self.may_go.wait()
        if self.refusal is not None:
            raise self.refusal

    def _next(
        self, request: worker_pb2.PrefillRequest | worker_pb2.DecodeRequest, index: int, output: Sequence[int]
    ) -> worker_pb2.ChoiceTokens:
        sampling = request.sampling_params
        token = oracle(request.prompt.ids, index, sampling.seed, sampling.max_tokens)[len(output)]
        gained = worker_pb2.ChoiceTokens(index=index, first_position=len(output), token_ids=[token])
        if self.num_logprobs:
            gained.logprobs.add(token_id=token).top.extend([pb.TopLogprob(token_id=token)] * self.num_logprobs)
        if token in sampling.stop_token_ids:
            gained.finish_reason = pb.FINISH_REASON_STOP
            gained.stop_token_id = token
        elif len(output) + 1 == sampling.max_tokens:
            gained.finish_reason = pb.FINISH_REASON_LENGTH
        return gained
