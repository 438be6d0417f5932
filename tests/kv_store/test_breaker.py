from kv_store.connection import Breaker
from tests.harness.fake_clock import FakeClock


def failed(breaker: Breaker, times: int) -> list[bool]:
    """Lets so many calls fail that it allows; whether it is open after each."""
    seen = []
    for _ in range(times):
        assert breaker.allows()
        breaker.failed()
        seen.append(breaker.is_open)
    return seen


def test_it_opens_after_three_failures_in_a_row_and_not_before() -> None:
    breaker = Breaker(FakeClock())
    assert failed(breaker, 2) == [False, False]
    breaker.succeeded()
    assert failed(breaker, 3) == [False, False, True]
    assert not breaker.allows()


def test_it_lets_one_probe_through_every_two_seconds() -> None:
    clock = FakeClock()
    breaker = Breaker(clock)
    failed(breaker, 3)
    clock.now += 1.9
    assert not breaker.allows()
    clock.now += 0.1
    assert [breaker.allows(), breaker.allows()] == [True, False]
    breaker.failed()
    assert breaker.is_open
    clock.now += 1.9
    assert not breaker.allows()
    clock.now += 0.1
    assert breaker.allows()


def test_a_probe_that_succeeds_closes_it() -> None:
    clock = FakeClock()
    breaker = Breaker(clock)
    failed(breaker, 3)
    clock.now += 2.0
    assert failed(breaker, 1) == [True]
    clock.now += 2.0
    assert breaker.allows()
    breaker.succeeded()
    assert not breaker.is_open
    assert breaker.allows()
