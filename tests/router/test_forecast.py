"""The forecast of a request's end: what is ahead of it, what is learned, and the refusal of what would be late."""

import math
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from router.observe.journal import RequestJournal
from router.requests.forecast import Forecast, PromptAhead, deferral_s
from wire.errors import DeadlineExceeded, Overloaded
from wire.ids import QualifiedId
from wire.pb import inference_pb2 as pb
from wire.sampling import SamplingParams

TEN = SamplingParams(max_tokens=10, ignore_eos=True)
TOKEN_S = [0.01]


def ended(
    num_tokens: int = 11, token_s: float = 0.1, expected_s: float | None = None, late_s: float = 0.0
) -> RequestJournal:
    """A request that ended well, after a first token at once."""
    journal = RequestJournal(QualifiedId("r"), 0.0)
    for number in range(num_tokens):
        journal.gain(0, 1, number * token_s)
    end_s = (num_tokens - 1) * token_s
    journal.expect(expected_s, end_s - (expected_s or 0.0) - late_s)
    journal.end(pb.Complete(choices=[pb.Choice(finish_reason=pb.FINISH_REASON_STOP)]), end_s)
    return journal


def learned(*journals: RequestJournal) -> Forecast:
    forecast = Forecast()
    for journal in journals or [ended()] * 20:
        forecast.learn(journal, "a")
    return forecast


def end_s(
    forecast: Forecast,
    ahead: Sequence[PromptAhead],
    prompt: PromptAhead,
    answer: SamplingParams = TEN,
    left_s: float = 1e9,
) -> float | None:
    with ExitStack() as stack:
        for one in ahead:
            stack.enter_context(forecast.queued(one))
        return forecast.require_in_time(prompt, answer, TOKEN_S, left_s)


@pytest.mark.parametrize(
    ("ahead", "num_ahead"),
    [
        pytest.param([], 0, id="nothing"),
        pytest.param([PromptAhead("a", 50), PromptAhead("a", 25)], 75, id="all of its own tenant's"),
        pytest.param([PromptAhead("b", 900)], 100, id="of another tenant's as much as it gets itself"),
        pytest.param([PromptAhead("b", 30), PromptAhead("c", 300)], 130, id="or what it has"),
        pytest.param([PromptAhead("a", 100), PromptAhead("b", 900)], 300, id="behind its own more of it"),
        pytest.param([PromptAhead("b", 900, weight=2.0)], 200, id="by weight"),
        pytest.param([PromptAhead("b", 0)], 0, id="cached prompts take nothing"),
    ],
)
def test_prompts_ahead_are_counted_under_fair_shares(ahead: list[PromptAhead], num_ahead: int) -> None:
    found = end_s(learned(), ahead, PromptAhead("a", 100))
    assert found == pytest.approx(0.01 * (num_ahead + 100) + 10 * 0.1, rel=0.05)


def test_workers_share_the_prompts_ahead_but_not_the_prompt() -> None:
    forecast = learned()
    with forecast.queued(PromptAhead("a", 100)):
        assert forecast.require_in_time(PromptAhead("a", 100), TEN, [0.01, 0.01], 1e9) == pytest.approx(2.5, rel=0.05)


@pytest.mark.parametrize(
    ("answer", "num_output"),
    [
        (SamplingParams(max_tokens=500), 11),
        (SamplingParams(max_tokens=5), 5),
        (SamplingParams(max_tokens=500, min_tokens=40), 40),
        (SamplingParams(max_tokens=500, ignore_eos=True), 500),
        (SamplingParams(max_tokens=500, ignore_eos=True, stop=("end",)), 11),
    ],
)
def test_an_answer_is_as_long_as_its_tenants_were(answer: SamplingParams, num_output: int) -> None:
    assert end_s(learned(), [], PromptAhead("a", 0), answer) == pytest.approx(0.1 * num_output, rel=0.05)


def test_nothing_is_refused_before_speeds_are_learned() -> None:
    assert end_s(Forecast(), [PromptAhead("a", 1e9)], PromptAhead("a", 10), left_s=1.0) is None
    with learned().queued(PromptAhead("a", 1e9)):
        assert learned().require_in_time(PromptAhead("a", 10), TEN, [], 1.0) is None


def test_a_request_that_would_be_late_is_refused_with_the_time_after_which_it_would_not() -> None:
    with pytest.raises(Overloaded, match=r"the deadline in 4\.0 s would pass: prompts ahead take 5\.0 s") as refused:
        end_s(learned(), [PromptAhead("a", 500)], PromptAhead("a", 100), left_s=4.0)
    assert refused.value.retry_after_s == pytest.approx(3.0, abs=0.1)
    assert end_s(learned(), [PromptAhead("a", 500)], PromptAhead("a", 100), left_s=8.0) is not None


