"""Two routers before the workers of one node: what they meet at tells them apart."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from baton.routers import Resumption, Routers
from engine.model.hash_model import HashModel
from router.router import Router
from router.workers.holds import HoldBudget
from router.workers.local_transport import LocalTransport
from tests.harness.cluster import collect, until
from tests.harness.local_cluster import LocalCluster, Sizes
from tests.local_cluster.test_local_cluster import LAYOUT, PROMPT, ask
from text.byte_tokenizer import ByteTokenizer
from wire.errors import Cancelled, RequestExists, Unreachable
from wire.ids import AttemptId, BlockKey
from wire.pb import inference_pb2 as pb

SIZES = Sizes()
ENDING = HashModel(LAYOUT, 300, eos_token_ids=(256,))


class TwoRouters(LocalCluster):
    """A cluster with a second router, which has the same workers."""

    def __init__(self) -> None:
        super().__init__(ENDING, replace(SIZES, settings=replace(SIZES.settings, routers=2)))
        self.other = Router(
            self.router.config, ByteTokenizer(), lambda name: LocalTransport(self._port(self.workers[name])), self.port
        )

    async def start(self, num_prefill: int, num_decode: int) -> None:
        await super().start(num_prefill, num_decode)
        self.other.start()
        assert await self.other.membership.set([member.worker for member in self.router.members]) == {}

    async def stop(self) -> None:
        await self.other.stop()
        await super().stop()


@pytest.fixture
async def cluster() -> AsyncIterator[TwoRouters]:
    cluster = TwoRouters()
    await cluster.start(1, 1)
    yield cluster
    await cluster.stop()


async def test_two_clients_use_one_id_at_two_routers_at_once(cluster: TwoRouters) -> None:
    request = ask(max_tokens=400, ignore_eos=True)
    request.request_id = "1"
    opened = [router.dispatcher.open(request, 60.0) for router in (cluster.router, cluster.other)]
    with pytest.raises(RequestExists):
        cluster.other.dispatcher.open(request, 60.0)
    for output in await asyncio.gather(*map(collect, opened)):
        assert output.token_ids[0] == ENDING.oracle(PROMPT, 400)


async def test_the_half_of_an_arena_that_holds_may_take_is_one_for_both(cluster: TwoRouters) -> None:
    (mine, node), (theirs, _) = budget_of(cluster.router), budget_of(cluster.other)
    num_blocks = SIZES.num_slots // 2 + 1
    keys = [BlockKey(number.to_bytes(32, "big")) for number in range(num_blocks)]
    async with cluster.router.holds.hold(AttemptId("a/1"), keys, node):
        await until(lambda: not _may_hold(theirs, num_blocks))
    await until(lambda: theirs.has_room and mine.has_room)


def budget_of(router: Router) -> tuple[HoldBudget, str]:
    ((node, budget),) = router.holds.budgets.items()
    return budget, node


def _may_hold(budget: HoldBudget, num_blocks: int) -> bool:
    """Whether a second prefill may start behind a first that takes its router's part."""
    first, second = AttemptId("b/1"), AttemptId("b/2")
    part = [BlockKey(number.to_bytes(32, "little")) for number in range(1, num_blocks // 2 + 2)]
    budget.ask(first, part)
    is_granted = second in budget.ask(second, [BlockKey(bytes(32))])
    budget.release(second)
    budget.release(first)
    return is_granted


LIKES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "two choices, drawn": {"temperature": 1.0, "n": 2, "seed": 7},
    "stop strings": {"stop": ["q", "zz"], "min_tokens": 3, "n": 3, "temperature": 1.0, "seed": 11},
    "stop tokens": {"stop_token_ids": [*range(0, 300, 19)], "n": 3, "temperature": 1.0, "seed": 5},
    "penalties and log-probabilities": {"logprobs": 2, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    "the prompt, too": {"prompt_logprobs": 1, "echo": True},
    "a regular expression": {"response_format": pb.ResponseFormat(regex="[a-f]{6,9}")},
}


class Whole:
    """All that a client has of an answer."""

    def __init__(self) -> None:
        self.chunks = list[pb.Chunk]()
        self.prompt = list[pb.PromptPart]()
        self.complete = pb.Complete()

    def add(self, response: pb.GenerateResponse) -> None:
        match response.WhichOneof("event"):
            case "chunk":
                self.chunks.append(response.chunk)
            case "prompt":
                self.prompt.append(response.prompt)
            case _:
                self.complete = response.complete

    @property
    def told(self) -> object:
        choices = {
            index: (
                [token for chunk in chunks for token in chunk.token_ids],
                "".join(chunk.text for chunk in chunks),
                [str(one) for chunk in chunks for one in chunk.logprobs],
            )
            for index in range(16)
            if (chunks := [chunk for chunk in self.chunks if chunk.index == index])
        }
        usage = self.complete.usage
        return (
            choices,
            [str(one) for part in self.prompt for one in part.tokens],
            "".join(part.text for part in self.prompt),
            sorted(map(str, self.complete.choices)),
            (usage.prompt_tokens, usage.completion_tokens, usage.reasoning_tokens, self.complete.seed),
        )


async def read(router: Router, resumption: Resumption, whole: Whole, num_messages: int) -> bool:
    """Reads so many messages at most; returns whether they were all."""
    opened = router.dispatcher.open(resumption.request, 60.0)
    try:
        async for response in opened.outbox:
            if num_messages == 0:
                return False
            num_messages -= 1
            resumption.accept(response)
            whole.add(response)
    finally:
        opened.stop(Cancelled("the router is lost"))
        await opened.ended()
    return True


@pytest.mark.parametrize("like", LIKES)
async def test_a_stream_goes_on_at_another_router_from_every_message(cluster: TwoRouters, like: str) -> None:
    def request() -> Resumption:
        return Resumption(ask(max_tokens=40, **LIKES[like]), Routers("a:1,b:1"), "", 60.0)

    undisturbed = Whole()
    assert await read(cluster.router, request(), undisturbed, 1000)
    is_whole, num_messages, num_resumed = False, 0, 0
    while not is_whole:
        whole, resumption = Whole(), request()
        resumption.request.sampling_params.seed = undisturbed.complete.seed
        is_whole = await read(cluster.router, resumption, whole, num_messages)
        if not is_whole:
            resumption.lost(Unreachable("the router is lost"))
            assert await read(cluster.other, resumption, whole, 1000)
            num_resumed += 1
        assert whole.told == undisturbed.told, f"lost after {num_messages} messages"
        num_messages += 1
    assert num_resumed >= 2


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [([1, 2, 3], False), ([299] * 12, True), ([], True)],
    ids=["of another answer", "as many as may be", "an end without a token"],
)
async def test_a_lie_about_an_answer_harms_that_answer_alone(
    cluster: TwoRouters, tokens: list[int], ends: bool
) -> None:
    lie = ask(max_tokens=12, seed=1, ignore_eos=True)
    ended = pb.Choice(finish_reason=pb.FINISH_REASON_LENGTH) if ends else None
    lie.resume.choices.append(pb.ResumedChoice(token_ids=tokens, ended=ended))
    honest = asyncio.create_task(cluster.generate(ask(ignore_eos=True)))
    lied = Whole()
    async for response in cluster.other.dispatcher.open(lie, 60.0).outbox:
        lied.add(response)
    assert (await honest).token_ids[0] == ENDING.oracle(PROMPT, 40)
    assert lied.complete.usage.completion_tokens == (len(tokens) if ends else 12)
    gained = [token for chunk in lied.chunks for token in chunk.token_ids]
    assert gained == ([] if ends else ENDING.oracle((*PROMPT, *tokens), 9))
