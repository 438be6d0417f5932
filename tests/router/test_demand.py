"""The demand of a router, as the sums over its requests."""

import pytest

from router.config import LatencyLimits
from router.observe.demand import Demand, DemandMeter
from router.observe.journal import RequestJournal
from router.workers.members import Members
from tests.harness.fake_cluster import running
from wire.errors import Cancelled, ConfigError, DeadlineExceeded
from wire.ids import QualifiedId
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.typed_reader import from_json, to_json

LIMITS = LatencyLimits(ttft_ms=100.0, itl_ms=10.0)


def journal(ttft_s: float | None = None, num_tokens: int = 0, gained_s: float = 0.0, cached: int = 0) -> RequestJournal:
    """A request of 50 prompt tokens that came at 0 s."""
    made = RequestJournal(QualifiedId("r"), 0.0)
    made.num_prompt_tokens = 50
    if ttft_s is not None:
        made.source = worker_pb2.PromptSource(cached_tokens=[pb.TierTokens(tier="host", tokens=cached)])
        made.gain(0, 1, ttft_s)
        made.gain(0, num_tokens - 1, gained_s)
    return made


def meter() -> DemandMeter:
    return DemandMeter(LIMITS, Members(b"", b""))


def test_sums_cover_open_requests_and_grow_on_when_they_end() -> None:
    sums, waiting, running_now = meter(), journal(), journal(0.05, 11, 0.1, cached=20)
    before = sums.read([waiting, running_now])
    assert (before.num_prompts, before.prompt_tokens, before.known_tokens, before.uncached_tokens) == (2, 100, 50, 30)
    assert (before.gaps, before.waiting_tokens, before.num_streams) == (10, 50, 1)
    assert before.gaps_s == pytest.approx(0.05)
    running_now.gain(0, 2, 0.17)
    running_now.end(pb.Complete(), 0.2)
    sums.add(running_now)
    after = sums.read([waiting])
    assert (after.num_prompts, after.prompt_tokens, after.gaps, after.num_streams) == (2, 100, 12, 0)
    assert after.gaps_s == pytest.approx(0.12)
    assert after.started == before.started != meter().read([]).started


@pytest.mark.parametrize(
    ("ended", "end", "judged"),
    [
        (journal(0.05, 11, 0.1), pb.Complete(), (1, 0, 0)),
        (journal(0.15, 2, 0.155), pb.Complete(), (1, 1, 0)),
        (journal(0.05, 2, 0.1), pb.Complete(), (1, 0, 1)),
        (journal(), DeadlineExceeded("late"), (1, 1, 0)),
        (journal(), Cancelled("gone"), (0, 0, 0)),
    ],
    ids=["within", "first token late", "next tokens late", "no token in time", "the client went"],
)
def test_ended_requests_are_judged_by_the_limits(ended: RequestJournal, end: object, judged: tuple[int, ...]) -> None:
    ended.end(end, 0.16)  # type: ignore[arg-type]
    sums = meter()
    sums.add(ended)
    demand = sums.read([])
    assert (demand.num_judged, demand.late_first, demand.late_next) == judged


@pytest.mark.parametrize("lie", ['"gaps_s": NaN', '"gaps_s": Infinity', '"gaps": -1', '"prefill_token_s": 1e9'])
def test_nonsense_is_no_demand(lie: str) -> None:
    with pytest.raises(ConfigError):
        from_json(Demand, f'{{"started": "a", {lie}}}', "demand")


async def test_a_router_tells_the_demand_of_its_requests() -> None:
    async with running(1, 1) as cluster:
        demand = cluster.router.dispatcher.demand
        assert from_json(Demand, to_json(demand), "demand") == demand
