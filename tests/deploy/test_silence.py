from deploy.silence import MAX_GAP_S, Silence


def test_grows_from_the_first_look_in_vain() -> None:
    silence = Silence()
    assert [silence.goes_on(now_s) for now_s in (100.0, 101.0, 103.5, 103.5)] == [0.0, 1.0, 3.5, 3.5]


def test_a_looker_that_slept_does_not_count_its_sleep() -> None:
    silence = Silence()
    silence.goes_on(0.0)
    assert silence.goes_on(1.0) == 1.0
    assert silence.goes_on(36_000.0) == 1.0 + MAX_GAP_S
    assert silence.goes_on(36_001.0) == 2.0 + MAX_GAP_S
