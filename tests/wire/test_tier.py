from wire.tier import MAX_RUNS, Cause, Disposition, Miss, MissRun, Tier, runs_of, words_of


def test_consecutive_blocks_of_one_cause_are_a_run_with_the_first_ones_age() -> None:
    misses = [
        Miss(Cause.EVICTED, "x", 5.0),
        Miss(Cause.EVICTED, "x", 4.0),
        Miss(Cause.EVICTED, "y"),
        Miss(Cause.PARTIAL),
    ]
    assert runs_of([Tier.DEVICE, Tier.DEVICE, *misses], 16) == (
        MissRun(Miss(Cause.EVICTED, "x", 5.0), 32, 2),
        MissRun(Miss(Cause.EVICTED, "y"), 64, 1),
        MissRun(Miss(Cause.PARTIAL), 80, 1),
    )
    assert runs_of([], 16) == ()


def test_the_last_run_has_all_blocks_of_too_many_runs() -> None:
    misses = [Miss(Cause.EVICTED, str(number % 2)) for number in range(100)]
    runs = runs_of(misses, 1)
    assert len(runs) == MAX_RUNS
    assert runs[-1] == MissRun(Miss(Cause.BEHIND), MAX_RUNS - 1, 100 - MAX_RUNS + 1)
    assert sum(run.num_blocks for run in runs) == 100


def test_every_cause_has_words() -> None:
    for cause in Cause:
        assert words_of(MissRun(Miss(cause, "how", 7200.0), 32, 2)).startswith("2 blocks from token 32: ")


def test_found_blocks_have_no_run_and_part_the_blocks_around_them() -> None:
    cheaper, partial = Miss(Cause.CHEAPER), Miss(Cause.PARTIAL)
    blocks: list[Disposition] = [Tier.HOST, Tier.HOST, cheaper, Tier.REDIS, Tier.FILES, cheaper, partial]
    assert runs_of(blocks, 16) == (MissRun(cheaper, 32, 1), MissRun(cheaper, 80, 1), MissRun(partial, 96, 1))
    assert runs_of([Tier.HOST] * 3, 16) == ()
    runs = runs_of([cheaper, Tier.HOST] * 40, 16)
    assert len(runs) == MAX_RUNS
    assert sum(run.num_blocks for run in runs) == 40
