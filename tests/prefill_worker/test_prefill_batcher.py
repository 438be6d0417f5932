from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.schedule.batcher import Candidate, Gate, Pages, Phase
from prefill_worker.behaviour import PrefillBatcher, least_chunk_tokens
from tests.harness.candidates import deferred, fetching, owned, pages, prompt
from wire.layout import KVLayout

PATIENCE = 100


def batcher(max_step_tokens: int = 64, max_running: int = 8) -> PrefillBatcher:
    return PrefillBatcher(max_step_tokens, max_running, PATIENCE)


@pytest.mark.parametrize(("num_allocatable", "gate"), [(99, Gate.SLOT), (4, Gate.PAGES)])
def test_names_what_the_queue_waits_for(num_allocatable: int, gate: Gate) -> None:
    waiting = [prompt(handle, 40) for handle in range(3)]
    assert batcher(max_running=2).plan(waiting, [], pages(num_allocatable)).gate is gate


@pytest.mark.parametrize(
    ("running", "run"),
    [
        pytest.param([prompt(0, 30), prompt(1, 20)], {0: 30, 1: 20}, id="all that fits runs"),
        pytest.param([prompt(0, 500), prompt(1, 40)], {1: 40, 0: 24}, id="a short one passes a long one"),
        pytest.param([prompt(0, 500, 448), prompt(1, 90)], {0: 52, 1: 12}, id="what is left counts, not the length"),
        pytest.param([prompt(0, 500), prompt(6, 40)], {0: 64}, id="six later arrivals outweigh 500 tokens"),
        pytest.param([fetching(0, 40), prompt(1, 40)], {1: 40}, id="one that fetches does not run"),
        pytest.param([deferred(prompt(0, 40)), prompt(1, 60)], {1: 60, 0: 4}, id="a deferred one is last"),
        pytest.param([deferred(prompt(0, 60)), deferred(prompt(1, 40))], {0: 60, 1: 4}, id="deferred ones in order"),
    ],
)
def test_the_step_goes_to_the_prompt_with_the_least_left_aged(running: list[Candidate], run: dict[int, int]) -> None:
    assert batcher().plan((), running, pages(100)).run == run


@pytest.mark.parametrize(
    ("waiting", "running", "num_allocatable", "admit"),
    [
        pytest.param([prompt(0, 30), prompt(1, 20)], [], 10, (0, 1), id="the older of two alike first"),
        pytest.param([prompt(0, 400), prompt(1, 20)], [], 40, (1, 0), id="a short one passes"),
        pytest.param([prompt(0, 400), prompt(1, 20)], [], 20, (1,), id="whole prompts only"),
        pytest.param([prompt(0, 400), prompt(5, 20)], [], 20, (), id="nobody passes one that waited long enough"),
        pytest.param([prompt(5, 20)], [prompt(0, 400, 160)], 17, (), id="pages of a running prompt's rest are taken"),
        pytest.param([prompt(5, 20)], [prompt(0, 400, 160)], 18, (5,), id="what is left over is free to have"),
        pytest.param([prompt(5, 31)], [fetching(0, 31)], 2, (5,), id="one that fetches has its pages already"),
        pytest.param([prompt(n, 1) for n in range(9)], [], 99, tuple(range(8)), id="no more than may run"),
    ],
)
def test_admission(
    waiting: list[Candidate], running: list[Candidate], num_allocatable: int, admit: tuple[int, ...]
) -> None:
    assert batcher().plan(waiting, running, pages(num_allocatable)).admit == admit


