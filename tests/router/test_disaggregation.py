"""The choice between the pools, as tables: a token takes a millisecond, a hand-off ten, unless a row says otherwise."""

from collections.abc import Sequence

import pytest

from router.config import Disaggregation
from router.disaggregation import HAND_OFF_PRIOR_S, HandOffDuration, PrefillReason, decide, hand_off_s
from tests.router.test_policies import Load
from wire.ids import WorkerId
from wire.pb import inference_pb2 as pb

MS = 0.001


def prefill(num_tokens: int = 0, token_s: float | None = MS, is_silent: bool = False) -> Load:
    return Load(WorkerId("p"), 1, num_tokens, is_silent, prefill_token_s=token_s)


def decode(num_streams: int = 0, pending: int = 0, token_s: float | None = MS, is_silent: bool = False) -> Load:
    return Load(WorkerId("d"), num_streams, 9000, is_silent, pending, token_s)


def reason(pools: tuple[Sequence[Load], Sequence[Load]], num_new: int, mode: str = "conditional") -> str:
    return decide(Disaggregation(mode), *pools, num_new, hand_off_s=10 * MS)


@pytest.mark.parametrize(
    ("there", "here", "num_new", "why"),
    [
        ([prefill()], [decode(4)], 100, "sooner"),
        ([prefill()], [decode()], 9, "cheaper"),
        ([prefill()], [decode()], 1000, "cheaper"),
        ([prefill()], [decode(1)], 9, "cheaper"),
        ([prefill()], [decode(1)], 10, "sooner"),
        ([prefill()], [decode(10)], 1, "sooner"),
        ([prefill(389)], [decode(4)], 100, "sooner"),
        ([prefill(391)], [decode(4)], 100, "busy"),
        ([prefill(391)], [decode(4, pending=2)], 100, "sooner"),
        ([prefill(391)], [decode(4, pending=2), decode(4)], 100, "busy"),
        ([prefill(391), prefill(389)], [decode(4)], 100, "sooner"),
        ([prefill(token_s=4 * MS)], [decode(3)], 100, "cheaper"),
        ([prefill(token_s=MS / 4)], [decode()], 100, "sooner"),
        ([prefill(100)], [decode(1, token_s=None)], 50, "busy"),
        ([prefill(100, None)], [decode(1)], 50, "busy"),
        ([prefill(100, None)], [decode(1, token_s=None)], 50, "not_learned"),
        ([prefill(100), prefill(is_silent=True)], [decode(1)], 50, "busy"),
        ([prefill()], [decode(is_silent=True), decode(50)], 50, "sooner"),
    ],
    ids=[
        "an idle prefill worker beside streams",
        "less than a hand-off",
        "no stream to hold up",
        "one stream, and less than a hand-off together",
        "as much as a hand-off",
        "a token that ten streams wait for",
        "a queue that costs less than four streams",
        "a longer queue",
        "decode has a prompt already",
        "one decode worker has none",
        "one prefill worker is free enough",
        "a slow prefill worker",
        "a slow decode worker",
        "a decode worker that has computed no prompt",
        "a prefill worker that has computed none",
        "nothing is learned",
        "the idle prefill worker is silent",
        "the idle decode worker is silent",
    ],
)
def test_a_prompt_goes_where_it_costs_all_requests_least(
    there: list[Load], here: list[Load], num_new: int, why: str
) -> None:
    assert reason((there, here), num_new) == why


@pytest.mark.parametrize(
    ("there", "here", "always", "conditional"),
    [
        ([], [decode()], "no_prefill_worker", "no_prefill_worker"),
        ([prefill(9000)], [], "always", "decode_silent"),
        ([prefill(9000)], [decode(is_silent=True)], "always", "decode_silent"),
        ([prefill(is_silent=True)], [decode(9)], "prefill_silent", "prefill_silent"),
        ([prefill(is_silent=True)], [decode(9, is_silent=True)], "always", "sooner"),
        ([prefill(is_silent=True)], [], "always", "decode_silent"),
        ([prefill(9000)], [decode(1)], "always", "busy"),
    ],
)
def test_a_pool_that_cannot_answer_is_avoided(
    there: list[Load], here: list[Load], always: str, conditional: str
) -> None:
    found = [reason((there, here), 100, mode) for mode in Disaggregation]
    assert found == [always, "never", "no_prefill_worker" if not there else conditional]