def test_a_request_with_nothing_ahead_may_try() -> None:
    assert end_s(learned(), [], PromptAhead("a", 1000), left_s=0.1) == pytest.approx(11.0, rel=0.05)


def test_a_prompt_is_ahead_until_it_is_computed() -> None:
    forecast = learned()
    with forecast.queued(PromptAhead("a", 500)) as computed:
        computed()
        computed()
        assert forecast.require_in_time(PromptAhead("a", 10), TEN, TOKEN_S, 2.0) is not None


def test_earlier_forecasts_that_were_short_are_made_up_for() -> None:
    short = learned(*[ended(expected_s=0.5, late_s=0.0)] * 150, ended(expected_s=0.5, late_s=2.0))
    with pytest.raises(Overloaded):
        end_s(short, [PromptAhead("a", 1)], PromptAhead("a", 100), left_s=3.0)
    assert end_s(learned(), [PromptAhead("a", 1)], PromptAhead("a", 100), left_s=3.0) is not None


def test_a_request_that_was_refused_teaches_nothing() -> None:
    forecast = Forecast()
    refused = ended()
    refused.outcome = Overloaded.status.grpc
    forecast.learn(refused, "a")
    assert end_s(forecast, [], PromptAhead("a", 1)) is None
    missed = ended()
    missed.outcome = DeadlineExceeded.status.grpc
    forecast.learn(missed, "a")
    assert end_s(forecast, [], PromptAhead("a", 1)) is not None


@pytest.mark.parametrize(
    ("age_s", "computes_s", "left_s", "deferral"),
    [
        pytest.param(0.0, 0.0, 99.0, (10.0, 30.0), id="from the limit to three limits"),
        pytest.param(0.0, 2.0, 99.0, (8.0, 30.0), id="its own time counts"),
        pytest.param(4.0, 2.0, 99.0, (4.0, 26.0), id="it has waited"),
        pytest.param(9.0, 2.0, 99.0, (0.0, 21.0), id="it is late"),
        pytest.param(0.0, 2.0, 40.0, (8.0, 20.0), id="until half of its life is over"),
        pytest.param(9.0, 2.0, 21.0, (0.0, 6.0), id="half of its life, and it has waited"),
        pytest.param(0.0, 0.0, 15.0, None, id="half of its life is over before it is late"),
        pytest.param(31.0, 2.0, 99.0, None, id="it is old"),
        pytest.param(4.0, 2.0, -1.0, None, id="its life is over"),
        pytest.param(0.0, 10.0, 99.0, None, id="alone it takes the limit"),
        pytest.param(4.0, math.nan, 99.0, None, id="a worker's nonsense"),
    ],
)
def test_a_late_prompt_is_deferred_for_a_time(
    age_s: float, computes_s: float, left_s: float, deferral: tuple[float, float] | None
) -> None:
    assert deferral_s(10.0, age_s, computes_s, left_s) == deferral


def test_without_a_limit_no_prompt_is_deferred() -> None:
    assert deferral_s(Forecast().limit_s, 4.0, 2.0, 99.0) is None


def test_what_deferral_added_is_no_error_of_a_forecast() -> None:
    """Else one burst would have the next requests with a deadline refused."""
    forecasts = [Forecast(limit_s) for limit_s in (math.inf, 2.0)]
    for forecast in forecasts:
        for _ in range(20):
            journal = ended(expected_s=1.0, late_s=0.0)
            forecast.learn(journal, "a")
        late = RequestJournal(QualifiedId("r"), 0.0)
        late.expect(3.0, 0.0)
        late.gain(0, 1, 12.0)
        late.end(pb.Complete(choices=[pb.Choice(finish_reason=pb.FINISH_REASON_STOP)]), 13.0)
        forecast.learn(late, "a")
    without, limited = (end_s(one, [PromptAhead("a", 100)], PromptAhead("a", 100), left_s=1e9) for one in forecasts)
    assert without == limited, "the margin is not in what is told"
    with pytest.raises(Overloaded):
        end_s(forecasts[0], [PromptAhead("a", 100)], PromptAhead("a", 100), left_s=6.0)
    assert end_s(forecasts[1], [PromptAhead("a", 100)], PromptAhead("a", 100), left_s=6.0) == limited