@pytest.mark.parametrize(
    ("num_tokens", "num_cached", "chunks"),
    [
        pytest.param(2048, 0, [1024, 512, 256, 256], id="halves"),
        pytest.param(8000, 0, [2048, 2048, 1952, 976, 496, 256, 224], id="halves behind the bound of a step"),
        pytest.param(2000, 992, [512, 256, 240], id="halves of what no cache has"),
        pytest.param(1001, 0, [512, 256, 233], id="ends of chunks are ends of blocks"),
        pytest.param(384, 0, [384], id="half a chunk more is no further chunk"),
        pytest.param(385, 0, [256, 129], id="more is one"),
        pytest.param(100, 0, [100], id="a short prompt is whole"),
    ],
)
def test_the_last_chunks_of_a_prompt_without_others_halve(num_tokens: int, num_cached: int, chunks: list[int]) -> None:
    halving = PrefillBatcher(2048, 8, PATIENCE, least_chunk_tokens=256)
    ran: list[int] = []
    while (done := num_cached + sum(ran)) < num_tokens:
        ran += halving.plan((), [prompt(0, num_tokens, done)], pages(1000)).run.values()
    assert ran == chunks


@pytest.mark.parametrize(
    ("waiting", "running"),
    [([prompt(1, 9)], [prompt(0, 999)]), ([], [prompt(0, 999), prompt(1, 9)]), ([], [prompt(0, 999), fetching(1, 9)])],
)
def test_a_prompt_with_others_behind_it_is_not_cut(waiting: list[Candidate], running: list[Candidate]) -> None:
    halving = PrefillBatcher(2048, 8, PATIENCE, least_chunk_tokens=16)
    assert halving.plan(waiting, running, pages(1000)).run[0] == 999


def test_a_chunk_that_ends_earlier_stays_so() -> None:
    halving = PrefillBatcher(2048, 8, PATIENCE, least_chunk_tokens=16)
    split = replace(prompt(0, 400), chunk_end=48)
    assert halving.plan((), [split], pages(1000)).run == {0: 48}


@pytest.mark.parametrize(
    ("waiting", "admit"),
    [
        pytest.param([owned(prompt(n, 30), "a") for n in range(4)], (0, 1, 2, 3), id="one tenant, as ever"),
        pytest.param(
            [*(owned(prompt(n, 30), "a") for n in range(3)), owned(prompt(9, 300), "b")],
            (0, 9, 1, 2),
            id="a long prompt of a tenant that has not had any passes all but the first",
        ),
        pytest.param(
            [owned(prompt(0, 30), "a", 99), owned(prompt(1, 30), "a", 99), owned(prompt(9, 30), "b", 0)],
            (9, 0, 1),
            id="of a tenant that had less, all",
        ),
        pytest.param(
            [owned(prompt(0, 30), "a"), owned(prompt(1, 30), "a", priority=-1), owned(prompt(2, 30), "b")],
            (1, 2, 0),
            id="a priority is its tenant's own",
        ),
    ],
)
def test_tenants_are_admitted_by_shares(waiting: list[Candidate], admit: tuple[int, ...]) -> None:
    assert batcher().plan(waiting, [], pages(100)).admit == admit


FULL = [owned(prompt(n, 60, 16 if n else 48), "a", 500) for n in range(4)]
"""Prompts that lack three pages each, but for the first, which lacks one."""


@pytest.mark.parametrize(
    ("running", "waiting", "num_allocatable", "preempt"),
    [
        pytest.param(FULL, [owned(prompt(9, 60), "b", 20)], 10, (3,), id="the least urgent prompt makes room"),
        pytest.param(FULL, [owned(prompt(9, 90), "b", 20)], 10, (3, 2), id="or as many as that takes"),
        pytest.param(FULL, [owned(prompt(9, 600), "b", 20)], 10, (), id="none if all would not do"),
        pytest.param(FULL, [owned(prompt(9, 60), "a", 500)], 10, (), id="none for a prompt of their tenant"),
        pytest.param(
            [*FULL[:3], owned(prompt(3, 60, 16), "b", 20)],
            [owned(prompt(9, 60), "b", 20)],
            10,
            (),
            id="nor of one that runs",
        ),
        pytest.param(
            [FULL[0], *(owned(prompt(n, 60, 16), "cde"[n - 1], 500) for n in range(1, 4))],
            [owned(prompt(9, 60), "b", 20)],
            10,
            (),
            id="a tenant keeps its only prompt",
        ),
    ],
)
def test_a_tenant_without_a_running_prompt_finds_room(
    running: list[Candidate], waiting: list[Candidate], num_allocatable: int, preempt: tuple[int, ...]
) -> None:
    plan = batcher(max_step_tokens=999).plan(waiting, running, pages(num_allocatable))
    assert (plan.preempt, plan.admit) == (preempt, (9,) if preempt else ())
    assert not set(plan.run) & set(preempt)


