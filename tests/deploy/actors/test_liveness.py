from deploy.actors.liveness import MAX_GAP_S, MAX_SILENCE_S, FailureDetector, Liveness


def silent(detector: FailureDetector, *times_s: float) -> list[str | None]:
    return [detector.judge(Liveness.SILENT, now_s) for now_s in times_s]


def test_a_process_that_is_dead_is_given_up_at_once() -> None:
    assert FailureDetector().judge(Liveness.DEAD, 0.0) == "was lost"


def test_a_process_that_is_silent_is_given_up_after_a_while() -> None:
    detector = FailureDetector()
    assert silent(detector, *range(100, 131)) == [None] * 31
    assert silent(detector, 131.0) == ["was silent for 31 s, and is ended"]


def test_an_answer_ends_the_silence() -> None:
    detector = FailureDetector()
    assert silent(detector, *range(31)) == [None] * 31
    assert detector.judge(Liveness.ANSWERING, 31.0) is None
    assert silent(detector, *range(32, 63)) == [None] * 31


def test_a_prober_that_slept_does_not_count_its_sleep() -> None:
    detector = FailureDetector()
    num_probes = int((MAX_SILENCE_S - 1) // MAX_GAP_S)
    assert silent(detector, *(hour * 3600.0 for hour in range(1 + num_probes))) == [None] * (1 + num_probes)
