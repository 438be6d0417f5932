from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.behaviour import DecodeBatcher
from engine.schedule.batcher import Candidate, Gate, Phase, StepCosts
from tests.harness.candidates import BLOCK, decoding, fetching, owned, pages, prompt
from wire.load.fairness import ALONE

BATCHER = DecodeBatcher(max_step_tokens=100, max_running=8, max_chunk_tokens=32)


@pytest.mark.parametrize(
    ("running", "run"),
    [
        pytest.param([decoding(0, 20), decoding(1, 30)], {0: 1, 1: 1}, id="all decode"),
        pytest.param([prompt(0, 300)], {0: 100}, id="without anyone to hold up, the whole step"),
        pytest.param([prompt(0, 300), decoding(1, 30)], {0: 32, 1: 1}, id="beside one that decodes, a chunk"),
        pytest.param(
            [prompt(0, 20), prompt(1, 300), decoding(2, 30)], {0: 20, 1: 12, 2: 1}, id="all chunks share one bound"
        ),
        pytest.param([fetching(0, 20), prompt(1, 300)], {1: 100}, id="one that fetches is not held up"),
    ],
)
def test_decode_comes_first_and_chunks_are_bounded(running: list[Candidate], run: dict[int, int]) -> None:
    assert BATCHER.plan((), running, pages(100)).run == run


@given(st.integers(1, 8), st.integers(1, 2000), st.floats(0, 0.2), st.floats(1e-7, 0.01))
def test_a_bound_of_time_gives_no_step_that_is_not_warmed(
    num_decoding: int, num_known: int, decode_s: float, token_s: float
) -> None:
    """Workers compile for max_step_tokens."""
    by_time = DecodeBatcher(max_step_tokens=100, max_running=8, max_chunk_tokens=100, max_gap_s=0.05)
    running = [*(decoding(handle, 30) for handle in range(num_decoding)), prompt(8, num_known)]
    run = by_time.plan((), running, pages(500), StepCosts(decode_s, token_s)).run
    assert min(BLOCK, num_known) <= run[8] <= 100 - num_decoding


def test_tenants_are_admitted_by_shares() -> None:
    waiting = [*(owned(prompt(n, 20), "a") for n in range(3)), owned(prompt(9, 20), "b")]
    assert BATCHER.plan(waiting, [], pages(100)).admit == (0, 9, 1, 2)


def test_pages_run_out_for_the_tenant_that_had_more() -> None:
    running = [owned(decoding(0, 33), "a", 900), owned(decoding(1, 32), "a", 900), owned(decoding(2, 33), "b", 20)]
    assert BATCHER.plan((), running, pages(0)).preempt == (1,)
    assert BATCHER.plan((), [replace(one, standing=ALONE) for one in running], pages(0)).preempt == (2,)


def test_names_what_the_queue_waits_for() -> None:
    waiting = [prompt(handle, 40) for handle in range(8, 10)]
    assert BATCHER.plan(waiting, [decoding(handle, 20) for handle in range(7)], pages(100)).gate is Gate.SLOT
    assert BATCHER.plan(waiting, [decoding(0, 20)], pages(4)).gate is Gate.PAGES


@pytest.mark.parametrize(
    ("waiting", "running", "num_allocatable", "admit"),
    [
        pytest.param([prompt(5, 15)], [], 1, (5,), id="known tokens and the next one fit"),
        pytest.param([prompt(5, 16)], [], 1, (), id="the next one does not fit"),
        pytest.param([prompt(5, 15)], [decoding(0, 20)], 1, (), id="a spare page for each that runs"),
        pytest.param([prompt(5, 15)], [decoding(0, 20)], 2, (5,), id="spare page left"),
        pytest.param([prompt(5, 15)], [prompt(0, 100, 16)], 7, (), id="pages of what is yet to compute are taken"),
        pytest.param([prompt(5, 15)], [prompt(0, 100, 16)], 8, (5,), id="and one more is free to have"),
        pytest.param([prompt(5, 200), prompt(6, 1)], [], 9, (), id="nobody passes the oldest"),
    ],
)
def test_admission(
    waiting: list[Candidate], running: list[Candidate], num_allocatable: int, admit: tuple[int, ...]
) -> None:
    assert BATCHER.plan(waiting, running, pages(num_allocatable)).admit == admit


