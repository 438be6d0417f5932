"""The fields of a body: strict JSON, known fields by their types, others by the rule of `unread`. Null means absent."""

import json
import re
from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import Annotated, Any, Literal

from gateway.unread import pass_over
from wire.errors import BatonError, InvalidRequest
from wire.rpc import MAX_TURNS
from wire.typed_reader import Between, Misfit, Read, list_of, located, once, reader_of, wrong

MAX_PROMPTS = 16
INT32, INT64 = 1 << 31, 1 << 63
MAX_NUMBER = 1e9
"""Bound on the magnitude of each number; all ranges are within it."""
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]+")
_PLACE = re.compile(r"\[\d+\]")
_WORD = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")
"""Matches a field's name that cannot be a word of a sentence."""


def parse(body: bytes) -> dict[str, Any]:
    """Reads a JSON object in UTF-8, with or without a byte order mark. Raises InvalidRequest."""
    try:
        parsed = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant, object_pairs_hook=once)
    except Misfit as misfit:
        raise InvalidRequest("body", f"has the key {misfit.under('')} twice in one object") from misfit
    except (ValueError, RecursionError) as error:  # bad UTF-8 and numbers of thousands of digits are ValueErrors, too
        raise InvalidRequest("body", "not JSON in UTF-8") from error
    if not isinstance(parsed, dict):
        raise InvalidRequest("body", "must be an object")
    return parsed


def take(body: Mapping[str, Any], known: Mapping[str, Read], *required: str) -> dict[str, Any]:
    """Reads known fields; leaves out or refuses others. Raises InvalidRequest, naming a refused or missing field."""
    try:
        return object_of(known, *required)(body)  # type: ignore[no-any-return]
    except Misfit as misfit:
        raise InvalidRequest(misfit.under(""), str(misfit)) from misfit


def object_of(known: Mapping[str, Read], *required: str) -> Read:
    """Reads an object of known fields; leaves out or refuses others. Raises Misfit for a missing or refused field."""
    names = frozenset(known)

    def read(value: Any) -> dict[str, Any]:
        given = {name: one for name, one in _object(value).items() if one is not None}
        taken = located(
            {name: (known.get(name) or partial(pass_over, name, names), one) for name, one in given.items()}
        )
        return require({name: one for name, one in taken.items() if name in names}, *required)

    return read


