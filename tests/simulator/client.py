"""A client of the simulated cluster, and what it may be told."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import grpc.aio

from tests.harness.answer import ChoiceAnswer
from tests.simulator.invariants import Watch
from tests.simulator.plan import MAX_TRANSPARENT_LOSSES, Ask, Client, request_of
from tests.simulator.router import SimRouter
from wire.errors import (
    AttemptsExhausted,
    BatonError,
    Cancelled,
    DeadlineExceeded,
    NonFiniteLogits,
    Overloaded,
    Unavailable,
)
from wire.pb import inference_pb2 as pb
from wire.rpc import PROMPT_TOKENS_METADATA
from wire.trust.key_ring import ANYONE, Key

EARLY = 5
"""A client of a smaller amount goes by the clock, and so before its first token."""
GRACE_S = 0.5
STALL_GRACE_S = 40.0
COMPLETE = "complete"
LEFT = "left"
NO_NUMBERS = NonFiniteLogits.__name__
REFUSED_S = 0.05
_ERRORS: dict[Client, tuple[type[BatonError], ...]] = {
    Client.ABORTS: (Cancelled,),
    Client.HURRIES: (DeadlineExceeded, Overloaded),  # the latter if it is forecast to be late
    Client.STALLS: (Overloaded,),
    Client.POISONS: (AttemptsExhausted,),
}
_LOSSES = (AttemptsExhausted, Unavailable, DeadlineExceeded)


def caller_of(ask: Ask) -> Key:
    """Returns the key of a request's caller; tenant 0 is that of a cluster without keys."""
    return replace(ANYONE, id=f"{ask.tenant:08d}", tenant=f"tenant{ask.tenant}") if ask.tenant else ANYONE


