"""The counterfactuals of requests: folds over journals of a service whose costs are known, as tables."""

from collections.abc import Mapping

import pytest

from router.observe.counterfactual import MIN_LIKE, RequestCosts, counterfactuals
from router.observe.journal import RequestJournal
from tests.harness.fake_cluster import request, running
from tests.router.test_timeline import span
from wire.errors import Unavailable
from wire.ids import QualifiedId, WorkerId
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.pools import Role

BLOCK = 16
NOTHING: Mapping[str, float] = {}
Spans = list[tuple[str, float, dict[str, int]]]


def handed_off(num_tokens: int, num_cached: int = 0, longer_ms: Mapping[str, float] = NOTHING) -> RequestJournal:
    """Makes the journal of a request that waits nowhere. longer_ms: added to spans, by `prefill_queue` and so on.

    A token takes a millisecond to compute, a block 0.5 to read, a step 4, a transfer 1, each way of a message 1.
    """
    journal = RequestJournal(QualifiedId("r"), 0.0)
    journal.num_prompt_tokens = num_tokens
    journal.source = worker_pb2.PromptSource()
    computed, blocks = num_tokens - num_cached, -(-num_tokens // BLOCK)
    prefill: Spans = [
        ("queue", 0, {}),
        ("fetch", 1 + 0.5 * -(-computed // BLOCK), {}),
        ("wait_turn", 0, {}),
        ("compute", 4 + computed, {"tokens_computed": computed}),
        ("publish", max(1 + 0.5 * blocks - 4 - computed, 0), {"blocks": blocks}),
    ]
    decode: Spans = [
        ("queue", 0, {}),
        ("wait_slot", 0, {}),
        ("fetch", 1 + 0.5 * blocks, {"tokens_host": num_tokens}),
        ("generate", 100, {"tokens": 9}),
    ]
    now_ms = 0.0
    for role, spans in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        now_ms += longer_ms.get(f"router_{role}", 0.0)
        told, took_ms = [], 0.0
        journal.call(role, WorkerId(role.value), now_ms / 1000)
        for name, ms, counts in spans:
            ms += longer_ms.get(f"{role.value}_{name}", 0.0)
            told.append(span(f"{role.value}.{name}", took_ms, ms, **counts))
            took_ms += ms
        now_ms += took_ms + 2
        journal.end_call(now_ms / 1000, told)
        if role is Role.PREFILL:
            journal.gain(0, 1, now_ms / 1000)
    journal.end(pb.Complete(), now_ms / 1000)
    return journal


@pytest.fixture(scope="module")
def costs() -> RequestCosts:
    learned = RequestCosts()
    for length in (30, 31, 32, 200, 220, 240, 1600, 1700, 1800):
        learned.compare(handed_off(length), BLOCK)
        learned.compare(handed_off(length, num_cached=(length - 1) // BLOCK * BLOCK), BLOCK)
    return learned


def changes(journal: RequestJournal, costs: RequestCosts) -> dict[str, tuple[float, float]]:
    return {one.change: (one.ttft_ms, one.total_ms) for one in counterfactuals(journal, costs, BLOCK)}


def times(journal: RequestJournal) -> tuple[float, float]:
    assert journal.ttft_s is not None
    return journal.ttft_s * 1000, journal.timeline.total_ms


@pytest.mark.parametrize(
    ("waits", "gate"),
    [
        ({"prefill_queue": 300.0}, "prefill.queue"),
        ({"prefill_wait_turn": 300.0, "prefill_queue": 100.0}, "prefill.wait_turn"),
        ({"prefill_fetch": 300.0}, "prefill.fetch"),
        ({"prefill_wait_turn": 300.0, "prefill_compute": 200.0}, "prefill.wait_turn"),
        ({"decode_wait_slot": 300.0}, "decode.wait_slot"),
    ],
)
def test_without_its_longest_wait_a_request_takes_what_one_without_others_took(
    waits: dict[str, float], gate: str, costs: RequestCosts
) -> None:
    """A step or prompts of others make a fetch and a computation last longer, too, which are no gates."""
    found = changes(handed_off(500, longer_ms=waits), costs)
    assert found[gate] == pytest.approx(times(handed_off(500)), rel=0.03)
    assert [change for change in found if "." in change] == [gate]


def test_a_wait_that_took_hardly_any_time_is_not_worth_a_word(costs: RequestCosts) -> None:
    assert [
        change for change in changes(handed_off(500, longer_ms={"prefill_queue": 8.0}), costs) if "." in change
    ] == []


def test_a_gate_needs_no_learned_cost_and_what_was_not_learned_is_left_out() -> None:
    journal = handed_off(500, longer_ms={"prefill_queue": 300.0})
    ttft_ms, total_ms = times(journal)
    found = changes(journal, RequestCosts())
    assert found["prefill.queue"] == pytest.approx((ttft_ms - 300, total_ms - 300))
    assert "on_device" not in found


def test_co_located_it_has_neither_gates_of_prefill_nor_a_hand_off(costs: RequestCosts) -> None:
    """Of 500 tokens: two ways of a message, 500 + 4 to compute, 17 to look blocks up."""
    [found] = [changes(handed_off(500, longer_ms={"prefill_queue": 40.0, "decode_queue": 7.0}), costs)["co_located"]]
    assert found == pytest.approx((2 + 17 + 504 + 7, 2 + 17 + 504 + 7 + 100))


def test_with_its_blocks_on_the_device_only_the_tail_is_computed_and_published(costs: RequestCosts) -> None:
    for length in (220, 1700):
        same = handed_off(length, num_cached=(length - 1) // BLOCK * BLOCK)
        ttft_ms, _ = changes(handed_off(length, longer_ms={"prefill_queue": 40.0}), costs)["on_device"]
        assert ttft_ms - 40 == pytest.approx(times(same)[0], rel=0.1)
    assert "on_device" not in changes(handed_off(16), costs), "there is no full block to have"


def test_a_prompt_that_was_not_to_be_looked_up_has_no_device_to_be_on(costs: RequestCosts) -> None:
    journal = handed_off(500)
    assert journal.source is not None
    journal.source.misses.add(cause="not_read", blocks=32)
    assert "on_device" not in changes(journal, costs)


def test_a_request_that_was_tried_again_keeps_its_gate_only(costs: RequestCosts) -> None:
    journal = handed_off(500, longer_ms={"prefill_queue": 300.0})
    journal.attempts_ms.extend((0.0, 1.0))
    assert [*changes(journal, costs)] == ["prefill.queue"]


def test_like_requests_tell_what_was_expected() -> None:
    learned = RequestCosts()
    for number in range(MIN_LIKE + 1):
        journal = handed_off(500, longer_ms={"prefill_queue": 10.0 * number})
        learned.compare(journal, BLOCK)
        assert journal.timeline.HasField("expected_ttft") == (number == MIN_LIKE)
    quiet_ms, expected = times(handed_off(500))[0], journal.timeline.expected_ttft
    assert (expected.p50_ms, expected.p90_ms) == pytest.approx((quiet_ms + 40, quiet_ms + 70))
    other = handed_off(5000)
    learned.compare(other, BLOCK)
    assert not other.timeline.HasField("expected_ttft"), "it has ten times as much to compute"


def test_a_request_that_failed_or_came_from_another_router_teaches_nothing() -> None:
    learned = RequestCosts()
    for _ in range(20):
        failed, resumed = handed_off(500), handed_off(500)
        failed.end(Unavailable("gone"), 9.0)
        resumed.num_resumed_tokens = 3
        learned.compare(failed, BLOCK)
        learned.compare(resumed, BLOCK)
    assert not failed.timeline.counterfactuals
    assert not resumed.timeline.HasField("expected_ttft")


async def test_an_answer_ends_with_what_like_requests_took() -> None:
    async with running(1, 1) as cluster:
        outputs = [await cluster.generate(request(max_tokens=3)) for _ in range(MIN_LIKE + 1)]
    timelines = [output.complete.timeline for output in outputs]
    assert [one.HasField("expected_ttft") for one in timelines] == [False] * MIN_LIKE + [True]
