from deploy.actors.liveness import MAX_GAP_S, MAX_SILENCE_S, Watch
from deploy.actors.worker_host import Life


def silent(watch: Watch, *times_s: float) -> list[str | None]:
    return [watch.judge(Life.SILENT, now_s) for now_s in times_s]


def test_a_process_that_is_dead_is_given_up_at_once() -> None:
    assert Watch().judge(Life.DEAD, 0.0) == "was lost"


def test_a_process_that_is_silent_is_given_up_after_a_while() -> None:
    watch = Watch()
    assert silent(watch, *range(100, 131)) == [None] * 31
    assert silent(watch, 131.0) == ["was silent for 31 s, and is ended"]


def test_an_answer_ends_the_silence() -> None:
    watch = Watch()
    assert silent(watch, *range(31)) == [None] * 31
    assert watch.judge(Life.ANSWERING, 31.0) is None
    assert silent(watch, *range(32, 63)) == [None] * 31


def test_a_looker_that_slept_does_not_count_its_sleep() -> None:
    watch = Watch()
    num_looks = int((MAX_SILENCE_S - 1) // MAX_GAP_S)
    assert silent(watch, *(hour * 3600.0 for hour in range(1 + num_looks))) == [None] * (1 + num_looks)
