"""A decode worker dies at every token: what the client has in the end is what it would have had."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.faults.rest import at_rest
from tests.harness.answer import ChoiceAnswer, ask
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.known_model import MODEL
from tests.harness.local_cluster import Sizes
from wire.pb import inference_pb2 as pb

NUM_KILLS = 33


def prompt_of(kill_after: int) -> tuple[int, ...]:
    """Each kill has a prompt of its own, so that nothing is found from before; of 20 to 52 tokens."""
    return tuple((kill_after * 7 + position) % 300 for position in range(20 + kill_after))


@dataclass(frozen=True)
class Kind:
    """Settings of a request; some are known only from what it says without them."""

    settings: dict[str, Any] = field(default_factory=dict)
    num_prefill: int = 1
    ends_by: str | None = None

    def request(self, kill_after: int, plain: list[ChoiceAnswer]) -> pb.GenerateRequest:
        return ask(prompt_of(kill_after), 36, **self.settings)


class WithStopString(Kind):
    """Ends in the midst of the output, with a string that spans tokens."""

    def request(self, kill_after: int, plain: list[ChoiceAnswer]) -> pb.GenerateRequest:
        text = plain[0].text
        return ask(prompt_of(kill_after), 36, stop=[text[-12:-7], "never there"], **self.settings)


class WithLateStopToken(Kind):
    """Wants to end early, but may not before min_tokens."""

    def request(self, kill_after: int, plain: list[ChoiceAnswer]) -> pb.GenerateRequest:
        stops = plain[0].token_ids[3:8]
        return ask(prompt_of(kill_after), 36, min_tokens=30, stop_token_ids=stops, **self.settings)


SAMPLED = {"temperature": 1.2}
PENALTIES = {"top_k": 200, "presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3}
KINDS = {
    "greedy": Kind(),
    "stop strings": WithStopString(ends_by="stop_string"),
    "min_tokens": WithLateStopToken(ends_by="stop_token_id"),
    "seeded, penalties, logprobs": Kind({"logprobs": 3, **SAMPLED, **PENALTIES}),
    "two choices": Kind({"n": 2, **SAMPLED}),
    "two choices, stop strings, co-located": WithStopString({"n": 2, "temperature": 0.3}, 0, "stop_string"),
}
SIZES = Sizes(num_blocks=24, num_slots=128)


@pytest.fixture(scope="module")
def plain() -> list[list[ChoiceAnswer]]:
    """What greedy requests say, all of it."""

    async def run() -> list[list[ChoiceAnswer]]:
        async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
            return await asyncio.gather(*(cluster.answer(ask(prompt_of(number), 36)) for number in range(NUM_KILLS)))

    return asyncio.run(run())


@pytest.mark.parametrize("name", KINDS)
async def test_killed_at_every_token(name: str, plain: list[list[ChoiceAnswer]]) -> None:
    kind = KINDS[name]
    requests = [kind.request(kill_after, plain[kill_after]) for kill_after in range(NUM_KILLS)]
    async with FaultyCluster.running(MODEL, kind.num_prefill, 1, SIZES) as cluster:
        expected = await asyncio.gather(*(cluster.answer(request) for request in requests))
    finishes = {choice.matched_stop for answer in expected for choice in answer}
    assert kind.ends_by in finishes
    async with FaultyCluster.running(MODEL, kind.num_prefill, 2, SIZES) as cluster:
        cluster.replace_dead = True
        for kill_after, request in enumerate(requests):
            assert await answer_of_killed(cluster, request, kill_after) == expected[kill_after], kill_after
        await at_rest(cluster)
        assert len(cluster.dead) >= NUM_KILLS * 2 // 3, "most requests are long enough to see their worker die"


def test_the_requests_are_what_they_are_for(plain: list[list[ChoiceAnswer]]) -> None:
    """Characters that are split between tokens, in texts whose ends differ."""
    with_whole_characters = [choice for [choice] in plain if any(character in choice.text for character in "₤ìØ€ä😀")]
    assert len(with_whole_characters) > NUM_KILLS * 3 // 4
    assert len({choice.text[-12:-7] for [choice] in plain}) > NUM_KILLS * 3 // 4


async def answer_of_killed(cluster: FaultyCluster, request: pb.GenerateRequest, kill_after: int) -> list[ChoiceAnswer]:
    """Whichever worker decodes first dies after so many tokens; the next one lives."""
    await cluster.settle()
    victims = [name for name in cluster.listed if name.startswith("d")]
    for name in victims:
        cluster.mortals[name].die_after = kill_after
    cluster.someone_died.clear()
    reading = asyncio.create_task(cluster.answer(request))
    dying = asyncio.create_task(cluster.someone_died.wait())
    await asyncio.wait([reading, dying], return_when=asyncio.FIRST_COMPLETED)
    dying.cancel()
    for name in cluster.listed:
        cluster.mortals[name].die_after = None
    return await reading
