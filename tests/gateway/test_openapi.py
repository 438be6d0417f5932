"""The page names what the gateway takes: each field, and no other."""

from collections.abc import AsyncIterator

import pytest

from gateway import app, fields, openapi
from tests.gateway.local_gateway import LocalGateway, serving


@pytest.fixture
async def gateway() -> AsyncIterator[LocalGateway]:
    async with serving() as gateway:
        yield gateway


async def test_each_path_has_exactly_the_fields_that_it_takes(gateway: LocalGateway) -> None:
    page = (await gateway.get("/openapi.json")).json
    posted = {path: one["post"] for path, one in page["paths"].items() if "post" in one}
    assert posted.keys() == app.PATH_TO_FIELDS.keys()
    for path, one in posted.items():
        schema = one["requestBody"]["content"]["application/json"]["schema"]
        assert schema["additionalProperties"] is False
        assert set(schema["properties"]) == {*app.PATH_TO_FIELDS[path], *fields.ONLY, *fields.IGNORED}
        for name in (*schema["properties"], *fields.REFUSED, "no_field"):
            answer = await gateway.post(path, {name: {"of no field": 1}})
            is_named = (answer.status, answer.error["param"]) == (400, name)
            assert is_named or name in (*fields.IGNORED, "logit_bias", "stream_options"), (path, name)


async def test_each_path_to_read_is_there(gateway: LocalGateway) -> None:
    page = (await gateway.get("/openapi.json")).json
    read = [path for path, one in page["paths"].items() if "get" in one]
    assert "/openapi.json" in read
    for path in read:
        assert (await gateway.get(path.replace("{model}", "fake"))).status == 200


def test_each_reader_has_a_form() -> None:
    read = {one for known in app.PATH_TO_FIELDS.values() for one in known.values()}
    others = {one for one in read if one not in openapi.SCHEMAS}
    assert {one.__qualname__ for one in others} == {"whole.<locals>.read"}
