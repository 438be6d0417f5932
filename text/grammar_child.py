"""A process that builds grammars, before any worker does: `python -m text.grammar_child`.

first   {"memory_bytes"}
task    {"kind", "source"} of a response format, and "sources": the same of the formats in it, by fields of the request;
        answered by {} or {"failure"}, with the "param" of the first source that is faulty alone
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from text.child import Handler, serve
from text.grammar import fault_of, new_matcher
from wire.errors import InvalidRequest
from wire.sampling import FormatKind, ResponseFormat

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def _prepare(_: dict[str, Any]) -> Handler:
    from llguidance import LLTokenizer

    return partial(_answer, LLTokenizer("byte"))


def _answer(tokenizer: "LLTokenizer", asked: dict[str, Any]) -> dict[str, str]:
    """Builds a grammar; if that fails, each format in it alone."""
    if not (failure := _failure(tokenizer, asked)):
        return {}
    alone = ((param, _failure(tokenizer, source)) for param, source in asked["sources"].items())
    return next(({"param": param, "failure": one} for param, one in alone if one), {"failure": failure})


def _failure(tokenizer: "LLTokenizer", asked: dict[str, Any]) -> str:
    """Builds a grammar, its first mask, and the mask after forced text; returns its fault, or ""."""
    try:
        matcher = new_matcher(ResponseFormat(FormatKind(asked["kind"]), asked["source"]), tokenizer)
    except InvalidRequest as error:
        return error.message.partition(": ")[2]
    matcher.compute_bitmask()
    matcher.consume_tokens(matcher.compute_ff_tokens())
    matcher.compute_bitmask()
    fault = fault_of(matcher)
    return f"cannot be answered: {fault}" if fault else ""


if __name__ == "__main__":
    serve(_prepare)
