"""Fifty tool calls that are asked for in words, forced and free, in all dialects, of a model whose template has tools.

    OMP_NUM_THREADS=2 nice python benchmarks/tool_calls.py

A cluster in this process serves Qwen2.5-Coder-0.5B-Instruct in float32: one prefill and one decode worker behind the
gateway's routes. Forced calls are required or named, in turns, one an answer, and are validated by jsonschema. The
others are the model's choice; transformers, on the weights that the package `gguf` dequantizes, reads the same prompts
and answers, which are its own if each token is its greedy one, or within TIE of it where the two part.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jsonschema
import torch

from benchmarks.result_file import write_result
from engine.checkpoint.hub import find_folder
from engine.model.decoder import Decoder
from router.router import Router
from tests.engine.gguf.files import load_oracle
from tests.engine.gguf.joined import CODER_500M
from tests.gateway import local_gateway
from tests.gateway.local_gateway import LocalDoor
from tests.harness.local_cluster import LocalCluster, Parts, Sizes
from text.template.template_processes import Template, TemplateProcesses
from text.tokenizer import Tokenizer
from wire.trust.key_ring import NO_KEYS

BLOCK_SIZE = 16
NUM_AT_ONCE = 8
MAX_TOKENS = 96
PATIENCE_S = 600.0
"""How long an answer may take on a busy machine."""
TIE = 1e-3
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
_TEXT: dict[str, Any] = {"type": "string"}
_PROPERTIES: dict[str, dict[str, Any]] = {
    "get_weather": {"city": _TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "add_numbers": {"numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 2}},
    "send_mail": {"to": _TEXT, "subject": _TEXT},
    "read_file": {"path": _TEXT},
    "set_timer": {"minutes": {"type": "integer", "minimum": 1, "maximum": 600}},
    "translate": {"text": _TEXT, "language": {"enum": ["French", "German", "Spanish"]}},
    "search_code": {"query": _TEXT, "is_case_sensitive": {"type": "boolean"}},
    "book_table": {"guests": {"type": "integer"}, "day": {"enum": ["Monday", "Friday", "Sunday"]}},
    "convert_length": {"value": {"type": "number"}, "to": {"enum": ["miles", "metres", "feet"]}},
    "create_ticket": {"title": _TEXT, "priority": {"enum": ["low", "medium", "high"]}},
}
SCHEMAS: dict[str, dict[str, Any]] = {
    name: {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    for name, fields in _PROPERTIES.items()
}
_WORDS = {
    "get_weather": (
        "What is the weather in {} in {}?",
        (
            ("Paris", "celsius"),
            ("Lima", "celsius"),
            ("Boston", "fahrenheit"),
            ("Oslo", "celsius"),
            ("Miami", "fahrenheit"),
        ),
    ),
    "add_numbers": ("Add the numbers {} and {}.", ((3, 4), (10, 25), (7, 70), (100, 1), (12, 13))),
    "send_mail": (
        "Send a mail to {} with the subject {}.",
        (
            ("ann@example.org", "Lunch"),
            ("bob@example.org", "Hello"),
            ("eve@example.org", "The report"),
            ("joe@example.org", "Invoice"),
            ("kim@example.org", "Holidays"),
        ),
    ),
    "read_file": (
        "Read the file {}{}.",
        (("note", ".txt"), ("src/", "main.py"), ("README", ".md"), ("/etc/", "hosts"), ("data/", "rows.csv")),
    ),
    "set_timer": (
        "Set a timer for {} minutes{}.",
        ((5, ""), (10, " please"), (45, ""), (90, " from now"), (3, " for the eggs")),
    ),
    "translate": (
        "Translate '{}' into {}.",
        (
            ("good morning", "French"),
            ("thank you", "German"),
            ("the red house", "Spanish"),
            ("see you soon", "French"),
            ("a cup of tea", "German"),
        ),
    ),
    "search_code": (
        "Search the code for {}, {}.",
        (
            ("TODO", "case sensitive"),
            ("parse", "not case sensitive"),
            ("KVLayout", "case sensitive"),
            ("retry", "not case sensitive"),
            ("main", "case sensitive"),
        ),
    ),
    "book_table": (
        "Book a table for {} guests on {}.",
        ((2, "Monday"), (4, "Friday"), (6, "Sunday"), (3, "Friday"), (8, "Sunday")),
    ),
    "convert_length": (
        "Convert a length of {} to {}.",
        (("5", "miles"), ("2.5", "metres"), ("100", "feet"), ("42", "miles"), ("0.75", "metres")),
    ),
    "create_ticket": (
        "Create a ticket with the title '{}' and {} priority.",
        (("Login fails", "high"), ("Typo", "low"), ("Slow page", "medium"), ("Lost mail", "high"), ("New logo", "low")),
    ),
}


@dataclass(frozen=True)
class Ask:
    """A request in words for a call of `tool`, with the names of the tools that are offered."""

    words: str
    tool: str
    offered: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """A call that an answer has. arguments: as they are parsed from JSON, or the text that is no JSON."""

    name: str
    arguments: Any

    @classmethod
    def parse(cls, name: str, arguments: str) -> "Call":
        try:
            return cls(name, json.loads(arguments))
        except ValueError:
            return cls(name, arguments)

    @property
    def is_valid(self) -> bool:
        return self.name in SCHEMAS and jsonschema.Draft202012Validator(SCHEMAS[self.name]).is_valid(self.arguments)


def make_asks() -> list[Ask]:
    """Makes five requests for each tool, which is offered with two others."""
    names = [*SCHEMAS]
    asks = []
    for at, (tool, (words, values)) in enumerate(_WORDS.items()):
        offered = tuple(names[(at + step) % len(names)] for step in (9, 0, 3))
        asks += [Ask(words.format(*one), tool, offered) for one in values]
    return asks


class Dialect:
    """A route, its body for an ask, and the calls of its answer."""

    path = CHAT

    def __init__(self) -> None:
        self.forced: Any = "required"

    def body(self, ask: Ask, is_forced: bool, is_named: bool) -> dict[str, Any]:
        choice = self.one_call(self.named(ask.tool) if is_named else self.forced) if is_forced else {}
        tools = [self.tool(name) for name in ask.offered]
        return {**self.said(ask.words), "tools": tools, "temperature": 0, **choice}

    def one_call(self, choice: Any) -> dict[str, Any]:
        return {"tool_choice": choice, "parallel_tool_calls": False}

    def said(self, words: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": words}], "max_tokens": MAX_TOKENS, "return_token_ids": True}

    def tool(self, name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}}

    def named(self, name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name}}

    def calls(self, answer: Any) -> list[Call]:
        made = answer["choices"][0]["message"].get("tool_calls", ())
        return [Call.parse(one["function"]["name"], one["function"]["arguments"]) for one in made]


class ResponsesOfOpenAI(Dialect):
    path = RESPONSES

    def said(self, words: str) -> dict[str, Any]:
        return {"input": words, "max_output_tokens": MAX_TOKENS}

    def tool(self, name: str) -> dict[str, Any]:
        return {"type": "function", "name": name, "parameters": SCHEMAS[name]}

    def named(self, name: str) -> dict[str, Any]:
        return {"type": "function", "name": name}

    def calls(self, answer: Any) -> list[Call]:
        made = [one for one in answer["output"] if one["type"] == "function_call"]
        return [Call.parse(one["name"], one["arguments"]) for one in made]


class MessagesOfAnthropic(Dialect):
    path = MESSAGES

    def __init__(self) -> None:
        self.forced = {"type": "any"}

    def one_call(self, choice: Any) -> dict[str, Any]:
        return {"tool_choice": {**choice, "disable_parallel_tool_use": True}}

    def said(self, words: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": words}], "max_tokens": MAX_TOKENS}

    def tool(self, name: str) -> dict[str, Any]:
        return {"name": name, "input_schema": SCHEMAS[name]}

    def named(self, name: str) -> dict[str, Any]:
        return {"type": "tool", "name": name}

    def calls(self, answer: Any) -> list[Call]:
        return [Call(one["name"], one["input"]) for one in answer["content"] if one["type"] == "tool_use"]


DIALECTS = (Dialect(), ResponsesOfOpenAI(), MessagesOfAnthropic())


class Asking:
    """All asks to one cluster, a few at a time."""

    def __init__(self, router: Router) -> None:
        self._door = LocalDoor(router, NO_KEYS)
        self._room = asyncio.Semaphore(NUM_AT_ONCE)

    async def answers(self, dialect: Dialect, asks: Sequence[Ask], is_forced: bool) -> list[Any]:
        """Asks in a dialect. Raises RuntimeError for an answer that is an error."""
        began_s = time.perf_counter()
        bodies = [dialect.body(ask, is_forced, bool(at % 2)) for at, ask in enumerate(asks)]
        answers = await asyncio.gather(*(self._answer(dialect, body) for body in bodies))
        calls = [dialect.calls(answer) for answer in answers]
        num_valid = sum(bool(one) and all(call.is_valid for call in one) for one in calls)
        kind, took_s = "forced" if is_forced else "free", time.perf_counter() - began_s
        print(f"{dialect.path}, {kind}: {num_valid} of {len(asks)} in {took_s:.0f} s", file=sys.stderr)
        return answers

    async def _answer(self, dialect: Dialect, body: dict[str, Any]) -> Any:
        async with self._room:
            answer = await self._door.post(dialect.path, body)
        if answer.status != 200:
            raise RuntimeError(f"{dialect.path}: {answer.status} {answer.body[:400]!r}")
        return answer.json


class ToolCluster(LocalCluster):
    """A cluster of a model with its own tokenizer and template."""

    def __init__(self, folder: Path) -> None:
        codec, template = Tokenizer.load(folder), Template.load(folder)
        assert template is not None
        model = Decoder.load(folder, "float32", torch.device("cpu"), BLOCK_SIZE)
        super().__init__(model, Sizes(num_blocks=512, num_slots=2048, max_silence_s=PATIENCE_S), codec)
        self.router = Router(self.router.config, codec, self._connect, self.port, TemplateProcesses(template))
        self._codec = codec

    def _parts(self, name: str) -> Parts:
        return replace(super()._parts(name), definition=lambda: self._codec.definition)


async def serve_and_ask(folder: Path, asks: Sequence[Ask]) -> dict[tuple[str, bool], list[Any]]:
    """Returns the answers by path, and whether calls were forced."""
    cluster = ToolCluster(folder)
    await cluster.start(1, 1)
    try:
        asking = Asking(cluster.router)
        return {
            (dialect.path, is_forced): await asking.answers(dialect, asks, is_forced)
            for is_forced in (True, False)
            for dialect in DIALECTS
        }
    finally:
        await cluster.stop()


def parts_from_oracle(oracle: Any, prompt: Sequence[int], answer: Sequence[int]) -> bool:
    """Whether an answer leaves transformers' greedy tokens where the two are not a tie."""
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2, dim=-1)
    first = next((at for at, token in enumerate(answer) if best.indices[at, 0] != token), None)
    return first is not None and bool(best.values[first, 0] - best.values[first, 1] >= TIE)


