"""Everything at once, as drawn from a seed: whoever stays to the end has the answer of a quiet day.

BATON_SEEDS=1000 pytest tests/faults/test_random_mix.py: for a night, or five minutes.
"""

import asyncio
import random
from collections.abc import Awaitable, Sequence
from contextlib import suppress

import pytest

from tests.faults.rest import at_rest
from tests.harness.answer import ChoiceAnswer, Reader, ask
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.known_model import LAYOUT, MODEL
from tests.harness.local_cluster import Sizes
from tests.seeds import repeated_by, seeds
from wire.errors import Cancelled, DeadlineExceeded, RequestNotFound
from wire.ids import RequestId
from wire.pb import inference_pb2 as pb
from wire.pools import Role
from worker.config import BatchSettings

SIZES = Sizes(num_blocks=24, num_slots=40, batch=BatchSettings(max_step_tokens=48, max_running=16, max_chunk_tokens=32))
NUM_SEEDS = 30
FAILED_ONCE: tuple[int, ...] = ()
NUM_CLIENTS = 14
MAX_ACTIONS = 14
MAX_LOSSES = 2
"""Of workers: a third one might be the last that a request may see die."""


def request_of(number: int) -> pb.GenerateRequest:
    """Of every kind, with long beginnings in common."""
    prompt = tuple((number % 3 + position) % 300 for position in range(10 + number * 5 % 70))
    settings: list[dict[str, object]] = [
        {},
        {"temperature": 1.0, "n": 2},
        {"temperature": 0.7, "logprobs": 1, "presence_penalty": 1.0},
        {"stop": ["€", "a c"], "min_tokens": 12},
    ]
    return ask(prompt, 20 + number % 20, **settings[number % len(settings)])


@pytest.fixture(scope="module")
def quiet() -> list[list[ChoiceAnswer]]:
    """What every request says where nothing goes wrong."""

    async def run() -> list[list[ChoiceAnswer]]:
        async with FaultyCluster.running(MODEL, 1, 1, Sizes()) as cluster:
            return await asyncio.gather(*(cluster.answer(request_of(number)) for number in range(NUM_CLIENTS)))

    return asyncio.run(run())


class Mix:
    """What clients do, and what goes wrong meanwhile."""

    def __init__(self, cluster: FaultyCluster, draw: random.Random, quiet: list[list[ChoiceAnswer]]) -> None:
        self._cluster = cluster
        self._draw = draw
        self._quiet = quiet
        self._drains: list[Awaitable[int]] = []
        losses = draw.choices([self._kill, self._kill, self._disconnect], k=draw.randint(0, MAX_LOSSES))
        others = [self._drain, self._stall, self._flip, self._evict, self._expire]
        self._actions = losses + draw.choices(others, k=draw.randrange(MAX_ACTIONS))
        draw.shuffle(self._actions)

    async def run(self) -> None:
        clients = [asyncio.create_task(self._client(number)) for number in range(NUM_CLIENTS)]
        for act in self._actions:
            await self._some_time()
            await act()
        await asyncio.gather(*clients)
        await asyncio.gather(*self._drains)

    async def _client(self, number: int) -> None:
        act = self._draw.choice([self._stay, self._stay, self._stay, self._cancel, self._hurry])
        for _ in range(3):
            await self._some_time()
        await act(number)

    async def _stay(self, number: int) -> None:
        assert await self._cluster.answer(request_of(number)) == self._quiet[number]

    async def _cancel(self, number: int) -> None:
        request = request_of(number)
        request.request_id = str(number)
        reader = self._cluster.open(request)
        with suppress(Cancelled, RequestNotFound):
            await reader.read_tokens(self._draw.randrange(20))
            await self._cluster.router.dispatcher.abort(RequestId(str(number)))
            await reader.read_all()
        self._expect_beginning(reader, number)

    async def _hurry(self, number: int) -> None:
        reader = self._cluster.open(request_of(number), time_left_s=self._draw.random() * 0.2)
        with suppress(DeadlineExceeded):
            await reader.read_all()
        self._expect_beginning(reader, number)

    def _expect_beginning(self, reader: Reader, number: int) -> None:
        for index, choice in reader.by_index.items():
            whole = self._quiet[number][index]
            assert choice.token_ids == whole.token_ids[: len(choice.token_ids)], (number, index)
            assert whole.text.startswith(choice.text)

    async def _kill(self) -> None:
        self._cluster.crash(self._someone())

    async def _disconnect(self) -> None:
        """The router loses sight of a worker, which lives on; another one comes."""
        name = self._someone()
        self._cluster.disconnect(name)
        await self._cluster.add(_role(name))

    async def _drain(self) -> None:
        name = self._someone()
        await self._cluster.add(_role(name))
        if name in self._cluster.listed:
            self._drains.append(asyncio.create_task(self._cluster.drain(name, self._draw.choice([0.0, 10.0]))))

    async def _stall(self) -> None:
        model = self._cluster.models[self._someone()]
        model.pause()
        await self._some_time()
        model.go_on()

    async def _flip(self) -> None:
        """A bit of some blocks."""

        def flip(slots: Sequence[memoryview]) -> None:
            for slot in slots:
                if self._draw.random() < 0.3:
                    slot[self._draw.randrange(LAYOUT.payload_bytes)] ^= 1

        self._cluster.spoil_arena(flip)

    async def _evict(self) -> None:
        self._draw.choice([self._cluster.move_to_cold, self._cluster.empty_arena])()

    async def _expire(self) -> None:
        """Every lease and every hold is over."""
        self._cluster.clock.now += 100.0

    def _someone(self) -> str:
        return self._draw.choice([name for name in self._cluster.listed if name in self._cluster.mortals])

    async def _some_time(self) -> None:
        await asyncio.sleep(self._draw.random() * 0.02)


def _role(name: str) -> Role:
    return Role.PREFILL if name.startswith("p") else Role.DECODE


@pytest.mark.parametrize("seed", seeds(NUM_SEEDS, FAILED_ONCE))
async def test_everything_at_once(seed: int, quiet: list[list[ChoiceAnswer]]) -> None:
    with repeated_by("pytest tests/faults/test_random_mix.py", seed):
        async with FaultyCluster.running(MODEL, 2, 2, SIZES) as cluster:
            cluster.replace_dead = True
            await Mix(cluster, random.Random(seed), quiet).run()
            await at_rest(cluster)