def test_each_reason_names_one_pool() -> None:
    straight = {one.value for one in PrefillReason if not one.uses_prefill}
    assert straight == {"never", "no_prefill_worker", "prefill_silent", "cheaper", "busy"}


def spans(*named: tuple[str, float]) -> list[pb.Span]:
    return [pb.Span(name=name, duration_ms=duration_ms) for name, duration_ms in named]


def test_a_hand_off_is_what_neither_a_gate_nor_the_prompt_took() -> None:
    there = spans(("prefill.queue", 20), ("prefill.compute", 70), ("prefill.publish", 3), ("network", 7))
    here = spans(("decode.wait_pages", 50), ("decode.fetch", 4), ("decode.generate", 700), ("network", 9))
    assert hand_off_s(there, here) == pytest.approx(0.014), "3 to publish, 7 between processes, 4 to fetch"
    for one, other in ((spans(("prefill.call", 100)), here), (there, spans(("decode.call", 100)))):
        assert hand_off_s(one, other) is None, "a worker was lost, or its answer was stopped"
    assert hand_off_s(spans(("prefill.compute", 1)), here) == pytest.approx(0.004)


def called(num_tokens: int, behind_ms: float, fetch_ms: float, **fetched: int) -> tuple[list[pb.Span], list[pb.Span]]:
    """Makes the spans of both calls of a prompt of which `num_tokens` were computed."""
    compute = pb.Span(name="prefill.compute", duration_ms=50, counts={"tokens_computed": num_tokens})
    return (
        [compute, *spans(("prefill.publish", behind_ms))],
        [pb.Span(name="decode.fetch", duration_ms=fetch_ms, counts=fetched)],
    )


def test_reading_cached_blocks_is_no_part_of_a_hand_off() -> None:
    """They are read by decode whichever pool computes the others; what is on its device takes no time."""
    assert hand_off_s(*called(100, 3, 8, tokens_host=400)) == pytest.approx(0.005)
    assert hand_off_s(*called(100, 3, 8, tokens_host=100, tokens_device=300)) == pytest.approx(0.011)
    assert hand_off_s(*called(100, 3, 8, tokens_host=50)) == pytest.approx(0.011), "others were computed again"


def test_a_hand_off_is_learned_by_length() -> None:
    hand_off = HandOffDuration()
    assert hand_off.at(2000) == HAND_OFF_PRIOR_S
    for num_tokens in (32, 40, 48, 1600, 1800, 2000) * 3:
        hand_off.learn(*called(num_tokens, 2, 2 + num_tokens / 100, tokens_host=num_tokens))
    hand_off.learn(*called(1700, 900, 900, tokens_host=1700))
    assert [hand_off.at(length) for length in (0, 40, 2000)] == pytest.approx([0.004, 0.0044, 0.024], rel=0.02)
    hand_off.learn(spans(("prefill.call", 900)), [])
    assert hand_off.at(2000) == pytest.approx(0.024, rel=0.02), "a lost worker tells nothing of a hand-off"


def test_a_short_prompt_is_judged_by_a_short_hand_off() -> None:
    """Of 24 ms for 2,000 tokens, and 4.2 for 20, one number would make 10 or so of both."""
    hand_off = HandOffDuration()
    for num_tokens in (16, 20, 24, 1600, 2000, 2400) * 3:
        hand_off.learn(*called(num_tokens, 2, 2 + num_tokens / 100, tokens_host=num_tokens))
    assert decide(Disaggregation.CONDITIONAL, [prefill()], [decode(1)], 6, hand_off.at(6)) == "sooner"
    assert decide(Disaggregation.CONDITIONAL, [prefill()], [decode(1)], 4, hand_off.at(4)) == "cheaper"
