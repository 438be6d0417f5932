"""The deadline that a client of any path gives its request, in a header."""

import asyncio
from typing import Any

import pytest

from tests.gateway.local_gateway import LocalGateway
from tests.gateway.test_app import BODY, CHAT, COMPLETIONS
from tests.harness.cluster import until
from wire.errors import Overloaded

SAID = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello"},
    CHAT: {"messages": SAID},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": SAID, "max_tokens": 5},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_deadline_goes_to_the_router_and_its_refusal_to_the_client(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch, path: str, is_streamed: bool
) -> None:
    given = []

    def late(_request: object, time_left_s: float | None, *_: object) -> None:
        given.append(time_left_s)
        raise Overloaded("the deadline in 1.5 s would pass", 2.0)

    monkeypatch.setattr(gateway.cluster.router.dispatcher, "open", late)
    answer = await gateway.post(path, {**BODIES[path], "stream": is_streamed}, request_timeout_ms="1500")
    assert (answer.status, answer.headers["retry-after"]) == (429, "2")
    assert set(given) == {1.5}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "1s", "1e3", "1000000000", "1, 2", "+1", "\u00b2", " "])
async def test_a_deadline_that_is_no_number_of_milliseconds(gateway: LocalGateway, path: str, value: str) -> None:
    answer = await gateway.post(path, BODIES[path], request_timeout_ms=value)
    assert (answer.status, answer.error["param"]) == (400, "request-timeout-ms")
    assert answer.error["message"] == (
        "request-timeout-ms: must be a whole number of milliseconds, from 1 to 999999999"
    )


async def test_a_clients_own_deadline_that_passes_is_504(gateway: LocalGateway) -> None:
    gateway.cluster.workers["d0"].may_go.clear()
    answer = await gateway.post(COMPLETIONS, {**BODY, "max_tokens": 5}, request_timeout_ms="100")
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    assert answer.error["message"].startswith("the deadline of 0.1 s passed at ")
    await gateway.cluster.come_to_rest()


async def test_a_request_that_is_forecast_to_be_late_is_refused_at_once(gateway: LocalGateway) -> None:
    body, router = {**BODY, "max_tokens": 5}, gateway.cluster.router
    assert (await gateway.post(COMPLETIONS, body)).status == 200  # from which the router learns the time of a token
    for worker in gateway.cluster.workers.values():
        worker.prefill_token_s = 0.1
    for member in router.members:
        member.prefill_token_s = 0.1
    gateway.cluster.workers["p0"].may_go.clear()
    ahead = asyncio.create_task(gateway.post(COMPLETIONS, {**body, "prompt": "a" * 100}))
    await until(lambda: gateway.cluster.workers["p0"].open_calls)
    refused = await gateway.post(COMPLETIONS, body, request_timeout_ms="5000")
    assert (refused.status, refused.error["code"]) == (429, "overloaded")
    assert 1 <= int(refused.headers["retry-after"]) <= 10
    assert "the deadline in" in refused.error["message"]
    gateway.cluster.workers["p0"].may_go.set()
    assert (await ahead).status == 200
