from wire.tier import MAX_RUNS, Cause, Miss, MissRun, runs_of, without_blocks, words_of


def test_consecutive_blocks_of_one_cause_are_a_run_with_the_first_ones_age() -> None:
    misses = [
        Miss(Cause.EVICTED, "x", 5.0),
        Miss(Cause.EVICTED, "x", 4.0),
        Miss(Cause.EVICTED, "y"),
        Miss(Cause.PARTIAL),
    ]
    assert runs_of(misses, 2, 16) == (
        MissRun(Miss(Cause.EVICTED, "x", 5.0), 32, 2),
        MissRun(Miss(Cause.EVICTED, "y"), 64, 1),
        MissRun(Miss(Cause.PARTIAL), 80, 1),
    )
    assert runs_of([], 0, 16) == ()


def test_the_last_run_has_all_blocks_of_too_many_runs() -> None:
    misses = [Miss(Cause.EVICTED, str(number % 2)) for number in range(100)]
    runs = runs_of(misses, 0, 1)
    assert len(runs) == MAX_RUNS
    assert runs[-1] == MissRun(Miss(Cause.BEHIND), MAX_RUNS - 1, 100 - MAX_RUNS + 1)
    assert sum(run.num_blocks for run in runs) == 100


def test_every_cause_has_words() -> None:
    for cause in Cause:
        assert words_of(MissRun(Miss(cause, "how", 7200.0), 32, 2)).startswith("2 blocks from token 32: ")


def test_blocks_that_were_found_later_are_taken_out_of_runs() -> None:
    runs = (MissRun(Miss(Cause.CHEAPER), 32, 4), MissRun(Miss(Cause.PARTIAL), 96, 1))
    assert without_blocks(runs, range(48, 80), 16) == (
        MissRun(Miss(Cause.CHEAPER), 32, 1),
        MissRun(Miss(Cause.CHEAPER), 80, 1),
        runs[1],
    )
    assert without_blocks(runs, range(32), 16) == runs
    assert without_blocks(runs, range(200), 16) == ()
    assert len(without_blocks([MissRun(Miss(Cause.CHEAPER), 16 * n, 1) for n in range(90)], range(0), 16)) == MAX_RUNS