def main() -> None:
    options = _parse(sys.argv[1:])
    vars(local_gateway).update(TIMEOUT_S=PATIENCE_S, WAIT_S=PATIENCE_S)
    torch.set_num_threads(options.threads)
    path = CODER_500M.path()
    folder, asks = find_folder(str(path)), make_asks()[: options.asks]
    answers = asyncio.run(serve_and_ask(folder, asks))
    calls = {
        (dialect.path, is_forced): [dialect.calls(one) for one in answers[dialect.path, is_forced]]
        for dialect in DIALECTS
        for is_forced in (True, False)
    }
    figures: dict[str, Any] = {}
    for (route, is_forced), made in calls.items():
        kind = "forced" if is_forced else "free"
        valid = [bool(one) and all(call.is_valid for call in one) for one in made]
        right = [[call.name for call in one] == [ask.tool] for one, ask in zip(made, asks, strict=True)]
        figures[f"{route}, {kind}: parsed and valid"] = f"{sum(valid)} of {len(asks)}"
        figures[f"{route}, {kind}: one call, of the tool that was asked for"] = f"{sum(right)} of {len(asks)}"
    free = [calls[dialect.path, False] for dialect in DIALECTS]
    same = [one == two == three for one, two, three in zip(*free, strict=True)]
    figures["free: the same calls in all dialects"] = f"{sum(same)} of {len(asks)}"
    oracle = load_oracle(path, folder)
    told = [(one["prompt_token_ids"], one["choices"][0]["token_ids"]) for one in answers[CHAT, False]]
    parted = [parts_from_oracle(oracle, prompt, answer) for prompt, answer in told]
    figures["free: transformers' own tokens, but at ties"] = f"{len(asks) - sum(parted)} of {len(asks)}"
    details = [
        {
            "words": ask.words,
            **{f"{route}, forced {is_forced}": str(made[at]) for (route, is_forced), made in calls.items()},
        }
        for at, ask in enumerate(asks)
    ]
    write_result(options.out, figures, {"asks": details})


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--asks", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default="tool_calls", help="name of the results in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
