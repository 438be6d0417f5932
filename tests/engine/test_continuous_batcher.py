from hypothesis import given
from hypothesis import strategies as st

from decode_worker.behaviour import DecodeBatcher
from engine.schedule.batcher import Candidate, Gate, fit_running
from engine.schedule.continuous_batcher import ContinuousBatcher
from prefill_worker.behaviour import PrefillBatcher
from tests.harness.candidates import BLOCK, decoding, fetching, pages, prompt


def test_decodes_come_before_chunks_and_chunks_take_what_is_left() -> None:
    plan = ContinuousBatcher(max_step_tokens=40).plan((), (prompt(0, 100), decoding(1, 20), decoding(2, 30)), pages(99))
    assert plan.run == {0: 38, 1: 1, 2: 1}


def test_chunk_shrinks_to_the_pages_there_are() -> None:
    plan = ContinuousBatcher().plan((), (prompt(0, 100),), pages(2))
    assert plan.run == {0: 2 * BLOCK}
    assert plan.preempt == ()


def test_names_what_the_queue_waits_for() -> None:
    batcher, waiting = ContinuousBatcher(max_running=2), (prompt(1, 40), prompt(2, 40))
    assert batcher.plan(waiting, (decoding(0, 20),), pages(99)).gate is Gate.SLOT
    assert batcher.plan(waiting, (), pages(4)).gate is Gate.PAGES
    assert batcher.plan(waiting, (decoding(0, BLOCK + 1), decoding(5, 40)), pages(0)).gate is Gate.PAGES


def test_youngest_yields_to_a_decode_that_needs_a_page() -> None:
    running = (decoding(0, BLOCK + 1), decoding(1, 40), decoding(2, 40))
    plan = ContinuousBatcher().plan((), running, pages(0))
    assert plan.preempt == (2,)
    assert plan.run == {0: 1, 1: 1}


def test_no_sequence_yields_while_pages_drain() -> None:
    plan = ContinuousBatcher().plan((), (decoding(0, BLOCK + 1), decoding(1, 40)), pages(0, num_draining=1))
    assert plan.preempt == ()
    assert plan.run == {1: 1}


def test_no_sequence_yields_to_a_younger_one() -> None:
    plan = ContinuousBatcher().plan((), (decoding(0, 40), decoding(1, BLOCK + 1)), pages(0))
    assert plan.preempt == ()
    assert plan.run == {0: 1}


def test_one_that_fetches_neither_runs_nor_yields() -> None:
    plan = ContinuousBatcher().plan((), (decoding(0, BLOCK + 1), fetching(1, 64)), pages(0))
    assert plan.preempt == ()
    assert plan.run == {}


def test_admits_in_order_and_stops_at_the_first_that_does_not_fit() -> None:
    waiting = (prompt(5, 31), prompt(6, 200), prompt(7, 3))
    assert ContinuousBatcher().plan(waiting, (), pages(10)).admit == (5,)


def test_admits_no_sequence_while_another_must_yield() -> None:
    plan = ContinuousBatcher().plan((prompt(9, 1),), (decoding(0, BLOCK + 1), decoding(1, 40)), pages(0))
    assert plan.preempt == (1,)
    assert plan.admit == ()


def test_admits_no_more_than_may_run() -> None:
    plan = ContinuousBatcher(max_running=2).plan((prompt(5, 3), prompt(6, 3)), (decoding(0, 20),), pages(100))
    assert plan.admit == (5,)


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    made = []
    for handle in range(draw(st.integers(1, 12))):
        known = draw(st.integers(1, 150))
        make = draw(st.sampled_from([prompt, decoding, fetching]))
        made.append(make(handle, known))
    return made


@given(candidates(), st.integers(0, 20), st.integers(1, 300))
def test_fit_never_spends_more_than_there_is(running: list[Candidate], num_allocatable: int, max_tokens: int) -> None:
    room = pages(num_allocatable)
    step = fit_running(running, room, max_tokens)
    by_handle = {candidate.handle: candidate for candidate in running}
    freed = sum(by_handle[handle].num_blocks for handle in step.preempt)
    spent = sum(room.needed(by_handle[handle], num) for handle, num in step.run.items())
    assert spent + step.num_allocatable == num_allocatable + freed
    assert step.num_allocatable >= 0
    assert not set(step.run) & set(step.preempt)
    assert all(0 < num <= by_handle[handle].num_missing for handle, num in step.run.items())


@given(candidates(), st.integers(0, 20), st.integers(64, 300))
def test_the_oldest_progresses_unless_fetches_hold_the_pages(
    running: list[Candidate], num_allocatable: int, max_tokens: int
) -> None:
    runnable = [candidate for candidate in running if candidate.num_missing]
    others = sum(candidate.num_blocks for candidate in runnable[1:])
    if runnable and pages(0).needed(runnable[0], 1) <= num_allocatable + others:
        assert runnable[0].handle in fit_running(running, pages(num_allocatable), max_tokens).run


def test_the_last_token_of_a_prompt_is_no_decode() -> None:
    """It takes part in the chunks' share of a step, and waits while decoding sequences take all of it."""
    running = (decoding(0, 20), prompt(1, 33, 32), prompt(2, 33, 32))
    assert fit_running(running, pages(99), max_step_tokens=2).run == {0: 1, 1: 1}


@given(st.lists(st.integers(2, 150), min_size=1, max_size=12), st.integers(0, 3))
def test_sequences_that_all_decode_run_a_token_each_if_there_are_pages(lens: list[int], num_spare: int) -> None:
    """As an engine takes for granted, without a plan."""
    running = [decoding(handle, num_known) for handle, num_known in enumerate(lens)]
    room = pages(sum(pages(0).needed(one, 1) for one in running) + num_spare)
    for batcher in (ContinuousBatcher(max_step_tokens=1), DecodeBatcher(1, 1, 1), PrefillBatcher(1, 1, 1)):
        plan = batcher.plan((), running, room)
        assert plan.run == dict.fromkeys(range(len(lens)), 1)
        assert plan.preempt == plan.admit == ()
