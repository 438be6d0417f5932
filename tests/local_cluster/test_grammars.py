"""Response formats in a whole cluster: equal answers wherever they come from, and refusals of one request each."""

import asyncio
import json
from typing import Any

import jsonschema
import pytest

from engine.model.hash_model import HashModel
from tests.harness.cluster import Output
from tests.harness.local_cluster import LocalCluster, Sizes
from wire.errors import BatonError, InvalidRequest
from wire.layout import KVLayout
from wire.pb import inference_pb2 as pb

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
MODEL = HashModel(LAYOUT, 300, eos_token_ids=(256,))
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 8, "maxItems": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["names", "age"],
    "additionalProperties": False,
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3, "logprobs": 2},
    {"temperature": 1.0, "seed": 4, "n": 2, "presence_penalty": 0.5},
]


def ask(number: int, given: pb.ResponseFormat | None = None, **settings: Any) -> pb.GenerateRequest:
    given = given or pb.ResponseFormat(json_schema=json.dumps(SCHEMA))
    sampling = pb.SamplingParams(**{"max_tokens": 300, "seed": 1, "response_format": given, **settings})
    return pb.GenerateRequest(text=f"request {number}: name some colours", sampling_params=sampling)


async def outputs(cluster: LocalCluster) -> list[Output]:
    found = await asyncio.gather(*(cluster.generate(ask(number, **kind)) for number, kind in enumerate(KINDS)))
    for output in found:
        output.complete.ClearField("timeline")
        output.complete.ClearField("usage")
    return found


async def test_answers_are_of_their_schema_and_the_same_wherever_they_come_from() -> None:
    found = []
    for num_prefill, sizes in ((0, Sizes()), (1, Sizes()), (1, Sizes(num_blocks=24)), (1, Sizes(proposer="ngram"))):
        async with LocalCluster.running(MODEL, num_prefill, 1, sizes) as cluster:
            found.append(await outputs(cluster))
    assert found[1:] == found[:1] * 3
    for output in found[0]:
        for text in output.text.values():
            jsonschema.validate(json.loads(text), SCHEMA)


async def busy(cluster: LocalCluster) -> list[str]:
    return [one.worker_id for one in (await cluster.status()).workers if one.role == "decode" and one.num_running]


@pytest.mark.parametrize("kill_at", [0, 3, 40])
async def test_another_worker_goes_on_amid_an_answer(kill_at: int) -> None:
    async with LocalCluster.running(MODEL, 1, 2) as cluster:
        expected = (await outputs(cluster))[1].token_ids[0]
    async with LocalCluster.running(MODEL, 1, 2) as cluster:
        tokens: list[int] = []
        async for response in cluster.router.dispatcher.open(ask(1, **KINDS[1]), 60.0).outbox:
            tokens += response.chunk.token_ids
            if len(tokens) >= kill_at and response.WhichOneof("event") == "chunk":
                kill_at = 1000
                for member in await busy(cluster):
                    cluster.transports[member].kill()
        assert tokens == expected


@pytest.mark.parametrize(
    "given",
    [
        pb.ResponseFormat(),
        pb.ResponseFormat(regex="a" * 70_000),
        pb.ResponseFormat(regex="("),
        pb.ResponseFormat(json_schema='{"$ref": "https://example.com/schema"}'),
        pb.ResponseFormat(json_schema='{"$ref": "#"}'),
        pb.ResponseFormat(lark="start: start"),
    ],
    ids=lambda given: str(given)[:30],
)
async def test_a_format_that_cannot_be_met_ends_its_own_request(given: pb.ResponseFormat) -> None:
    async with LocalCluster.running(MODEL, 1, 1) as cluster:
        other = asyncio.create_task(cluster.generate(ask(0)))
        with pytest.raises(InvalidRequest, match="response_format"):
            await cluster.generate(ask(1, given))
        assert json.loads((await other).text[0])


async def test_a_grammar_that_dries_up_amid_an_answer_ends_its_own_request() -> None:
    async with LocalCluster.running(MODEL, 1, 1) as cluster:
        other = asyncio.create_task(cluster.generate(ask(0)))
        with pytest.raises(BatonError, match="response_format"):
            await cluster.generate(ask(1, pb.ResponseFormat(regex="ab"), min_tokens=5))
        assert json.loads((await other).text[0])
