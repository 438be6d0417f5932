"""The gateway's OpenAPI description, from the tables of fields that validate requests."""

import json
import re
from collections.abc import Mapping
from typing import Any

from gateway import fields, formats, messages, responses, unread
from wire.ids import release
from wire.typed_reader import Read


def describe(path_to_fields: Mapping[str, Mapping[str, Read]], paths_to_get: tuple[str, ...]) -> bytes:
    """Writes the page: paths with a body and its fields, then paths without a body."""
    posted = {path: {"post": _post(path, known)} for path, known in path_to_fields.items()}
    got = {path: {"get": _get(path)} for path in paths_to_get}
    info = {"title": "Baton", "version": release()}
    schemas = {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR}
    page = {"openapi": "3.1.0", "info": info, "paths": posted | got, "components": {"schemas": schemas}}
    return json.dumps(page).encode()


def _get(path: str) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", path)
    described = {"parameters": [{"name": name, "in": "path", "required": True, "schema": _NAME} for name in names]}
    return described | {"responses": _responses("404") if names else _responses()}


def _post(path: str, known: Mapping[str, Read]) -> dict[str, Any]:
    """Describes a body: fields that are read, left out, or refused unless their value asks for nothing."""
    idle = {name: {"enum": [*unread.ONLY.get(name, ()), [], {}, None]} for name in unread.REFUSED}
    ignored: dict[str, Any] = {name: {"description": "without effect"} for name in unread.IGNORED}
    properties = (
        idle | ignored | {name: SCHEMAS.get(read, {"type": ["integer", "null"]}) for name, read in known.items()}
    )
    for name in REQUIRED.get(path, {}).get("required", ()):
        properties[name] = {"not": {"type": "null"}, **properties[name]}
    schema = {"type": "object", "properties": properties, "additionalProperties": True, **REQUIRED.get(path, {})}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": _responses("400", "404", "415", form=ERRORS.get(path, "Error")),
        "operationId": path.strip("/").replace("/", "_"),
    }


def _responses(*statuses: str, form: str = "Error") -> dict[str, Any]:
    """Describes the answer and the errors, by these statuses and by default."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{form}"}}}
    error = {"description": "an error, with the name of the field as its `param`", "content": content}
    return {"200": {"description": "the answer"}, **dict.fromkeys((*statuses, "default"), error)}


REQUIRED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"required": ["prompt"]},
    "/v1/chat/completions": {"required": ["messages"]},
    "/v1/responses": {"required": ["input"]},
    **{key: {"required": ["messages"]} for key in ("/v1/messages", "/v1/messages/count_tokens")},
    "/tokenize": {"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]},
    "/detokenize": {"required": ["tokens"]},
}
"""Required fields by path, as JSON Schema."""
_NAME = {"type": "string", "minLength": 1}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
                "timeline": {"type": "object"},
            },
        }
    },
}
_MESSAGES_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
ERRORS = dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), "MessagesError")
_TEXT = {"type": ["string", "null"]}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_OBJECT = {"type": ["object", "null"]}
_OBJECTS = {"type": ["array", "null"], "items": {"type": "object"}}
_CHOICE = {"anyOf": [{"enum": ["none", "auto", "required", None]}, {"type": "object"}]}
SCHEMAS: dict[Read, dict[str, Any]] = {
    fields.number: {"type": ["number", "null"]},
    fields.seed: {"type": ["integer", "null"]},
    fields.flag: {"type": ["boolean", "null"]},
    fields.text: _TEXT,
    fields.texts: {"anyOf": [_TEXT, _TEXTS]},
    fields.token_ids: {**_IDS, "type": ["array", "null"]},
    fields.prompts: {"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS, "minItems": 1}]},
    **{key: {**_OBJECTS, "minItems": 1} for key in (fields.messages, messages.turns)},
    fields.tools: _OBJECTS,
    fields.tool_choice: _CHOICE,
    fields.reasoning_effort: {"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max", None]},
    fields.service_tier: {"enum": [*fields.TIER_TO_PRIORITY, None]},
    fields.free_object: _OBJECT,
    fields.logit_bias: {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
    **dict.fromkeys((formats.response_format, formats.text_format), _OBJECT),
    formats.structured_outputs: _OBJECT,
    formats.FIELDS["guided_json"]: {"type": ["object", "string", "null"]},
    formats.FIELDS["guided_regex"]: _TEXT,
    formats.FIELDS["guided_grammar"]: _TEXT,
    formats.FIELDS["guided_choice"]: {**_TEXTS, "type": ["array", "null"]},
    responses.input_items: {"anyOf": [{"type": "string"}, {**_OBJECTS, "minItems": 1}]},
    responses.tool_choice: _CHOICE,
    **dict.fromkeys((responses.FIELDS["tools"], messages.FIELDS["tools"]), _OBJECTS),
    **dict.fromkeys((messages.tool_choice, messages.thinking, messages.FIELDS["output_config"]), _OBJECT),
    messages.FIELDS["system"]: {"anyOf": [_TEXT, {**_OBJECTS, "minItems": 1}]},
    messages.FIELDS["stop_sequences"]: {**_TEXTS, "type": ["array", "null"]},
    **{responses.FIELDS[name]: _OBJECT for name in ("text", "reasoning", "stream_options")},
    fields.stream_options: {
        "type": ["object", "null"],
        "properties": {key: {"type": ["boolean", "null"]} for key in ("include_usage", "continuous_usage_stats")},
    },
}
"""The JSON schema of a field, by its reader; other readers read whole numbers."""
