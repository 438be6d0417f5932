"""Clients that keep a cluster busy, each with its own prompts, and know what must come of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

from engine.model.hash_model import HashModel
from tests.harness.answer import ask
from tests.harness.cluster import until
from tests.harness.faulty_cluster import FaultyCluster


@dataclass
class Load:
    """`num_clients` at a time ask one question after another until told to stop; what goes wrong is raised then."""

    cluster: FaultyCluster
    model: HashModel
    num_clients: int = 8
    num_prompt: int = 40
    num_tokens: int = 60
    num_answered: int = 0
    is_over: bool = False

    def __post_init__(self) -> None:
        self._numbers = count()

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(self.num_clients)))

    async def goes_on(self, num_answers: int = 8) -> None:
        """Returns after so many more answers."""
        wanted = self.num_answered + num_answers
        await until(lambda: self.num_answered >= wanted)

    async def _client(self) -> None:
        while not self.is_over:
            number = next(self._numbers)
            prompt = tuple((number * 17 + position) % 300 for position in range(self.num_prompt + number % 16))
            [choice] = await self.cluster.answer(ask(prompt, self.num_tokens))
            assert choice.token_ids == self.model.oracle(prompt, self.num_tokens)
            self.num_answered += 1


@asynccontextmanager
async def under_load(load: Load) -> AsyncIterator[Load]:
    """Load from the first answers on; leaves when all that were asked are answered, without an error."""
    running = asyncio.create_task(load.run())
    try:
        await until(lambda: load.num_answered >= load.num_clients or running.done())
        yield load
    finally:
        load.is_over = True
        await running
