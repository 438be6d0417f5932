"""The service tier in an answer: the tier that served the request, where it names one."""

from typing import Any

import pytest

from tests.gateway.local_gateway import LocalGateway
from tests.gateway.test_app import CHAT, COMPLETIONS
from tests.gateway.test_deadlines import BODIES

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TIERS: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"service_tier": "auto"}, "default"),
    ({"service_tier": "flex"}, "flex"),
    ({"service_tier": "priority", "priority": 1}, "default"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
@pytest.mark.parametrize(("sent", "served"), TIERS)
async def test_a_whole_answer_repeats_the_tier_that_served_it(
    gateway: LocalGateway, path: str, sent: dict[str, Any], served: str | None
) -> None:
    answer = (await gateway.post(path, {**BODIES[path], **sent})).json
    assert answer.get("service_tier") == served


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("sent", "served"), TIERS)
async def test_each_event_of_choices_has_the_tier(
    gateway: LocalGateway, path: str, sent: dict[str, Any], served: str | None
) -> None:
    *events, done = (await gateway.post(path, {**BODIES[path], **sent, "stream": True})).events
    assert (done, {one.get("service_tier") for one in events}) == ("[DONE]", {served})


@pytest.mark.parametrize(("sent", "served"), TIERS)
async def test_each_response_of_a_stream_has_the_tier(
    gateway: LocalGateway, sent: dict[str, Any], served: str | None
) -> None:
    events = (await gateway.post(RESPONSES, {**BODIES[RESPONSES], **sent, "stream": True})).named_events
    responses = [one["response"] for one in events if "response" in one]
    assert (len(responses), {one.get("service_tier") for one in responses}) == (3, {served})


async def test_messages_are_served_by_the_standard_tier(gateway: LocalGateway) -> None:
    answer = await gateway.post(MESSAGES, {**BODIES[MESSAGES], "service_tier": "auto"})
    assert answer.json["usage"]["service_tier"] == "standard"
