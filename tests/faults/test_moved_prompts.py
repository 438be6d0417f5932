"""Prompts that wait at a prefill worker move to one that has started since: nothing is lost or computed twice."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from router import moves
from router.workers import members
from tests.faults.rest import at_rest
from tests.harness.answer import Reader, ask
from tests.harness.cluster import until
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.known_model import MODEL
from tests.harness.local_cluster import Sizes
from wire.errors import Cancelled
from wire.ids import DEFAULT_TENANT, WorkerId
from wire.load.fairness import BURST, OUTPUT_COST
from wire.pb import inference_pb2 as pb
from wire.pools import Role, WorkerState
from worker.config import BatchSettings

SIZES = Sizes(batch=BatchSettings(max_step_tokens=16, max_running=4, max_chunk_tokens=12))
"""A prompt takes several steps; others have pages already, and have not begun."""
NUM_REQUESTS, NUM_MOVED, NUM_PROMPT, NUM_TOKENS = 6, 3, 89, 8


def prompt_of(number: int) -> tuple[int, ...]:
    return tuple((number * 11 + position) % 300 for position in range(NUM_PROMPT))


@pytest.fixture(autouse=True)
def every_gain_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """However quick the models are; and no engine counts as silent, however long a test keeps it in a step."""
    monkeypatch.setattr(moves, "LEAST_GAIN_S", 0.0)
    monkeypatch.setattr(members, "LONG_STEP_S", 1e6)


class Queue:
    """A cluster whose prefill worker p0 is in the first step of the first of some prompts."""

    def __init__(self, cluster: FaultyCluster) -> None:
        self.cluster = cluster
        self.requests = [
            cluster.router.dispatcher.open(ask(prompt_of(number), NUM_TOKENS), 60.0) for number in range(NUM_REQUESTS)
        ]

    async def grow(self) -> None:
        """Starts the worker p1, whose model does nothing yet; returns once the router has recalled prompts for it."""
        for member in self.cluster.router.members:
            member.prefill_token_s = 0.01
        assert await self.cluster.add(Role.PREFILL) == "p1"
        self.cluster.models["p1"].pause()
        await self.heard("p0")

    async def move(self, num_moved: int = NUM_MOVED) -> None:
        """Lets p0 go on to its next step; returns once the recalled prompts are at p1."""
        model = self.cluster.models["p0"]
        model.on_step = lambda _: model.pause()
        model.go_on()
        await until(lambda: self.num_attempts("p1") == num_moved)

    def go_on(self, *names: str) -> None:
        for name in names:
            self.cluster.models[name].on_step = lambda _: None
            self.cluster.models[name].go_on()

    async def crash(self, name: str) -> None:
        self.cluster.crash(name)
        await self.cluster.someone_died.wait()

    async def heard(self, name: str) -> None:
        """Returns once a worker has taken all that the router has sent so far."""
        await self.cluster.router.members[WorkerId(name)].line.questions.status(False, 30.0)

    def num_attempts(self, name: str) -> int:
        return len(self.cluster.workers[name].service.attempts)

    def num_computed(self, name: str) -> int:
        return self.cluster.workers[name].engine.stats().computed_prompt_tokens

    def metric(self, name: str) -> float | None:
        return self.cluster.router.metrics.registry.get_sample_value(f"baton_{name}_total")

    def check_charged(self, num_prompts: int) -> None:
        """Asserts that the tenant was charged for all answers, and for so many prompts."""
        spent = num_prompts * NUM_PROMPT + NUM_REQUESTS * OUTPUT_COST * NUM_TOKENS
        assert self.cluster.router.shares.spent(DEFAULT_TENANT) == pytest.approx(spent - BURST)

    async def answers(self, *numbers: int) -> list[pb.Complete]:
        """The ends of these requests, whose tokens must be right."""
        completes = []
        for number in numbers or range(NUM_REQUESTS):
            reader = Reader(self.requests[number].outbox)
            [choice] = await reader.read_all()
            assert choice.token_ids == MODEL.oracle(prompt_of(number), NUM_TOKENS)
            assert reader.complete is not None
            completes.append(reader.complete)
        return completes


@asynccontextmanager
async def queue() -> AsyncIterator[Queue]:
    async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
        await until(lambda: cluster.router.index.marks("") is not None)
        cluster.models["p0"].pause()
        queue = Queue(cluster)
        await until(lambda: queue.num_attempts("p0") == NUM_REQUESTS and cluster.models["p0"].num_steps == 1)
        yield queue
        queue.go_on(*cluster.models)
        await at_rest(cluster)


async def test_queued_prompts_move_to_a_worker_that_starts_and_nothing_is_computed_twice() -> None:
    async with queue() as queued:
        await queued.grow()
        await queued.move()
        queued.go_on("p0", "p1")
        completes = await queued.answers()
        assert [one.timeline.prefill_worker for one in completes] == ["p0"] * 3 + ["p1"] * NUM_MOVED
        assert [queued.num_computed(name) for name in ("p0", "p1")] == [3 * NUM_PROMPT, NUM_MOVED * NUM_PROMPT]
        assert (queued.metric("prompt_moves"), queued.metric("request_replays")) == (NUM_MOVED, 0)
        queued.check_charged(NUM_REQUESTS)


async def test_the_timeline_of_a_moved_prompt_has_both_queues_and_each_millisecond() -> None:
    async with queue() as queued:
        await queued.grow()
        await queued.move()
        queued.go_on("p0", "p1")
        timeline = (await queued.answers())[-1].timeline
        first, *others = [span for span in timeline.spans if span.name == "prefill.queue"]
        returned = [span for span in timeline.spans if span.error]
        assert [(span.worker, span.error) for span in returned] == [("p0", "PROMPT_RETURNED")]
        assert (first.worker, {span.worker for span in others}) == ("p0", {"p1"})
        for one, two in pairwise(timeline.spans):
            assert two.start_ms == pytest.approx(one.start_ms + one.duration_ms, abs=0.001)
        last = timeline.spans[-1]
        assert last.start_ms + last.duration_ms == pytest.approx(timeline.total_ms, abs=0.001)


async def test_a_worker_that_has_no_prompts_left_is_given_a_prompt_that_has_pages_elsewhere() -> None:
    async with queue() as queued:
        await queued.grow()
        await queued.move()
        queued.go_on("p1")
        await queued.answers(3, 4, 5)
        await queued.heard("p0")
        queued.go_on("p0")
        completes = await queued.answers(0, 1, 2)
        assert [one.timeline.prefill_worker for one in completes] == ["p0", "p0", "p1"]
        assert sum(map(queued.num_computed, ("p0", "p1"))) == NUM_REQUESTS * NUM_PROMPT


async def test_the_new_worker_dies_with_the_prompts_that_have_moved() -> None:
    async with queue() as queued:
        await queued.grow()
        await queued.move()
        await queued.crash("p1")
        queued.go_on("p0", "p1")
        completes = await queued.answers()
        assert {one.timeline.prefill_worker for one in completes} == {"p0"}
        assert queued.num_computed("p0") == NUM_REQUESTS * NUM_PROMPT
        assert queued.metric("request_replays") == NUM_MOVED
        queued.check_charged(NUM_REQUESTS + NUM_MOVED)  # as each attempt after a lost worker is; a move costs nothing


async def test_the_new_worker_dies_before_the_prompts_come() -> None:
    async with queue() as queued:
        await queued.grow()
        await queued.crash("p1")
        queued.go_on("p0", "p1")
        completes = await queued.answers()
        assert {one.timeline.prefill_worker for one in completes} == {"p0"}
        assert queued.num_computed("p0") == NUM_REQUESTS * NUM_PROMPT


async def test_the_worker_that_was_to_return_prompts_dies() -> None:
    async with queue() as queued:
        await queued.grow()
        await queued.crash("p0")
        queued.go_on("p0", "p1")
        completes = await queued.answers()
        assert {one.timeline.prefill_worker for one in completes} == {"p1"}
        assert queued.metric("prompt_moves") == 0


async def test_a_request_is_aborted_before_and_after_its_prompt_has_moved() -> None:
    async with queue() as queued:
        await queued.grow()
        queued.requests[5].stop(Cancelled("recalled, and not yet returned"))
        await queued.move(NUM_MOVED - 1)
        queued.requests[4].stop(Cancelled("at its new worker"))
        queued.go_on("p0", "p1")
        await queued.answers(0, 1, 2, 3)
        for number in (4, 5):
            with pytest.raises(Cancelled):
                await Reader(queued.requests[number].outbox).read_all()
        assert queued.cluster.router.members[WorkerId("p0")].state is WorkerState.READY, (
            "it has returned prompts, and is not lost"
        )