def test_admits_no_more_than_may_run() -> None:
    running = [decoding(handle, 20) for handle in range(7)]
    assert BATCHER.plan([prompt(8, 1), prompt(9, 1)], running, pages(100)).admit == (8,)


def test_the_youngest_is_preempted_and_nothing_is_then_admitted() -> None:
    running = [decoding(0, BLOCK + 1), decoding(1, 40), decoding(2, 40)]
    plan = BATCHER.plan([prompt(9, 1)], running, pages(0))
    assert plan.preempt == (2,)
    assert plan.run == {0: 1, 1: 1}
    assert plan.admit == ()


class Pool:
    """Carries out plans as an engine without prefix hits would; each sequence wants so many tokens in all."""

    def __init__(self, num_pages: int) -> None:
        self.free = num_pages
        self.waiting: list[Candidate] = []
        self.running: list[Candidate] = []
        self.goals: dict[int, int] = {}
        self.done: list[int] = []

    def arrive(self, handle: int, num_known: int, num_output: int) -> None:
        self.waiting.append(prompt(handle, num_known))
        self.goals[handle] = num_known + num_output

    def step(self) -> None:
        oldest = self.running[0] if self.running else None
        plan = BATCHER.plan(self.waiting, self.running, pages(self.free))
        if oldest is not None:
            assert plan.run.get(oldest.handle, 0) > 0
        self._preempt(plan.preempt)
        self.running = [self._run(one, plan.run.get(one.handle, 0)) for one in self.running]
        self._finish()
        admitted = [one for one in self.waiting if one.handle in plan.admit]
        self.waiting = [one for one in self.waiting if one not in admitted]
        self.running = sorted([*self.running, *admitted], key=lambda one: one.handle)

    def _preempt(self, handles: tuple[int, ...]) -> None:
        for one in [one for one in self.running if one.handle in handles]:
            self.free += one.num_blocks
            self.running.remove(one)
            self.waiting = sorted([*self.waiting, prompt(one.handle, one.num_known)], key=lambda one: one.handle)

    def _run(self, one: Candidate, num_tokens: int) -> Candidate:
        needed = pages(0).needed(one, num_tokens)
        self.free -= needed
        assert self.free >= 0
        num_computed = one.num_computed + num_tokens
        is_sampled = num_computed == one.num_known
        num_known, phase = one.num_known + is_sampled, Phase.DECODE if is_sampled else one.phase
        return Candidate(
            handle=one.handle,
            phase=phase,
            num_known=num_known,
            num_computed=num_computed,
            num_blocks=one.num_blocks + needed,
        )

    def _finish(self) -> None:
        for one in [one for one in self.running if one.num_known == self.goals[one.handle]]:
            self.free += one.num_blocks
            self.done.append(one.handle)
            self.running.remove(one)


arrivals_of_at_most_20_pages = st.lists(
    st.tuples(st.integers(1, 200), st.integers(1, 100), st.integers(0, 3)), min_size=1, max_size=20
)


@given(arrivals_of_at_most_20_pages, st.integers(20, 60))
def test_the_oldest_always_progresses_and_pages_never_run_out(
    arrivals: list[tuple[int, int, int]], num_pages: int
) -> None:
    pool = Pool(num_pages)
    for handle, (num_known, num_output, num_steps) in enumerate(arrivals):
        pool.arrive(handle, num_known, num_output)
        for _ in range(num_steps):
            pool.step()
    for _ in range(sum(num_known + num_output + 2 for num_known, num_output, _ in arrivals)):
        pool.step()
    assert sorted(pool.done) == list(range(len(arrivals)))
    assert pool.free == num_pages
