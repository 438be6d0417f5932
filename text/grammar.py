"""Response formats as llguidance grammars; the library is imported at the first one.

Source of the algorithm: Moskal et al., llguidance: an Earley parser over lexemes; masks come from traversing a trie.
"""

import asyncio
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from text.child_processes import ChildProcesses, Task
from text.exact_schema import exact_schema
from wire.errors import InvalidRequest, Unsupported
from wire.sampling import FormatKind, ResponseFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

PARAM = "response_format"
MAX_FAULT_CHARS = 160
NUM_PROCESSES = 2
NO_SOURCES: Mapping[str, ResponseFormat] = {}
MEMORY_BYTES = 512 << 20
MAX_STEP_ITEMS = 2_000
"""Earley items for one token: 8 ms with an ambiguous grammar.

Schemas meet llguidance's own bound on a row first, at some 490 optional properties.
"""
MAX_LEXER_STATES = 20_000
"""States of the lexer of one choice, of one or two kilobytes each."""
MAX_GRAMMAR_SIZE = 100_000
INITIAL_FUEL, STEP_FUEL = 500_000, 100_000
"""Steps of the lexer: 10 ms when a matcher is built, and 7 ms for each mask."""
_JSON_OPTIONS: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Fixed separators, as Python's json writes them: else a model could write white space without end."""
_REGEX_PART = re.compile(r"\\.|/|\n", re.DOTALL)
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_ESCAPED = {"/": r"\/", "\n": r"\n"}
_IN_WORDS = {
    "NoExtensionBias": "it allows neither a further token nor the end",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "a oneOf has cases that are not told apart by a property"
    ),
    "regex parse error:": "a regular expression is malformed, looks around or refers back",
}


def new_matcher(given: ResponseFormat, tokenizer: "LLTokenizer") -> "LLMatcher":
    """Builds a matcher. Blocks, but releases the GIL. Raises InvalidRequest for a grammar that cannot be built."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, _translated(given), limits=_limits(), log_level=0)
    if fault := fault_of(matcher):
        raise InvalidRequest(PARAM, f"cannot be built: {fault}")
    return matcher


def fault_of(matcher: "LLMatcher") -> str:
    """Returns the error of a matcher, in llguidance's words; "" if it has no error."""
    if not matcher.is_error():
        return ""
    said = matcher.get_error().split("\n")[0]
    return _IN_WORDS.get(said) or "".join(char for char in said if char.isprintable())[:MAX_FAULT_CHARS]


def in_sources(error: InvalidRequest, sources: Mapping[str, ResponseFormat]) -> InvalidRequest:
    """Names the request's field for an error about a whole grammar: the only source, or `tools` for several."""
    if error.ids.get("param") != PARAM or PARAM in sources or not sources:
        return error
    return InvalidRequest(next(iter(sources)) if len(sources) == 1 else "tools", error.message.partition(": ")[2])


def require_library() -> None:
    """Raises Unsupported where llguidance is not installed."""
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise Unsupported(f"{PARAM}: needs the package llguidance in Baton's environment", param=PARAM) from error


def _translated(given: ResponseFormat) -> str:
    from llguidance import LLMatcher

    if given.kind is FormatKind.REGEX:
        return LLMatcher.grammar_from_regex(given.source)
    if given.kind is FormatKind.LARK:
        return LLMatcher.grammar_from_lark(given.source)
    source = json.dumps(exact_schema(_schema_of(given.source)))
    return LLMatcher.grammar_from_json_schema(source, overrides=_JSON_OPTIONS)


def lark_term(given: ResponseFormat) -> str:
    """Writes a format as a term of a larger grammar. Raises InvalidRequest for a schema that is no JSON object."""
    if given.kind is FormatKind.REGEX:
        return f"/{re.sub(_REGEX_PART, lambda part: _ESCAPED.get(part[0], part[0]), given.source)}/"
    if given.kind is FormatKind.LARK:
        return f"%lark {{\n{given.source}\n}}"
    return schema_term(_schema_of(given.source))


def schema_term(schema: Mapping[str, Any], param: str = PARAM) -> str:
    """Writes a JSON schema, the request's field `param`, as a term of a larger grammar.

    Raises InvalidRequest for lone surrogates.
    """
    written = json.dumps({**exact_schema(schema, param), "x-guidance": _JSON_OPTIONS}, ensure_ascii=False)
    if _HALF_PAIR.search(written):
        raise InvalidRequest(param, "a schema has half of a surrogate pair, which is no character")
    return f"%json {written}"


def _schema_of(source: str) -> dict[str, Any]:
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(PARAM, "the schema is not JSON, or nested too deeply") from error
    if not isinstance(schema, dict):
        raise InvalidRequest(PARAM, "the schema must be an object")
    return schema


def _limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=INITIAL_FUEL,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=MAX_STEP_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def _as_json(given: ResponseFormat) -> dict[str, str]:
    return {"kind": given.kind.value, "source": given.source}


class GrammarProcesses:
    """Processes that build each request's grammar before a worker does, within bounds on time and memory.

    They start at the first grammar.
    """

    def __init__(self) -> None:
        task = Task(
            "text.grammar_child", {"memory_bytes": MEMORY_BYTES}, "builds grammars", PARAM, "takes too long to build"
        )
        self._processes = ChildProcesses(task, NUM_PROCESSES)

    async def check(self, given: ResponseFormat, sources: Mapping[str, ResponseFormat] = NO_SOURCES) -> None:
        """Raises InvalidRequest for a grammar that exceeds time or memory, Unsupported without llguidance.

        sources: the formats in the grammar, by fields of the request; the error names the first faulty one.
        """
        await asyncio.to_thread(require_library)
        await self._processes.ask(
            {**_as_json(given), "sources": {param: _as_json(source) for param, source in sources.items()}}
        )

    async def close(self) -> None:
        await self._processes.close()
