"""The fields of a body: strict JSON, and each field by name. Null is as good as absent. Pure."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wire.errors import InvalidRequest
from wire.rpc import MAX_TURNS

Read = Callable[[object, str], Any]
"""Reads the value of a field of that name. Raises InvalidRequest."""
MAX_NAME_CHARS = 64
MAX_PROMPTS = 16
INT32, INT64 = 1 << 31, 1 << 63
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_NUMBER = 1e9
"""Larger ones are in no range."""


def parse(body: bytes) -> dict[str, Any]:
    """Reads an object in UTF-8, with or without a mark before it. Raises InvalidRequest."""
    try:
        parsed = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # bad UTF-8 and numbers of thousands of digits are ValueErrors, too
        raise InvalidRequest("body", "not JSON in UTF-8") from error
    _require(isinstance(parsed, dict), "body", "must be an object")
    fields: dict[str, Any] = parsed
    return fields


def take(body: Mapping[str, Any], known: Mapping[str, Read], within: str = "") -> dict[str, Any]:
    """Reads known fields and skips ignored ones. Raises InvalidRequest that names any other.

    within: the path of an inner object, ending in a dot.
    """
    taken = {}
    for key, value in body.items():
        name = within + "".join(char if char.isprintable() else "?" for char in key[:MAX_NAME_CHARS])
        if value is None or key in IGNORED:
            continue
        if key in known:
            taken[key] = known[key](value, name)
        elif key in ONLY:
            allowed = " or ".join(json.dumps(one) for one in ONLY[key])
            _require(any(_is_same(value, one) for one in ONLY[key]), name, f"is not offered, but as {allowed}")
        else:
            raise InvalidRequest(name, "is not offered" if key in REFUSED else "is no field of this request")
    return taken


def whole(bound: int) -> Read:
    """Makes a reader of whole numbers from -bound to bound - 1."""

    def read(value: object, name: str) -> int:
        if type(value) is not int or not -bound <= value < bound:
            raise InvalidRequest(name, "must be a whole number that fits")
        return value

    return read


def number(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > MAX_NUMBER:
        raise InvalidRequest(name, "must be a number")
    return float(value)


def flag(value: object, name: str) -> bool:
    _require(type(value) is bool, name, "must be true or false")
    return bool(value)


def text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(name, "must be a text")
    _require_unicode(value, name)
    return value


def texts(value: object, name: str) -> list[str]:
    """Reads a text or a list of texts."""
    given = value if isinstance(value, list) else [value]
    return [text(one, name) for one in given]


def token_ids(value: object, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one < 2 * INT32 for one in value):
        raise InvalidRequest(name, "must be a list of token ids")
    return value


def prompts(value: object, name: str) -> list[str | list[int]]:
    """Reads a text, token ids, or a list of one or the other."""
    if isinstance(value, str):
        return [text(value, name)]
    given = _items(value, name, "texts or token ids, or a text")
    if type(given[0]) in (int, float, bool):
        return [token_ids(given, name)]
    _require(len(given) <= MAX_PROMPTS, name, f"at most {MAX_PROMPTS} prompts")
    read: Read = text if isinstance(given[0], str) else token_ids
    return [read(one, name) for one in given]


def messages(value: object, name: str) -> list[dict[str, Any]]:
    """Reads the turns of a chat. Content is a text, or a list of parts that are all text."""
    given = _items(value, name, "messages")
    _require(len(given) <= MAX_TURNS, name, f"at most {MAX_TURNS} messages")
    return [_message(one, f"{name}[{index}]") for index, one in enumerate(given)]


def tools(value: object, name: str) -> list[dict[str, Any]]:
    """Reads the functions that an answer may call."""
    return [_tool(one, f"{name}[{index}]") for index, one in enumerate(_list(value, name))]


def tool_choice(value: object, name: str) -> str:
    _require(value in ("none", "auto"), name, 'is not offered, but as "none" or "auto"')
    return str(value)


def stream_options(value: object, name: str) -> bool:
    """Returns whether usage is to be told at the end of the stream."""
    return bool(_inner(value, name, {"include_usage": flag}).get("include_usage"))


def logit_bias(value: object, name: str) -> dict[int, float]:
    """Reads biases by token id, which JSON has as text."""
    if not isinstance(value, dict):
        raise InvalidRequest(name, "must be an object of token ids and biases")
    are_ids = all(key.isascii() and key.isdecimal() and len(key) < 10 for key in value)
    _require(are_ids, name, "must have token ids for keys")
    return {int(key): number(one, name) for key, one in value.items()}


IGNORED = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""Fields that do nothing here and are taken."""
ONLY: dict[str, Sequence[object]] = {
    "add_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "annotations": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "continuous_usage_stats": (False,),
    "echo": (False,),
    "function_call": ("none",),
    "include_obfuscation": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "priority": (0,),
    "prompt_logprobs": (0, False),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}
