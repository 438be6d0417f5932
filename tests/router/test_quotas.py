"""Limits of keys: as a table of times, and as calls over real gRPC."""

from dataclasses import replace

import grpc
import pytest

from router.requests.admission import Quotas
from tests.harness.cluster import until
from tests.harness.fake_cluster import CONFIG, expected, request
from tests.router.test_keys import shows
from tests.router.test_router_api import failure_of, read, retry_delay_s, serving
from wire.errors import Overloaded
from wire.trust.key_ring import Allowance, Key, KeyList, Scope, make_key


def key(**allowance: int) -> Key:
    return make_key("acme", [Scope.GENERATE], Allowance(**allowance))[0]


def wait_s(quotas: Quotas, of: Key, now_s: float) -> float | None:
    try:
        quotas.require_room(of, now_s)
    except Overloaded as refused:
        return refused.retry_after_s
    return None


def test_requests_of_a_minute_are_a_budget_that_refills() -> None:
    quotas, used = Quotas(1.0), key(requests_per_minute=6)
    for _ in range(6):
        assert wait_s(quotas, used, 100.0) is None
        quotas.enter(used, 100.0)
        quotas.leave(used, 1000, 100.0)
    assert wait_s(quotas, used, 100.0) == 10.0
    assert wait_s(quotas, used, 104.0) == 6.0
    assert wait_s(quotas, used, 110.0) is None
    quotas.enter(used, 1e6)
    assert [wait_s(quotas, used, 1e6)] == [None], "after a long time no more than a minute's is left"


def test_no_minute_has_more_than_twice_the_bound() -> None:
    quotas, used = Quotas(1.0), key(requests_per_minute=6)
    entered = []
    for tenth in range(1200):
        if wait_s(quotas, used, tenth / 10) is None:
            quotas.enter(used, tenth / 10)
            entered.append(tenth / 10)
    assert len(entered) == 6 + 11
    assert max(sum(at <= one < at + 60 for one in entered) for at in entered) < 12


def test_tokens_are_paid_at_the_end_and_a_debt_is_waited_for() -> None:
    quotas, used = Quotas(1.0), key(tokens_per_minute=60)
    for _ in range(2):
        assert wait_s(quotas, used, 0.0) is None
        quotas.enter(used, 0.0)
    quotas.leave(used, 100, 0.0)
    assert wait_s(quotas, used, 0.0) == 41.0
    quotas.leave(used, 20, 41.0)
    assert wait_s(quotas, used, 41.0) == 20.0
    assert wait_s(quotas, used, 61.0) is None


def test_requests_at_a_time() -> None:
    quotas, used, other = Quotas(2.5), key(max_open_requests=2), key(max_open_requests=2)
    for _ in range(2):
        quotas.enter(used, 0.0)
    assert (wait_s(quotas, used, 0.0), wait_s(quotas, other, 0.0)) == (2.5, None)
    quotas.leave(used, 0, 0.0)
    assert wait_s(quotas, used, 0.0) is None
    assert quotas.check(1) == []
    assert quotas.check(2) != []


async def test_tokens_that_an_answer_brings_from_another_router_are_paid_here() -> None:
    used, text = make_key("acme", [Scope.GENERATE], Allowance(tokens_per_minute=100))
    async with serving(replace(CONFIG, keys=KeyList((used,)))) as service:
        resumed = request(max_tokens=300)
        resumed.resume.choices.add(token_ids=expected(299))
        answer = await read(service.inference.Generate(resumed, metadata=shows(text)))
        assert answer[-1].complete.usage.completion_tokens == 300
        await until(lambda: not service.cluster.router.dispatcher.num_running)
        failure = await failure_of(service.inference.Generate(request(max_tokens=3), metadata=shows(text)))
        assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("allowance", "least_s", "reason"),
    [
        (
            Allowance(requests_per_minute=2),
            20.0,
            "2 requests per minute of the key are used up, the limit (the key's requests_per_minute)",
        ),
        (
            Allowance(tokens_per_minute=20),
            20.0,
            "20 tokens per minute of the key are used up, the limit (the key's tokens_per_minute)",
        ),
        (Allowance(None, None, 1), 1.0, "1 requests of the key are open, the limit (the key's max_open_requests)"),
    ],
)
async def test_over_its_limit_a_key_is_told_which_and_when_to_come_again(
    allowance: Allowance, least_s: float, reason: str
) -> None:
    used, text = make_key("acme", [Scope.GENERATE], allowance)
    other, other_text = make_key("acme", [Scope.GENERATE], Allowance())
    async with serving(replace(CONFIG, keys=KeyList((used, other)))) as service:
        dispatcher = service.cluster.router.dispatcher
        for _ in range(2):
            if allowance.max_open_requests is None:
                await read(service.inference.Generate(request(max_tokens=3), metadata=shows(text)))
                await until(lambda: not dispatcher.num_running)
        service.cluster.workers["d0"].may_go.clear()
        held = None
        if allowance.max_open_requests is not None:
            held = service.inference.Generate(request(max_tokens=3), metadata=shows(text))
            await anext(aiter(held))
        failure = await failure_of(service.inference.Generate(request(max_tokens=3), metadata=shows(text)))
        assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert failure.details() == reason
        assert least_s <= retry_delay_s(failure) <= 60.0
        service.cluster.workers["d0"].may_go.set()
        assert await read(service.inference.Generate(request(max_tokens=3), metadata=shows(other_text)))
        if held is not None:
            await read(held)
        assert dispatcher.check() == []
