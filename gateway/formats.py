"""Response formats of HTTP: OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_*`. Pure."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from gateway import fields
from gateway.unread import leave_out
from text.exact_schema import has_own_format
from wire.errors import InvalidRequest
from wire.typed_reader import Misfit, Read, list_of, reader_of, wrong

Format = dict[str, str]
"""A format's source, by the router's name of its kind."""
ANY_OBJECT = '{"type": "object"}'
MAX_CHOICES = 1024


def response_format(value: Any) -> Format | None:
    """Reads OpenAI's field; None for any text."""
    taken = _OPENAI(value)
    return _format(taken, taken.get("json_schema", {}), "json_schema")


def text_format(value: Any) -> Format | None:
    """Reads the format of OpenAI's responses, whose schema is beside its type; None for any text."""
    taken = _FLAT(value)
    return _format(taken, taken, "schema")


def structured_outputs(value: Any) -> Format | None:
    """Reads vLLM's field: an object of one constraint."""
    given = [one for one in _VLLM(value).values() if one is not None]
    if len(given) > 1:
        raise Misfit(f"must be one of {', '.join(_CONSTRAINTS)}, not {len(given)}")
    return given[0] if given else None


def take_format(taken: dict[str, Any], sent: dict[str, str]) -> None:
    """Moves the format of a request to the router's field. sent: client's names. Raises InvalidRequest for two."""
    given = {name: one for name in FIELDS if (one := taken.pop(name, None)) is not None}
    for name in [*given][1:]:
        raise InvalidRequest(name, f"is given beside {next(iter(given))}, and an answer has one format")
    for name, one in given.items():
        taken["response_format"] = one
        sent.setdefault("response_format", name)


def _format(taken: dict[str, Any], described: dict[str, Any], wanted: str) -> Format | None:
    """Returns the format of a type. described: has the schema, if any. wanted: the field that a schema requires.

    A schema beside json_object constrains the answer, too, as llama.cpp's clients expect.
    """
    if taken["type"] == "json_schema":
        fields.require(taken, wanted)
        return {"json_schema": str(described["schema"])}
    given = described.get("schema", taken.get("schema"))
    if taken["type"] == "text" and given is not None:
        raise Misfit("is given beside a type of text: give json_schema").within("schema")
    return {"json_schema": given or ANY_OBJECT} if taken["type"] == "json_object" else None


def schema(value: Any) -> str:
    """Reads a schema, as an object or as its JSON."""
    source = fields.text(value) if isinstance(value, str) else json.dumps(fields.free_object(value), ensure_ascii=False)
    return noted(source)


def noted(source: str) -> str:
    """Returns a schema as JSON. Notes `schema.format` as left out if no grammar expresses a format in it."""
    if has_own_format(source):
        leave_out("schema.format")
    return source


def _choices(value: Any) -> str:
    """Reads the texts that an answer may be, and writes their grammar."""
    given = list_of(fields.text)(value)
    if not 0 < len(given) <= MAX_CHOICES:
        raise wrong(f"a list of 1 to {MAX_CHOICES} texts", value)
    return "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in given)


def _any_object(value: Any) -> Format | None:
    return {"json_schema": ANY_OBJECT} if fields.flag(value) else None


def _as(kind: str, read: Read, value: Any) -> Format:
    return {kind: read(value)}


_DESCRIBED = {"name": fields.text, "description": fields.text, "strict": fields.flag, "schema": schema}
_TYPE = reader_of(Literal["text", "json_object", "json_schema"])
_OPENAI = fields.object_of(
    {"type": _TYPE, "schema": schema, "json_schema": fields.object_of(_DESCRIBED, "schema")}, "type"
)
_FLAT = fields.object_of({"type": _TYPE, **_DESCRIBED}, "type")
_CONSTRAINTS: Mapping[str, Callable[[Any], Format | None]] = {
    "json": partial(_as, "json_schema", schema),
    "regex": partial(_as, "regex", fields.text),
    "choice": partial(_as, "lark", _choices),
    "grammar": partial(_as, "lark", fields.text),
    "json_object": _any_object,
}
_VLLM = fields.object_of(_CONSTRAINTS)
FIELDS: dict[str, Read] = {
    "response_format": response_format,
    "structured_outputs": structured_outputs,
    **{f"guided_{name}": _CONSTRAINTS[name] for name in ("json", "regex", "choice", "grammar")},
}
"""The fields of both kinds of requests."""