class SimClient:
    """A client, and its call's context for the servicer. `outcome` is how its last stream ended.

    find_router: waits for one that lives. A client whose router dies asks the next one, under the same id; num_cut is
    how often that was. Every other client goes on behind what it has; the others begin anew.
    """

    def __init__(
        self,
        number: int,
        ask: Ask,
        expected: Sequence[ChoiceAnswer],
        may_be_refused: bool,
        find_router: Callable[[], Awaitable[SimRouter]],
        watch: Watch,
    ) -> None:
        self.number = number
        self.ask = ask
        self.outcome = ""
        self.took_s = 0.0
        self.num_cut = 0
        self._expected = expected
        self._may_be_refused = may_be_refused
        self._find_router = find_router
        self._watch = watch
        self._got: dict[int, ChoiceAnswer] = {}
        self._known = self._nothing()
        self._has_ended = False
        self._is_told = False
        self._loop = asyncio.get_running_loop()
        self._router: SimRouter | None = None
        self._call: asyncio.Task[None] | None = None

    @property
    def request_id(self) -> str:
        return f"r{self.number}"

    async def run(self) -> None:
        """Asks, reads, and judges the end. Returns once the call is over."""
        await asyncio.sleep(self.ask.arrives_s)
        while not await self._ask(await self._find_router()):
            self.num_cut += 1
            if self._has_ended or self.number % 2:
                self._got, self._known = {}, self._nothing()
            self._has_ended = self._is_told = False

    def _nothing(self) -> pb.Resume:
        num_choices = max(1, request_of(self.ask.kind).sampling_params.n)
        return pb.Resume(choices=[pb.ResumedChoice() for _ in range(num_choices)])

    async def _ask(self, router: SimRouter) -> bool:
        """Returns False if the router has died before the call was over."""
        ask = self.ask
        request = pb.GenerateRequest()
        request.CopyFrom(request_of(ask.kind))
        request.request_id = self.request_id
        if ask.session:
            request.session, request.keep_s = f"s{ask.session}", ask.keep_s
        if self.num_cut:
            request.sampling_params.seed = request.sampling_params.seed  # now it is set
            request.resume.CopyFrom(self._known)
        began_s = self._loop.time()
        self._router = router
        self._call = call = router.begin(router.api.Generate(request, cast(Any, self)), caller_of(ask))
        if ask.amount < EARLY and ask.client in (Client.LEAVES, Client.ABORTS):
            self._loop.call_later(ask.amount / 100, self._act)
        try:
            await router.finish(call)
        except Unavailable:
            return False
        self.took_s = self._loop.time() - began_s
        self._judge(self._error())
        return True

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> float:
        return self.ask.time_left_s

    async def send_initial_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        """Takes the count of the prompt."""
        if self._has_ended or int(dict(metadata)[PROMPT_TOKENS_METADATA]) < 1:
            self._violated("I6", f"metadata after the end, or of no prompt: {metadata}")

    async def write(self, response: pb.GenerateResponse) -> None:
        """Takes a message; returns when it is read."""
        if self._has_ended:
            self._violated("I6", "something came after the end")
        if response.WhichOneof("event") == "complete":
            self._has_ended = True
            self._take_complete(response.complete)
            return
        self._take_chunk(response.chunk)
        if self.ask.client is Client.DAWDLES:
            await asyncio.sleep(self.ask.amount / 20)
        elif sum(len(choice.token_ids) for choice in self._got.values()) >= self.ask.amount:
            await self._act_now()

    async def abort_with_status(self, status: object) -> None:
        raise grpc.aio.AbortError

    async def _act_now(self) -> None:
        if self.ask.client is Client.STALLS:
            await self._loop.create_future()
        elif self.ask.client in (Client.LEAVES, Client.ABORTS):
            self._act()
            await asyncio.sleep(0)

    def _act(self) -> None:
        router = self._router
        if router is None or router.process.is_dead or self._call is None or self._call.done() or self._is_told:
            return
        self._is_told = True
        if self.ask.client is Client.LEAVES:
            self._call.cancel()
        else:
            abort = router.api.Abort(pb.AbortRequest(request_id=self.request_id), cast(Any, self))
            self._aborting = router.begin(abort, caller_of(self.ask))

    def _take_chunk(self, chunk: pb.Chunk) -> None:
        """I6: what has come is a beginning of what was to come."""
        choice = self._got.setdefault(chunk.index, ChoiceAnswer())
        choice.token_ids += chunk.token_ids
        choice.text += chunk.text
        choice.logprobs += [one.SerializeToString(deterministic=True) for one in chunk.logprobs]
        known = self._known.choices[chunk.index]
        known.token_ids.extend(chunk.token_ids)
        if chunk.HasField("ended"):
            known.ended.CopyFrom(chunk.ended)
        whole = self._expected[chunk.index]
        if choice.token_ids != whole.token_ids[: len(choice.token_ids)]:
            self._violated("I6", "other tokens than the model's")
        if not whole.text.startswith(choice.text) or choice.logprobs != whole.logprobs[: len(choice.logprobs)]:
            self._violated("I6", "another text, or other log-probabilities, than its tokens have")

    def _take_complete(self, complete: pb.Complete) -> None:
        for finish in complete.choices:
            self._got.setdefault(finish.index, ChoiceAnswer()).finish = finish
        if [self._got.get(index) for index in range(len(self._expected))] != list(self._expected):
            self._violated("I6", "the answer that is said to be complete is not the whole answer")

    def _error(self) -> BaseException | None:
        assert self._call is not None
        return asyncio.CancelledError() if self._call.cancelled() else self._call.exception()

    def _judge(self, error: BaseException | None) -> None:
        client = self.ask.client
        if error is None:
            self.outcome = COMPLETE
            if not self._has_ended:
                self._violated("I6", "the stream ended without its last message")
            return
        self.outcome = LEFT if isinstance(error, asyncio.CancelledError) else type(error).__name__
        if self._has_ended and self.outcome != LEFT:
            self._violated("I6", f"{self.outcome} came after the last message")
        if self.took_s > self.ask.time_left_s + GRACE_S + (STALL_GRACE_S if client is Client.STALLS else 0.0):
            self._violated(
                "I8", f"ended {self.took_s:.1f} s after its arrival, with {self.ask.time_left_s:g} s to live"
            )
        is_promised = (
            isinstance(error, (*_ERRORS.get(client, ()), *_LOSSES))
            or (self.outcome == LEFT and client in (Client.LEAVES, Client.STALLS))
            or (self.outcome == Overloaded.__name__ and self._may_be_refused and self.took_s < REFUSED_S)
            or self.outcome == NO_NUMBERS
        )
        if not is_promised:
            self._violated("promise", f"ended with {self.outcome}: {error}")

    def judge_loss(self, is_transparent: bool) -> None:
        """Sees that it was not told of losses that it need not know of."""
        told = [error.__name__ for error in _LOSSES if error not in _ERRORS.get(self.ask.client, ())]
        if is_transparent and self.outcome in told:
            self._violated("promise", f"ended with {self.outcome} after {MAX_TRANSPARENT_LOSSES} losses at most")

    def _violated(self, invariant: str, what: str) -> None:
        self._watch.violated(invariant, f"request {self.number} ({self.ask.client.value}): {what}")
