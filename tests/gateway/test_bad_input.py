"""Bad input over HTTP that no check of a field covers: what is taken, what is refused, and what no path reaches."""

import asyncio

import pytest

from router.requests import checks
from tests.gateway import local_gateway
from tests.gateway.local_gateway import LocalDoor, LocalGateway
from tests.gateway.test_app import BODY, COMPLETIONS
from tests.gateway.test_keys import shows
from tests.harness.local_cluster import LocalCluster, Sizes
from tests.local_cluster.test_local_cluster import MODEL, at_rest
from tests.router.test_keys import ACME_TEXT, BETA_TEXT, LISTED
from wire.trust.key_ring import NO_KEYS

CONTROLS = "a\x00\x01\x1b[31m\x7f\r\n\u2028z"


async def test_nul_and_control_characters_of_a_prompt_come_through_untouched(gateway: LocalGateway) -> None:
    answer = await gateway.post("/tokenize", {"prompt": CONTROLS})
    assert bytes(answer.json["tokens"]) == CONTROLS.encode()
    assert (await gateway.post("/detokenize", {"tokens": answer.json["tokens"]})).json == {"prompt": CONTROLS}
    echoed = await gateway.post(COMPLETIONS, {**BODY, "prompt": CONTROLS, "echo": True})
    assert echoed.status == 200
    assert echoed.json["choices"][0]["text"].startswith(CONTROLS)


async def test_a_prompt_that_fills_the_pages_of_the_smallest_worker_is_refused() -> None:
    async with LocalCluster.running(MODEL, 1, 1, Sizes(num_blocks=8)) as cluster:
        door = LocalDoor(cluster.router, NO_KEYS)
        answer = await door.post(COMPLETIONS, {"prompt": [1] * 128})
        assert (answer.status, answer.error["param"]) == (400, "prompt")
        assert answer.error["code"] == "context_length_exceeded"
        assert (await door.post(COMPLETIONS, {"prompt": [1] * 100, "max_tokens": 2})).status == 200
        await at_rest(cluster)
        await door.client.close()


async def test_choices_of_a_greedy_request_are_the_same() -> None:
    async with LocalCluster.running(MODEL, 1, 1) as cluster:
        door = LocalDoor(cluster.router, NO_KEYS)
        answer = await door.post(COMPLETIONS, {"prompt": "hello", "temperature": 0, "n": 3, "max_tokens": 8})
        await door.client.close()
    texts = [choice["text"] for choice in answer.json["choices"]]
    assert (answer.status, len(texts), len(set(texts))) == (200, 3, 1)


async def test_an_echo_of_too_long_a_prompt_is_refused(gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MAX_TOLD_PROMPT_LEN", 10)
    answers = [await gateway.post(COMPLETIONS, {**BODY, "prompt": "a" * num, "echo": True}) for num in (10, 11)]
    assert [answer.status for answer in answers] == [200, 400]
    assert answers[1].error["param"] == "echo"


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
async def test_no_path_reads_or_ends_a_request_by_its_id(gateway: LocalGateway, method: str) -> None:
    worker = gateway.cluster.workers["d0"]
    worker.may_go.clear()
    asking = asyncio.create_task(gateway.post(COMPLETIONS, {**BODY, "max_tokens": 5}, x_request_id="mine"))
    await asyncio.sleep(0)
    for path in ("/v1/completions/mine", "/v1/completions/mine/cancel", "/v1/requests/mine"):
        assert (await gateway.send(method, path, b"", {})).status == 404
    worker.may_go.set()
    assert (await asking).status == 200


@pytest.mark.parametrize("salt", ["a" * 4096, "\x00", "a/b:c", "\N{SNOWMAN}"])
async def test_salts_of_clients_are_refused(gateway: LocalGateway, salt: str) -> None:
    answer = await gateway.post(COMPLETIONS, {**BODY, "cache_salt": salt})
    assert (answer.status, answer.error["param"]) == (400, "cache_salt")


async def test_another_tenants_prefix_is_served_without_a_hit() -> None:
    async with LocalCluster.running(MODEL, 1, 1) as cluster:
        cluster.router.keys.replace(LISTED)
        door = LocalDoor(cluster.router, LISTED)
        answers = []
        for text in (ACME_TEXT, BETA_TEXT, ACME_TEXT):
            body = {"prompt": list(range(1, 101)), "max_tokens": 4, "temperature": 0}
            answers.append((await door.post(COMPLETIONS, body, **shows(text))).json)
            await at_rest(cluster)
        await door.client.close()
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert (cached[:2], cached[2] > 0) == ([0, 0], True)
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1


async def test_a_deadline_that_passes_is_504(gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_gateway, "TIMEOUT_S", 0.1)
    for worker in gateway.cluster.workers.values():
        worker.may_go.clear()
    answer = await gateway.post(COMPLETIONS, BODY)
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    await gateway.cluster.come_to_rest()


@pytest.mark.parametrize(
    "path",
    [
        "/baton.v1.Operator/GetStatus",
        "/baton.v1.Inference/Generate",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/grpc.channelz.v1.Channelz/GetTopChannels",
        "/admin",
        "/debug/pprof",
    ],
)
async def test_nothing_for_operators_is_behind_the_door_of_clients(gateway: LocalGateway, path: str) -> None:
    for method in ("GET", "POST"):
        answer = await gateway.send(method, path, b"", {"content-type": "application/json"})
        assert (answer.status, answer.error["type"]) == (404, "not_found_error")


async def test_adapters_are_no_field_and_no_model(gateway: LocalGateway) -> None:
    for name in ("adapter", "lora", "lora_request"):
        answer = await gateway.post(COMPLETIONS, {**BODY, name: "a"})
        assert (answer.status, answer.error["param"]) == (400, name)
    answer = await gateway.post(COMPLETIONS, {**BODY, "model": "fake:adapter"})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
