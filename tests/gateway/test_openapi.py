"""The page names what the gateway takes: each field, and no other."""

import jsonschema
from openapi_spec_validator import OpenAPIV31SpecValidator

from gateway import app, fields, unread
from gateway.observe import openapi
from tests.gateway.local_gateway import LocalGateway

OBJECTS = (
    "logit_bias",
    "stream_options",
    "response_format",
    "structured_outputs",
    "guided_json",
    "chat_template_kwargs",
    "tool_choice",
    "text",
    "reasoning",
    "thinking",
    "output_config",
    "output_format",
)
"""Fields whose faults are named within them, or that may have any names."""


async def test_each_path_has_exactly_the_fields_that_it_takes(gateway: LocalGateway) -> None:
    page = (await gateway.get("/openapi.json")).json
    posted = {path: one["post"] for path, one in page["paths"].items() if "post" in one}
    assert posted.keys() == app.PATH_TO_FIELDS.keys()
    for path, one in posted.items():
        schema = one["requestBody"]["content"]["application/json"]["schema"]
        assert schema["additionalProperties"] is True
        assert set(schema["properties"]) == {*app.PATH_TO_FIELDS[path], *unread.REFUSED, *unread.IGNORED}
        for name in (*schema["properties"], "no_field"):
            answer = await gateway.post(path, {name: {"of no field": 1}})
            is_named = (answer.status, answer.error["param"]) == (400, name)
            assert is_named or name in (*unread.IGNORED, *OBJECTS, "no_field"), (path, name)


async def test_each_path_to_read_is_there(gateway: LocalGateway) -> None:
    page = (await gateway.get("/openapi.json")).json
    read = [path for path, one in page["paths"].items() if "get" in one]
    assert "/openapi.json" in read
    for path in read:
        assert (await gateway.get(path.replace("{model}", "fake"))).status == 200


def test_each_reader_has_a_form() -> None:
    read = {one for known in app.PATH_TO_FIELDS.values() for one in known.values()}
    others = {one for one in read if one not in openapi.SCHEMAS}
    assert others == {fields.int32, fields.int64}


async def test_the_page_is_valid(gateway: LocalGateway) -> None:
    page = (await gateway.get("/openapi.json")).json
    assert [one.message for one in OpenAPIV31SpecValidator(page).iter_errors()] == []
    broken = page | {"paths": page["paths"] | {"/v1/models/{model}": {"get": {"responses": {}}}}}
    assert list(OpenAPIV31SpecValidator(broken).iter_errors())


async def test_fields_that_are_required_are_missed_by_name(gateway: LocalGateway) -> None:
    page = (await gateway.get("/openapi.json")).json
    required = {
        path: one["post"]["requestBody"]["content"]["application/json"]["schema"].get("required")
        for path, one in page["paths"].items()
        if "post" in one
    }
    assert required.pop("/tokenize") is None  # one of two is
    assert required == {
        "/v1/completions": ["prompt"],
        "/v1/chat/completions": ["messages"],
        "/v1/responses": ["input"],
        **{key: ["messages"] for key in ("/v1/messages", "/v1/messages/count_tokens")},
        "/detokenize": ["tokens"],
    }
    for path, names in required.items():
        for body in ({}, {names[0]: None}):
            answer = await gateway.post(path, body)
            assert (answer.status, answer.error["param"]) == (400, names[0])


async def test_answers_have_a_status_that_the_page_names_and_its_form(gateway: LocalGateway) -> None:
    page = (await gateway.get("/openapi.json")).json
    posted = [path for path, one in page["paths"].items() if "post" in one]
    answers = [(path, "post", await gateway.post(path, {"model": "none", "prompt": "a"})) for path in posted]
    answers += [(path, "post", await gateway.post(path, b"{}", content_type="text/plain")) for path in posted]
    answers += [("/v1/models/{model}", "get", await gateway.get("/v1/models/none"))]
    assert {answer.status for _, _, answer in answers} == {400, 404, 415}
    for path, method, answer in answers:
        told = page["paths"][path][method]["responses"][str(answer.status)]["content"]["application/json"]["schema"]
        form = page["components"]["schemas"][told["$ref"].rpartition("/")[2]]
        jsonschema.validate(answer.json, form)
        assert answer.json["error"].keys() == {*form["properties"]["error"]["required"]}
