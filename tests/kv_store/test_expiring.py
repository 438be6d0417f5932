from weakref import WeakSet

from kv_store.node.expiring import Expiring
from tests.harness.fake_clock import FakeClock


def test_values_are_taken_out_in_the_order_of_their_ends() -> None:
    clock = FakeClock()
    values: Expiring[str, int] = Expiring(clock)
    for name, ttl_s in (("late", 3.0), ("soon", 1.0), ("middle", 2.0), ("gone", 1.5)):
        values.put(name, len(name), ttl_s)
    assert values.pop("gone") == 4
    clock.now += 0.9
    assert values.expire() == []
    clock.now += 1.1
    assert values.expire() == [len("soon"), len("middle")]
    assert (len(values), values.get("late"), values.get("soon")) == (1, 4, None)


def test_a_second_put_never_shortens_a_life() -> None:
    clock = FakeClock()
    values: Expiring[str, int] = Expiring(clock)
    values.put("a", 1, 5.0)
    values.put("a", 2, 1.0)
    clock.now += 4.0
    assert values.expire() == []
    values.put("a", 3, 3.0)
    clock.now += 2.0
    assert (values.expire(), values.items()) == ([], [("a", 3)])
    clock.now += 1.0
    assert values.expire() == [3]


def test_a_value_put_after_a_pop_has_a_life_of_its_own() -> None:
    clock = FakeClock()
    values: Expiring[str, int] = Expiring(clock)
    values.put("a", 1, 5.0)
    values.pop("a")
    values.put("a", 2, 1.0)
    clock.now += 1.0
    assert values.expire() == [2]
    assert values.pop("a") is None
    clock.now += 10.0
    assert values.expire() == []


class Key:
    """A key that can be watched."""


def test_keys_that_are_put_and_popped_are_forgotten_before_their_ends() -> None:
    values: Expiring[Key, int] = Expiring(FakeClock())
    alive: WeakSet[Key] = WeakSet()
    kept = Key()
    values.put(kept, 0, 3600.0)
    for nth in range(5_000):
        key = Key()
        alive.add(key)
        values.put(key, nth, 3600.0)
        values.pop(key)
    assert len(alive) < 2_000
    assert values.items() == [(kept, 0)]
