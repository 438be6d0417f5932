from router.requests.quarantine import Quarantine
from wire.ids import BlockKey


def key(number: int) -> BlockKey:
    return BlockKey(bytes([number]))


def test_holds_for_a_time() -> None:
    quarantine = Quarantine(ttl_s=10.0)
    quarantine.add(key(1), now_s=0.0)
    assert [quarantine.holds(key(number), now_s=9.9) for number in (1, 2)] == [True, False]
    assert not quarantine.holds(key(1), now_s=10.0)


def test_holds_the_latest() -> None:
    quarantine = Quarantine(max_prompts=2)
    for number in (1, 2, 1, 3):
        quarantine.add(key(number), now_s=0.0)
    assert [quarantine.holds(key(number), now_s=1.0) for number in (1, 2, 3)] == [True, False, True]
