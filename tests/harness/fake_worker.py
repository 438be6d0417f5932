"""A worker without a model, whose output is known beforehand."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from kv_store.node.directory import Directory
from kv_store.node.event_log import EventCursor
from wire.convert import error_to_pb, tiers_to_pb
from wire.errors import BatonError, DeadlineExceeded, Unsupported
from wire.ids import PROTOCOL_VERSION, AttemptId, WorkerId
from wire.layout import KVLayout
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.pools import Role
from worker.convert import cursor_from_pb, events_to_pb

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
FINGERPRINT = b"f" * 32
EVENT_LOOKS = 100
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
    """Serves lines as `WorkerService` does. `open_calls` and lists tell tests what it was asked.

    Before it answers a prefill and before each token it waits for `may_go`, and raises `refusal` if there is one;
    asked for its status, `status_refusal`. says: its output, if it is to be another than the oracle's.
    directory: of its block events, if it tells any.
    """

    worker_id: WorkerId
    role: Role
    num_arena_blocks: int = 1000
    num_blocks: int = 1000
    fingerprint: bytes = FINGERPRINT
    state: str = "ready"
    refusal: BatonError | None = None
    num_logprobs: int = 0
    says: str = ""
    epoch: str = ""
    node_id: str = ""
    engine_silent_s: float = 0.0
    prefill_token_s: float | None = None
    status_refusal: BatonError | None = None
    redis: worker_pb2.TierStatus = field(default_factory=worker_pb2.TierStatus)
    directory: Directory | None = None
    versions: tuple[int, int] = (PROTOCOL_VERSION, PROTOCOL_VERSION)
    num_asked_events: int = 0
    num_told_pages: int = 0
    may_go: asyncio.Event = field(default_factory=asyncio.Event)
    open_calls: int = 0
    prefills: list[worker_pb2.Begin] = field(default_factory=list)
    decodes: list[worker_pb2.Begin] = field(default_factory=list)
    renewed: list[list[str]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    ended_choices: list[tuple[AttemptId, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.may_go.set()

    def connect(self) -> "FakeLine":
        return FakeLine(self)

    async def info(self) -> worker_pb2.WorkerInfo:
        return worker_pb2.WorkerInfo(
            worker_id=self.worker_id,
            role=self.role.value,
            oldest_protocol_version=self.versions[0],
            protocol_version=self.versions[1],
            fingerprint=self.fingerprint,
            layout=LAYOUT.encode(),
            num_blocks=self.num_blocks,
            num_arena_blocks=self.num_arena_blocks,
            pid=1,
            node_id=self.node_id,
        )

    async def status(self, check: bool) -> worker_pb2.WorkerStatus:
        if self.status_refusal is not None:
            raise self.status_refusal
        status = worker_pb2.WorkerStatus(
            worker_id=self.worker_id,
            role=self.role.value,
            state=self.state,
            engine_silent_s=self.engine_silent_s,
            prefill_token_s=self.prefill_token_s,
        )
        status.tiers.add(tier="host", epoch=self.epoch, counts={"holds": len(self.prefills)})
        status.tiers.add(tier="redis").MergeFrom(self.redis)
        status.problems.extend(["a page is lost"] if check and self.state == "broken" else [])
        return status

    async def events(self, after: EventCursor) -> worker_pb2.EventPage:
        """Waits for events as `AsyncStore` does. Raises Unsupported without a directory."""
        if self.directory is None:
            raise Unsupported("a worker of an earlier release")
        self.num_asked_events += 1
        for _ in range(EVENT_LOOKS):
            if (page := self.directory.records.events(after)).cursor != after:
                break
            await asyncio.sleep(0.001)
        self.num_told_pages += page.cursor != after
        return events_to_pb(page)

    def serve(self, begin: worker_pb2.Begin) -> AsyncIterator[worker_pb2.Update]:
        """The updates of an attempt, without their address."""
        return self.prefill(begin) if self.role is Role.PREFILL else self.decode(begin)

    async def prefill(self, begin: worker_pb2.Begin) -> AsyncIterator[worker_pb2.Update]:
        self.prefills.append(begin)
        await self._consent()
        num_prompt = len(begin.prompt.ids)
        for update in self._scores(begin):
            yield update
        yield worker_pb2.Update(
            choices=[self._next(begin, index, ()) for index in range(begin.sampling_params.n)],
            prompt=worker_pb2.PromptSource(cached_tokens=tiers_to_pb({"host": 1}), computed_tokens=num_prompt - 1),
            num_held_blocks=-(-num_prompt // LAYOUT.block_size),
            end=self._end("prefill.compute"),
        )

    async def decode(self, begin: worker_pb2.Begin) -> AsyncIterator[worker_pb2.Update]:
        self.decodes.append(begin)
        so_far = {choice.index: list(choice.output.ids) for choice in begin.choices}
        yield worker_pb2.Update(prompt=worker_pb2.PromptSource(cached_tokens=tiers_to_pb({"device": 2})))
        for update in self._scores(begin):
            yield update
        while so_far:
            await self._consent()
            gained = [self._next(begin, index, output) for index, output in so_far.items()]
            yield worker_pb2.Update(choices=gained)
            for tokens in gained:
                so_far[tokens.index].extend(tokens.token_ids)
                if tokens.finish_reason:
                    del so_far[tokens.index]
            await asyncio.sleep(0)
        yield worker_pb2.Update(end=self._end("decode.run"))

    def _scores(self, begin: worker_pb2.Begin) -> list[worker_pb2.Update]:
        """Scores the prompt in parts of five: a token's logarithm is minus its position, the likeliest are 0, 1, ..."""
        num_prompt, num_top = len(begin.prompt.ids), begin.sampling_params.prompt_logprobs
        tops = [pb.TopLogprob(token_id=token_id, logprob=-1.0) for token_id in range(num_top)]
        return [
            worker_pb2.Update(
                scores=worker_pb2.PromptScores(
                    first_position=start,
                    logprobs=[
                        pb.TokenLogprobs(logprob=-at, top=tops) for at in range(start, min(start + 5, num_prompt))
                    ],
                )
            )
            for start in range(begin.num_scored or num_prompt, num_prompt, 5)
        ]

    def _end(self, name: str) -> worker_pb2.End:
        return worker_pb2.End(spans=[pb.Span(name=name, worker=self.worker_id, start_ms=0.0, duration_ms=0.01)])

    async def _consent(self) -> None:
        await self.may_go.wait()
        if self.refusal is not None:
            raise self.refusal

    def _next(self, begin: worker_pb2.Begin, index: int, output: Sequence[int]) -> worker_pb2.ChoiceTokens:
        sampling = begin.sampling_params
        said = self.says.encode() or oracle(begin.prompt.ids, index, sampling.seed, sampling.max_tokens)
        token = said[len(output)]
        gained = worker_pb2.ChoiceTokens(index=index, first_position=len(output), token_ids=[token])
        if self.num_logprobs:
            gained.logprobs.add(token_id=token).top.extend([pb.TopLogprob(token_id=token)] * self.num_logprobs)
        if len(output) + 1 == len(self.says.encode()):
            gained.finish_reason = pb.FINISH_REASON_STOP
        elif token in sampling.stop_token_ids:
            gained.finish_reason = pb.FINISH_REASON_STOP
            gained.stop_token_id = token
        elif len(output) + 1 == sampling.max_tokens:
            gained.finish_reason = pb.FINISH_REASON_LENGTH
        return gained


