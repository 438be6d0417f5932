"""`baton plan`: costs are learned, the fewest workers found, and the verdict told."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import pytest

from cli.__main__ import main
from cli.bench.latency import Record, Slo, summarize
from cli.bench.plan import virtual_time
from cli.bench.plan.costs import WorkCosts, learn
from cli.bench.plan.plan import read_run, verdict_of
from cli.bench.plan.sizing import PlannedLoad, TriedSizes, find_sizes, smallest
from cli.bench.plan.twin_cluster import TwinCluster, TwinSettings
from cli.bench.schedule import Arrival, poisson
from router.config import Disaggregation, LatencyBounds, RouterSettings
from router.requests.forecast import MAX_AGE
from wire.errors import InvalidRequest
from wire.pools import PoolSizes

COSTS = WorkCosts(
    step_s=0.01,
    prompt_s=0.004,
    prompt_token_s=0.0004,
    pair_s=2e-7,
    row_s=0.001,
    context_token_s=2e-6,
    transfer_s=0.003,
    fetch_s=0.005,
    block_s=0.001,
    request_s=(0.006,),
)
LIMITS = Slo(ttft_s=1.0, tpot_s=0.05, share=0.95)


def play(arrivals: list[Arrival], sizes: PoolSizes, settings: TwinSettings) -> list[Record]:
    """Serves arrivals on a cluster of virtual time."""

    async def run() -> list[Record]:
        async with TwinCluster(settings, sizes) as cluster:
            return await cluster.run(arrivals)

    return virtual_time.run(run())


def mixed(rate: float, duration_s: float) -> list[Arrival]:
    """Draws requests of three lengths."""
    lens = [(100, 20), (400, 60), (1200, 30)]
    each = [poisson(rate / 3, duration_s, *one, seed) for seed, one in enumerate(lens)]
    return sorted((arrival for arrivals in each for arrival in arrivals), key=lambda one: one.at_s)


@pytest.fixture(scope="module")
def run() -> list[Record]:
    """A run in which each prompt is handed off, so that costs of prompts and of tokens are told apart."""
    router = RouterSettings(disaggregation=Disaggregation.ALWAYS)
    return play(mixed(3.0, 15.0), PoolSizes(1, 1), TwinSettings(costs=COSTS, router=router))


def test_costs_are_learned_from_a_run(run: list[Record]) -> None:
    learned = learn([run])
    assert {name for name, _ in asdict(learned.costs).items()} == learned.sources.keys()
    assert learned.costs.prompt_token_s == pytest.approx(COSTS.prompt_token_s, rel=0.1)
    assert learned.costs.step_s == pytest.approx(COSTS.step_s, rel=0.15)
    assert learned.costs.row_s == pytest.approx(COSTS.row_s, rel=0.25)
    assert learned.costs.pair_s == pytest.approx(COSTS.pair_s, rel=0.25)
    assert learned.costs.block_s == pytest.approx(COSTS.block_s, rel=0.1)
    assert learned.costs.fetch_s == pytest.approx(COSTS.fetch_s, rel=0.1)
    assert learned.costs.message_s == pytest.approx(COSTS.message_s, rel=0.2)
    assert median(learned.costs.request_s) == pytest.approx(COSTS.request_s[0], rel=0.1)


def test_the_message_of_a_first_token_counts_once() -> None:
    """Where a decode worker computes the prompt, its only span of network ends the answer."""
    records = play(mixed(2.0, 10.0), PoolSizes(0, 1), TwinSettings(costs=COSTS))
    assert median(learn([records]).costs.request_s) == pytest.approx(COSTS.request_s[0], rel=0.1)


@pytest.mark.parametrize("mode", [Disaggregation.ALWAYS, Disaggregation.CONDITIONAL])
def test_a_run_foretells_another(mode: Disaggregation) -> None:
    """A load of twice the rate takes as long with the costs that a run has told as with the true ones."""
    router = RouterSettings(disaggregation=mode)
    run = play(mixed(3.0, 15.0), PoolSizes(1, 1), TwinSettings(costs=COSTS, router=router))
    load = mixed(4.0, 10.0)
    true = play(load, PoolSizes(1, 1), TwinSettings(costs=COSTS, router=router))
    told = play(load, PoolSizes(1, 1), TwinSettings(costs=learn([run]).costs, router=router))
    assert sum(one.ttft_s for one in told) == pytest.approx(sum(one.ttft_s for one in true), rel=0.1)
    assert sum(one.tpot_s for one in told) == pytest.approx(sum(one.tpot_s for one in true), rel=0.1)


def test_prompts_in_time_go_before_late_ones() -> None:
    """A burst, and then as much as one worker can just compute: without a limit, all behind the burst are late."""
    times_s = [*[0.0] * 12, *[0.65 * (place + 1) for place in range(40)]]
    load = [Arrival(at_s, (place, *[7] * 1000), 1) for place, at_s in enumerate(times_s)]
    router, limit_s, burst_s = RouterSettings(disaggregation=Disaggregation.ALWAYS), 4.0, 7.0

    def ttfts(limits: LatencyBounds) -> list[float]:
        records = play(load, PoolSizes(1, 1), TwinSettings(costs=COSTS, router=router, limits=limits))
        assert [one.error for one in records if one.error] == []
        return [one.ttft_s for one in records]

    def num_late(ttfts_s: list[float]) -> int:
        return sum(ttft_s > limit_s for ttft_s in ttfts_s)

    without, limited = ttfts(LatencyBounds()), ttfts(LatencyBounds(ttft_ms=1000 * limit_s))
    assert 3 * num_late(limited) <= 2 * num_late(without)
    assert max(limited) <= MAX_AGE * limit_s + burst_s, "then it has its place again, behind the others of the burst"


def test_two_rounds_are_not_at_one_time(run: list[Record]) -> None:
    assert learn([run, run]).costs.row_s == pytest.approx(learn([run]).costs.row_s)


def test_few_requests_tell_nothing(run: list[Record]) -> None:
    with pytest.raises(InvalidRequest, match="costs: tell of 3 computed prompts with a timeline: 8 are needed"):
        learn([run[:3]])
    with pytest.raises(InvalidRequest, match="costs: tell of 0 computed"):
        learn([[replace(one, spans=()) for one in run]])


class TestReadRun:
    def test_what_bench_wrote(self, run: list[Record], tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        path.write_text(json.dumps({"requests": [asdict(one) for one in run]}))
        assert learn([read_run(path)]) == learn([run])

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"requests": [{}]}', '{"requests": 3}'])
    def test_another_file(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        path.write_text(text)
        with pytest.raises(InvalidRequest, match="costs: is no file of `baton bench --json`"):
            read_run(path)

    @pytest.mark.parametrize("value", [None, "1", []])
    def test_a_time_that_is_no_number(self, value: object, run: list[Record], tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        path.write_text(json.dumps({"requests": [{**asdict(run[0]), "sent_s": value}]}))
        with pytest.raises(InvalidRequest, match="costs: is no file"):
            read_run(path)


@pytest.mark.parametrize("most", range(1, 12))
def test_the_smallest_number_is_found(most: int) -> None:
    for needed in range(1, 15):
        asked: list[int] = []

        def is_enough(number: int, needed: int = needed, asked: list[int] = asked) -> bool:
            asked.append(number)
            return number >= needed

        assert smallest(is_enough, most) == (needed if needed <= most else None)
        assert max(asked) <= most
        assert len(asked) <= 2 * most.bit_length() + 1


class RuledLoad(PlannedLoad):
    """A load that sizes serve by a rule: the share of good requests."""

    def __init__(self, share: Callable[[PoolSizes], float]) -> None:
        super().__init__([], TwinSettings(), LIMITS)
        self._share = share

    def _serve(self, sizes: PoolSizes, most_missed: int) -> TriedSizes:
        return TriedSizes(sizes, self._share(sizes), True, summarize([], LIMITS), {})


def needing(alone: int, prefill: int, decode: int) -> Callable[[PoolSizes], float]:
    """Makes a rule: so many workers of one pool keep the limits, or so many of each of two."""

    def share(sizes: PoolSizes) -> float:
        met = sizes.decode / alone if not sizes.prefill else min(sizes.prefill / prefill, sizes.decode / decode)
        return min(1.0, 0.95 * met)

    return share


@pytest.mark.parametrize(
    ("needs", "chosen", "words"),
    [
        (
            (4, 1, 2),
            (1, 2),
            "Disaggregate: 1 prefill + 2 decode would keep 95% of requests within the limits; one pool would",
        ),
        ((3, 2, 2), (0, 3), "Do not disaggregate: 3 decode workers alone would keep 95%"),
        ((2, 1, 1), (0, 2), "Do not disaggregate: 2 decode workers alone would keep 95%"),
        (
            (99, 3, 4),
            (3, 4),
            "Disaggregate: 3 prefill + 4 decode would keep 95% of requests within the limits; one pool",
        ),
        ((99, 3, 4), (3, 4), "one pool would take more than 8 workers"),
        ((7, 5, 9), (0, 7), "two pools would take more than 8 workers"),
    ],
)
def test_the_fewest_workers_are_chosen(needs: tuple[int, int, int], chosen: tuple[int, int], words: str) -> None:
    tried = find_sizes(RuledLoad(needing(*needs)), 8)
    assert PoolSizes(*chosen) in [one.sizes for one in tried]
    assert words in verdict_of(tried, LIMITS, 8)


def test_limits_that_no_size_keeps_have_the_best_share() -> None:
    tried = find_sizes(RuledLoad(needing(80, 9, 9)), 8)
    words = (
        "No size of at most 8 workers keeps 95% of requests within the limits: the best, 4 prefill + 4 decode, keeps"
    )
    assert verdict_of(tried, LIMITS, 8) == f"{words} 42.2%."


def test_one_worker_is_never_a_prefill_worker_alone() -> None:
    assert {one.sizes for one in find_sizes(RuledLoad(needing(2, 1, 1)), 1)} == {PoolSizes(0, 1)}


def test_a_hopeless_size_is_given_up() -> None:
    load = PlannedLoad(poisson(8.0, 10.0, 1000, 10, 0), TwinSettings(costs=COSTS), LIMITS)
    assert not load.try_sizes(0, 1)
    given_up = load.tried[PoolSizes(0, 1)]
    assert not given_up.is_whole
    assert given_up.share < LIMITS.share
    assert given_up.summary.num_sent < len(load.arrivals) / 2


class TestCommand:
    TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"2023-11-16 18:17:{second:02}.0000000,200,10\n" for second in range(12)
    )

    def plan(self, tmp_path: Path, run: list[Record], *flags: str) -> int:
        (tmp_path / "trace.csv").write_text(self.TRACE)
        (tmp_path / "run.json").write_text(json.dumps({"requests": [asdict(one) for one in run]}))
        files = ["--trace", str(tmp_path / "trace.csv"), "--costs", str(tmp_path / "run.json")]
        return main(["plan", *files, "--max-workers", "3", *flags])

    def test_a_load_that_a_worker_carries(
        self, run: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.plan(tmp_path, run, "--slo", "ttft_ms=1000,itl_ms=50") == 0
        told = capsys.readouterr().out
        assert "trace.csv: 12 requests" in told
        assert "spans of generate" in told
        words = "1 decode worker alone would keep 95% of requests within the limits; two pools would take"
        assert told.endswith(f"\nDo not disaggregate: {words} 1 prefill + 1 decode.\n")

    def test_an_object_for_scripts(self, run: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.plan(tmp_path, run, "--slo", "ttft_ms=1,itl_ms=1,share=0.5", "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert told["verdict"].startswith("No size of at most 3 workers keeps 50% of requests within the limits")
        assert told["costs"]["prompt_token_s"]["s"] == pytest.approx(COSTS.prompt_token_s, rel=0.1)
        assert {"sizes", "share", "summary", "busy"} <= told["candidates"][0].keys()

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--slo", "ttft=3"], "--slo: must be like ttft_ms=1000"),
            (["--slo", "share=2"], "--slo: share must be at most 1, not 2"),
            (["--slo", "itl_ms=-1"], "--slo: must be above 0"),
            (["--slo", "itl_ms=5", "--pages", "8"], "pages: the longest request takes 15 of a worker's 8"),
        ],
    )
    def test_bad_flags(
        self,
        flags: list[str],
        words: str,
        run: list[Record],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert self.plan(tmp_path, run, *flags) == 2
        assert words in capsys.readouterr().err