"""Fields that are not offered, with the values that ask for nothing."""
REFUSED = frozenset(
    {
        "allowed_token_ids",
        "audio",
        "bad_words",
        "cache_salt",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "functions",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "kv_transfer_params",
        "length_penalty",
        "prediction",
        "reasoning_effort",
        "structured_outputs",
        "truncate_prompt_tokens",
        "verbosity",
        "web_search_options",
    }
)
"""Fields that are known, and not offered; all others are refused as well."""
SAMPLING: dict[str, Read] = {
    "temperature": number,
    "top_p": number,
    "top_k": whole(INT32),
    "min_p": number,
    "max_tokens": whole(INT64),
    "min_tokens": whole(INT64),
    "seed": whole(INT64),
    "ignore_eos": flag,
    "presence_penalty": number,
    "frequency_penalty": number,
    "repetition_penalty": number,
    "n": whole(INT32),
    "stop": texts,
    "stop_token_ids": token_ids,
    "logit_bias": logit_bias,
    "skip_special_tokens": flag,
    "include_stop_str_in_output": flag,
}
"""Fields that go to the router under their names, which checks their ranges."""
COMMON: dict[str, Read] = {
    **SAMPLING,
    "kv_policy": text,
    "model": text,
    "stream": flag,
    "stream_options": stream_options,
}
"""The fields of both kinds of requests."""
TOKENIZE: dict[str, Read] = {"model": text, "prompt": text, "messages": messages, "return_token_strs": flag}
DETOKENIZE: dict[str, Read] = {"model": text, "tokens": token_ids}


def _message(value: object, name: str) -> dict[str, Any]:
    known: dict[str, Read] = {"role": text, "content": _content, "tool_calls": _calls, "tool_call_id": text}
    taken = _inner(value, name, known)
    if taken.get("tool_calls"):
        taken.setdefault("content", "")
    for key in ("role", "content"):
        _require(key in taken, f"{name}.{key}", "is missing")
    return taken


def _calls(value: object, name: str) -> list[str]:
    """Reads the calls of an assistant's turn, as the router takes them."""
    return [json.dumps(_call(one, f"{name}[{index}]")) for index, one in enumerate(_list(value, name))]


def _call(value: object, name: str) -> dict[str, Any]:
    known: dict[str, Read] = {"name": text, "arguments": _arguments}
    call: dict[str, Read] = {"id": text, "type": _function_type, "index": whole(INT32)}
    taken = _inner(value, name, {**call, "function": lambda one, within: _inner(one, within, known)})
    for key in ("name", "arguments"):
        _require(key in taken.get("function", {}), f"{name}.function.{key}", "is missing")
    taken.pop("index", None)
    return {**taken, "type": "function"}


def _arguments(value: object, name: str) -> dict[str, Any]:
    """Reads the arguments of a call: an object, as JSON in a text."""
    try:
        read = json.loads(text(value, name) or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(name, "must be JSON") from error
    return _object(read, name)


def _tool(value: object, name: str) -> dict[str, Any]:
    known: dict[str, Read] = {"name": _function_name, "description": text, "parameters": _object, "strict": _not_strict}
    tool: dict[str, Read] = {"type": _function_type}
    taken = _inner(value, name, {**tool, "function": lambda one, within: _inner(one, within, known)})
    _require("name" in taken.get("function", {}), f"{name}.function.name", "is missing")
    taken["function"].pop("strict", None)
    return {"type": "function", **taken}


def _function_type(value: object, name: str) -> str:
    _require(value == "function", name, "only function is offered")
    return "function"


def _function_name(value: object, name: str) -> str:
    valid = isinstance(value, str) and _FUNCTION_NAME.fullmatch(value)
    _require(bool(valid), name, "must be 1 to 64 characters of A-Z a-z 0-9 _ -")
    return str(value)


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(name, "must be an object")
    _require_unicode(json.dumps(value, ensure_ascii=False), name)
    return value


def _not_strict(value: object, name: str) -> bool:
    _require(value is False, name, "is not offered, but as false")
    return False


def _content(value: object, name: str) -> str:
    if isinstance(value, str):
        return text(value, name)
    return "".join(_part(one, f"{name}[{index}]") for index, one in enumerate(_items(value, name, "parts")))


def _part(value: object, name: str) -> str:
    _require(isinstance(value, dict) and value.get("type") == "text", f"{name}.type", "only text is offered")
    taken = _inner(value, name, {"type": text, "text": text})
    _require("text" in taken, f"{name}.text", "is missing")
    return str(taken["text"])


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequest(name, "must be a list")
    return value


def _items(value: object, name: str, what: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest(name, f"must be a list of {what}, and not empty")
    return value


def _inner(value: object, name: str, known: Mapping[str, Read]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(name, "must be an object")
    return take(value, known, f"{name}.")


def _require_unicode(value: str, name: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(name, "has half of a surrogate pair, which is no character") from error


def _is_same(value: object, other: object) -> bool:
    """Compares as JSON does: true is not 1."""
    return type(value) is type(other) and value == other


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key stands twice")
    return fields


def _refuse_constant(_: str) -> None:
    raise ValueError("no number")


def _require(valid: bool, param: str, message: str) -> None:
    if not valid:
        raise InvalidRequest(param, message)