class FakeLine:
    """A WorkerEnd: one task for each attempt, and one for each question."""

    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker
        self._tasks: dict[AttemptId, asyncio.Task[None]] = {}
        self._asked: set[asyncio.Task[None]] = set()
        self._pieces = bytearray()
        self._news = worker_pb2.ConnectResponse()
        self._is_closed = False
        self._changed = asyncio.Event()

    def take(self, request: worker_pb2.ConnectRequest) -> None:
        for attempt in map(AttemptId, request.aborts):
            if attempt in self._tasks:
                self._tasks[attempt].cancel()
        if request.renewals:
            self._worker.renewed.append(list(request.renewals))
        self._worker.released.extend(request.releases)
        self._worker.ended_choices.extend((AttemptId(one.attempt), one.index) for one in request.ended_choices)
        for ask in request.asks:
            task = asyncio.create_task(self._answer(ask))
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)
        for begin in request.begins:
            self.begin(begin)
        if request.HasField("piece"):
            self._pieces.extend(request.piece.data)
        if request.piece.last:
            self.begin(worker_pb2.Begin.FromString(bytes(self._pieces)))
            self._pieces.clear()

    def begin(self, begin: worker_pb2.Begin) -> None:
        """Serves an attempt, until its end or its abort."""
        self._tasks[AttemptId(begin.id)] = asyncio.create_task(self._serve(begin))

    def say(self, update: worker_pb2.Update) -> None:
        """Sends an update, with its address."""
        self._news.updates.append(update)
        self._changed.set()

    def say_ended(self, hold: AttemptId) -> None:
        """Tells that a hold has ended."""
        self._news.ended_holds.append(hold)
        self._changed.set()

    async def next(self) -> worker_pb2.ConnectResponse | None:
        while not (self._news.ByteSize() or self._is_closed):
            self._changed.clear()
            await self._changed.wait()
        if self._is_closed:
            return None
        news, self._news = self._news, worker_pb2.ConnectResponse()
        return news

    def close(self) -> None:
        self._is_closed = True
        self._changed.set()
        for task in (*self._tasks.values(), *self._asked):
            task.cancel()

    async def _serve(self, begin: worker_pb2.Begin) -> None:
        self._worker.open_calls += 1
        try:
            async with asyncio.timeout(begin.time_left_s or None):
                async for update in self._worker.serve(begin):
                    self._send(begin, update)
        except TimeoutError:
            self._send(begin, _failed(DeadlineExceeded("the request's deadline has passed")))
        except BatonError as error:
            self._send(begin, _failed(error))
        finally:
            self._worker.open_calls -= 1
            del self._tasks[AttemptId(begin.id)]

    def _send(self, begin: worker_pb2.Begin, update: worker_pb2.Update) -> None:
        update.id = begin.id
        self.say(update)

    async def _answer(self, ask: worker_pb2.Ask) -> None:
        answer = worker_pb2.WorkerReply(number=ask.number)
        try:
            if ask.HasField("info"):
                answer.info.CopyFrom(await self._worker.info())
            elif ask.HasField("events"):
                answer.events.CopyFrom(await self._worker.events(cursor_from_pb(ask.events.after)))
            else:
                answer.status.CopyFrom(await self._worker.status(ask.status.check))
        except BatonError as error:
            answer.error.CopyFrom(error_to_pb(error))
        self._news.answers.append(answer)
        self._changed.set()


def _failed(error: BatonError) -> worker_pb2.Update:
    return worker_pb2.Update(end=worker_pb2.End(error=error_to_pb(error)))