def test_a_tenant_without_a_running_prompt_finds_a_slot() -> None:
    plan = batcher(max_running=4).plan([owned(prompt(9, 60), "b", 20)], FULL, pages(99))
    assert plan.preempt == (3,)


def test_a_step_goes_to_the_tenant_that_had_less() -> None:
    running = [owned(prompt(0, 100), "a", 500), owned(prompt(1, 40), "b", 480), owned(prompt(2, 40), "b", 480)]
    assert batcher().plan((), running, pages(100)).run == {1: 40, 0: 24}


def test_the_least_chunk_has_as_much_kv_as_a_device_moves_at_once() -> None:
    large = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
    assert least_chunk_tokens(large) == 256
    assert least_chunk_tokens(replace(large, num_layers=1, num_kv_heads=3, head_dim=64)) > 2048


class Pool:
    """Carries out plans as an engine without prefix hits would, and checks that they can be carried out."""

    def __init__(self, num_pages: int, batcher: PrefillBatcher) -> None:
        self.free = num_pages
        self.waiting: list[Candidate] = []
        self.running: list[Candidate] = []
        self.done: list[int] = []
        self._batcher = batcher

    def step(self) -> None:
        room = pages(self.free)
        plan = self._batcher.plan(self.waiting, self.running, room)
        assert plan.preempt == ()
        self.running = [self._run(one, plan.run.get(one.handle, 0), room) for one in self.running]
        for one in [one for one in self.running if not one.num_missing]:
            self.free += one.num_blocks
            self.done.append(one.handle)
            self.running.remove(one)
        admitted = [one for one in self.waiting if one.handle in plan.admit]
        self.waiting = [one for one in self.waiting if one not in admitted]
        self.running = sorted([*self.running, *admitted], key=lambda one: one.handle)

    def _run(self, one: Candidate, num_tokens: int, room: Pages) -> Candidate:
        needed = room.needed(one, num_tokens)
        self.free -= needed
        assert self.free >= 0
        return Candidate(
            handle=one.handle,
            phase=Phase.PREFILL,
            num_known=one.num_known,
            num_computed=one.num_computed + num_tokens,
            num_blocks=one.num_blocks + needed,
        )


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3)), min_size=1, max_size=30), st.integers(20, 60))
def test_never_runs_out_of_pages_and_finishes_every_prompt(arrivals: list[tuple[int, int]], num_pages: int) -> None:
    pool = Pool(num_pages, batcher())
    for handle, (num_known, num_steps) in enumerate(arrivals):
        pool.waiting.append(prompt(handle, num_known))
        for _ in range(num_steps):
            pool.step()
    for _ in range(sum(num_known for num_known, _ in arrivals) + len(arrivals)):
        pool.step()
    assert sorted(pool.done) == list(range(len(arrivals)))
    assert pool.free == num_pages


@given(st.integers(100, 1000))
def test_a_long_prompt_is_passed_by_a_bounded_number_of_short_ones(num_known: int) -> None:
    pool = Pool(80, batcher(max_step_tokens=32))
    pool.waiting.append(prompt(0, num_known))
    handle = 0
    while 0 not in pool.done:
        handle += 1
        pool.waiting.append(prompt(handle, 32))
        pool.step()
    passed = len(pool.done) - 1
    assert passed <= num_known / PATIENCE + 1