def rename(taken: dict[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    """Renames fields in place to the router's names; returns the client's names by the router's.

    Raises InvalidRequest if two names of one field have different values.

    names: the router's by the client's. A name such as `reasoning.effort` means a field within an object, which is
    removed.
    """
    sent: dict[str, str] = {}
    holders = {outer: taken.pop(outer, {}) for outer in {name.rpartition(".")[0] for name in names} - {""}}
    for name, routers in names.items():
        outer, _, inner = name.rpartition(".")
        if inner in (holder := holders.get(outer, taken)):
            given = holder.pop(inner)
            if taken.get(routers, given) != given:
                raise InvalidRequest(name, f"is given beside {sent.get(routers, routers)}, and the two differ")
            taken[routers], sent[routers] = given, name
    return sent


def place_by_tier(taken: dict[str, Any]) -> str:
    """Gives a request the priority of its service tier in place of the tier, unless it has a priority.

    Returns the tier by which it is then served; "" if it names none.
    """
    tier = taken.pop("service_tier", "")
    priority = TIER_TO_PRIORITY[tier or "auto"]
    is_used = priority and taken.setdefault("priority", priority) == priority
    return tier if is_used else tier and "default"


def in_words(error: BatonError, sent: Mapping[str, str]) -> BatonError:
    """Returns an error with the client's names of fields in place of the router's. sent: client's names by router's.

    An entry of `sent` with an index, such as `tools[3]`, gives that item's place in the client's list. An entry without
    an index renames a field and all fields within it; [] in it matches any index.
    """
    given = error.ids.get("param", "")
    param = re.sub(r"\w+\[\d+\]", lambda place: sent.get(place[0], place[0]), given, count=1)
    shape, places = _PLACE.sub("[]", param), iter(_PLACE.findall(param))
    known = max((one for one in sent if re.match(rf"{re.escape(one)}(?![^.\[])", shape)), key=len, default="")
    name = re.sub(r"\[\]", lambda _: next(places), sent[known] + shape[len(known) :]) if known else param
    message, told = error.message.removeprefix(f"{given}: "), copy(error)
    told.message = f"{name}: " * (message != error.message) + _WORD.sub(lambda one: sent.get(one[0], one[0]), message)
    told.ids = {**error.ids, "param": name} if param else error.ids
    return told


def by_type(readers: Mapping[str, Read], default: str | None = None) -> Read:
    """Reads an object by the reader for its `type`. default: the type of an object without `type`."""
    read_type = reader_of(Literal[tuple(readers)])

    def read(value: Any) -> Any:
        given = _object(value).get("type")
        return readers[located({"type": (read_type, default if given is None else given)})["type"]](value)

    return read


def require(taken: dict[str, Any], *names: str) -> dict[str, Any]:
    """Returns the fields. Raises Misfit for a missing field."""
    for name in names:
        if name not in taken:
            raise Misfit("is missing").within(name)
    return taken


def text(value: Any) -> str:
    given: str = _text(value)
    _require_unicode(given)
    return given


def texts(value: Any) -> list[str]:
    """Reads a text or a list of texts."""
    return [text(one) for one in (value if isinstance(value, list) else [value])]


def token_ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one < 2 * INT32 for one in value):
        raise wrong("a list of token ids", value)
    return value


def prompts(value: Any) -> list[str | list[int]]:
    """Reads a text, token ids, or a list of either."""
    if isinstance(value, str):
        return [text(value)]
    if not isinstance(value, list) or not value:
        raise wrong("a list of texts or token ids, or a text, and not empty", value)
    if type(value[0]) in (int, float, bool):
        return [token_ids(value)]
    if len(value) > MAX_PROMPTS:
        raise Misfit(f"must be at most {MAX_PROMPTS} prompts, not {len(value)}")
    read: Read = text if isinstance(value[0], str) else token_ids
    return [read(one) for one in value]


def turns_of(read_item: Read, what: str) -> Read:
    """Reads a list of at most as many items as a chat may have turns. what: names the items in errors."""

    def read(value: Any) -> list[Any]:
        if not isinstance(value, list) or not 0 < len(value) <= MAX_TURNS:
            raise wrong(f"a list of 1 to {MAX_TURNS} {what}", value)
        return list_of(read_item)(value)  # type: ignore[no-any-return]

    return read


def logit_bias(value: Any) -> dict[int, float]:
    """Reads biases by token id; JSON writes the ids as text."""
    if not isinstance(value, dict) or not all(key.isascii() and key.isdecimal() and len(key) < 10 for key in value):
        raise wrong("an object with token ids for names", value)
    return {int(key): number(one) for key, one in value.items()}


def tool_choice(value: Any) -> str | dict[str, Any]:
    """Reads a word, or the function to call."""
    if not isinstance(value, dict):
        return str(choice_word(value))
    return {"name": _NAMED(value)["function"]["name"]}


def _message(value: Any) -> dict[str, Any]:
    """Reads a turn of a chat. Content is a text, or a list of parts that are all text."""
    taken = _TURN(value)
    if "reasoning" in taken:
        taken.setdefault("reasoning_content", taken.pop("reasoning"))
    if taken.get("tool_calls") or "reasoning_content" in taken:
        taken.setdefault("content", "")
    return require(taken, "role", "content")


def content_of(*kinds: str, **more: Read) -> Read:
    """Reads a text, or a list of text parts of these types. more: further fields of parts, which are dropped."""
    read_parts = list_of(object_of({"type": reader_of(Literal[kinds]), "text": text, **more}, "type", "text"))

    def read(value: Any) -> str:
        if value == []:
            raise wrong("a text, or a list of parts that is not empty", value)
        return text(value) if isinstance(value, str) else "".join(one["text"] for one in read_parts(value))

    return read


def call_json(name: str, arguments: Mapping[str, Any], **named: str) -> str:
    """Writes an assistant's tool call as the JSON that the router takes. named: its `id`, if it has one."""
    return json.dumps({**named, "type": "function", "function": {"name": name, "arguments": arguments}})


def _call(value: Any) -> str:
    taken = _CALL(value)
    return call_json(**taken["function"], **({"id": taken["id"]} if "id" in taken else {}))


def arguments(value: Any) -> dict[str, Any]:
    """Reads the arguments of a call: an object, as JSON in a text."""
    try:
        read = json.loads(text(value).strip() or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Misfit("must be JSON") from error
    return free_object(read)


def past_arguments(value: Any) -> dict[str, Any]:
    """Reads the arguments of an earlier call. A text that is no object (a cut call) becomes an object's only field."""
    try:
        return arguments(value)
    except Misfit:  # many templates take nothing but an object
        return {"arguments": text(value)}


def _tool(value: Any) -> dict[str, Any]:
    return {"type": "function", **_TOOL(value)}


def function_name(value: Any, max_chars: int = 64) -> str:
    if not isinstance(value, str) or len(value) > max_chars or not _FUNCTION_NAME.fullmatch(value):
        raise wrong(f"1 to {max_chars} characters of A-Z a-z 0-9 _ -", value)
    return value


def seed(value: Any) -> int | None:
    """Reads a seed: -1 means none; another negative number keeps its low 63 bits."""
    given: int = int64(value)
    return None if given == -1 else given % INT64


def free_object(value: Any) -> dict[str, Any]:
    """Reads an object with any content."""
    _require_unicode(json.dumps(given := _object(value), ensure_ascii=False))
    return dict(given)


def _require_unicode(value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Misfit("has half of a surrogate pair, which is no character") from error


def _refuse_constant(_: str) -> None:
    raise ValueError("no number")


_text, _object, flag = reader_of(str), reader_of(dict), reader_of(bool)
int32, int64 = [reader_of(Annotated[int, Between(-bound, bound - 1)]) for bound in (INT32, INT64)]
number = reader_of(Annotated[float, Between(-MAX_NUMBER, MAX_NUMBER)])
choice_word = reader_of(Literal["none", "auto", "required"])
reasoning_effort = reader_of(Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"])
function_type = reader_of(Literal["function"])
_CALL = object_of(
    {
        "id": text,
        "type": function_type,
        "index": int32,
        "function": object_of({"name": text, "arguments": past_arguments}, "name", "arguments"),
    },
    "function",
)
_TURN = object_of(
    {
        "role": text,
        "content": content_of("text"),
        "tool_calls": list_of(_call),
        **dict.fromkeys(("tool_call_id", "name", "reasoning", "reasoning_content"), text),
    }
)
FUNCTION: dict[str, Read] = {
    "name": function_name,
    "description": text,
    "parameters": free_object,
    "strict": flag,
}
_TOOL = object_of({"type": function_type, "function": object_of(FUNCTION, "name")}, "function")
messages = turns_of(_message, "messages")
tools = list_of(_tool)
_NAMED = object_of({"type": function_type, "function": object_of({"name": function_name}, "name")}, "function")
stream_options = object_of({"include_usage": flag, "continuous_usage_stats": flag})
SAMPLING: dict[str, Read] = {
    "temperature": number,
    "top_p": number,
    "top_k": int32,
    "min_p": number,
    "max_tokens": int64,
    "min_tokens": int64,
    "seed": seed,
    "ignore_eos": flag,
    "presence_penalty": number,
    "frequency_penalty": number,
    "repetition_penalty": number,
    "n": int32,
    "stop": texts,
    "stop_token_ids": token_ids,
    "logit_bias": logit_bias,
    "skip_special_tokens": flag,
    "include_stop_str_in_output": flag,
}
"""Fields that keep their names; the router checks their ranges."""
TIER_TO_PRIORITY = {"auto": 0, "default": 0, "standard_only": 0, "flex": 1 << 16, "priority": -(1 << 16)}
"""The priority of a request by its service tier, unless it has one of its own."""
service_tier = reader_of(Literal[tuple(TIER_TO_PRIORITY)])
COMMON: dict[str, Read] = {
    **SAMPLING,
    "keep_s": number,
    "kv_policy": text,
    "model": text,
    "priority": int32,
    "return_token_ids": flag,
    "service_tier": service_tier,
    "session": text,
    "stream": flag,
    "stream_options": stream_options,
    "timeline": flag,
}
"""The fields of both kinds of requests."""
TOKENIZE: dict[str, Read] = {"model": text, "prompt": text, "messages": messages, "return_token_strs": flag}
DETOKENIZE: dict[str, Read] = {"model": text, "tokens": token_ids}
