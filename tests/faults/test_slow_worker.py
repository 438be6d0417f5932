"""A decode worker that is ten times slower than the other: work finds the faster one, and is not tried twice."""

import asyncio
import time
from collections import Counter
from itertools import count

from tests.faults.rest import at_rest
from tests.harness.answer import ask
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.known_model import MODEL, prompt_of
from tests.harness.local_cluster import Sizes

TIMES_SLOWER = 10
MAX_STEP_S = 1.0
NUM_CLIENTS = 6
NUM_TOKENS = 20
MIN_NUM_BY_FAST = 40


class Clients:
    """Six at a time, each asking one question after another, until d1 has answered forty."""

    def __init__(self, cluster: FaultyCluster) -> None:
        self.num_by_worker: Counter[str] = Counter()
        self._cluster = cluster
        self._numbers = count()

    @property
    def are_done(self) -> bool:
        return self.num_by_worker["d1"] >= MIN_NUM_BY_FAST

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(NUM_CLIENTS)))

    async def _client(self) -> None:
        while not self.are_done:
            number = next(self._numbers)
            reader = self._cluster.open(ask(prompt_of(number), NUM_TOKENS))
            [choice] = await reader.read_all()
            assert choice.token_ids == MODEL.oracle(prompt_of(number), NUM_TOKENS)
            assert reader.complete is not None
            [by] = [span.worker for span in reader.complete.timeline.spans if span.name == "decode.queue"]
            self.num_by_worker[by] += 1


async def test_it_gets_less_of_the_work() -> None:
    async with FaultyCluster.running(MODEL, 1, 2, Sizes()) as cluster:
        clients, fast = Clients(cluster), cluster.models["d1"]

        def be_slow(number: int) -> None:
            """A step for every ten of the other; alone, one a second."""
            give_up = time.monotonic() + MAX_STEP_S
            while fast.num_steps < TIMES_SLOWER * number and time.monotonic() < give_up and not clients.are_done:
                time.sleep(0.001)

        cluster.models["d0"].on_step = be_slow
        await clients.run()
        assert clients.num_by_worker["d0"] < MIN_NUM_BY_FAST / 3
        assert cluster.dead == []
        await at_rest(cluster)
