from kv_store.breaker import Breaker
from tests.kv_store.fake_clock import FakeClock


def failed(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        assert breaker.allows()
        breaker.failed()


def test_it_opens_after_three_failures_in_a_row_and_not_before() -> None:
    breaker = Breaker(FakeClock())
    failed(breaker, 2)
    breaker.succeeded()
    failed(breaker, 2)
    assert not breaker.is_open
    failed(breaker, 1)
    assert breaker.is_open
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
    breaker.succeeded()
    assert not breaker.is_open
    assert breaker.allows()
