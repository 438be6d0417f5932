"""A chat template from a model's folder, and the processes that render it."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from text.answer.formats import AUTO, AnswerFormats
from text.answer.frame import ToolUse
from text.chat import Chat
from text.child_processes import Child, ChildProcesses, Task
from text.model_file import read_text
from text.template.turns import MARKER, TurnRules, tried
from wire.errors import ModelError

NUM_PROCESSES = 2
MEMORY_BYTES = 256 << 20
MAX_TEMPLATE_BYTES = 1 << 20
MAX_TRIED_CHARS = 1 << 20
"""Characters that a template may write in a trial."""
MAX_CONFIG_BYTES = 8 << 20


@dataclass(frozen=True)
class Template:
    """A chat template in Jinja, and the special tokens that it may write, by name."""

    source: str
    variables: Mapping[str, str]

    @classmethod
    def load(cls, folder: Path) -> "Template | None":
        """Reads chat_template.jinja, else tokenizer_config.json; None if there is no template. Raises ModelError."""
        config = _read_config(folder)
        own = read_text(folder / "chat_template.jinja", MAX_TEMPLATE_BYTES)
        source = own if own is not None else _named_default(config.get("chat_template"))
        if source is None:
            return None
        tokens = {name: value for name, value in config.items() if name.endswith("_token")}
        contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
        return cls(source, {name: value for name, value in contents.items() if isinstance(value, str)})


def _read_config(folder: Path) -> dict[str, Any]:
    content = read_text(folder / "tokenizer_config.json", MAX_CONFIG_BYTES)
    try:
        config = {} if content is None else json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError("tokenizer_config.json: malformed") from error
    return config if isinstance(config, dict) else {}


def _named_default(given: object) -> str | None:
    """Finds the template named `default` among several."""
    if isinstance(given, list):
        given = next((one.get("template") for one in given if one.get("name") == "default"), None)
    return given if isinstance(given, str) else None


class TemplateProcesses:
    """A Renderer over processes, which start at once."""

    def __init__(self, template: Template, tool_format: str = AUTO, reasoning_format: str = AUTO) -> None:
        """tool_format, reasoning_format: settings for AnswerFormats.of."""
        self.formats = AnswerFormats.of(template.source, tool_format, reasoning_format)
        self._variables = dict(template.variables)
        self._processes = ChildProcesses(_task(template), NUM_PROCESSES)
        self._processes.start()
        self._trying = asyncio.Lock()
        self._rules: TurnRules | None = None

    async def turn_rules(self) -> TurnRules:
        """Tries the template before its first chat; each trial takes at most MAX_WAIT_S."""
        async with self._trying:
            if self._rules is None:
                self._rules = await tried(
                    lambda turns, tools: self.render(Chat(tuple(turns), ToolUse(tools)), MAX_TRIED_CHARS)
                )
        return self._rules

    async def render(self, chat: Chat, max_added_chars: int) -> str:
        """Raises Unavailable if no process can start."""
        of_turns = (part for one in chat.messages for part in (one.tool_calls, one.more))
        parts = (*chat.tool_use.tools, chat.variables, *of_turns)
        num_chars = len(chat.text) + sum(len(json.dumps(one)) for one in parts if one)
        asked = {
            "messages": [one.variables for one in chat.messages],
            "tools": chat.tool_use.tools,
            "variables": {**chat.variables, **self._variables},
            "continues": chat.continues,
            "opens": not chat.continues,
            "max_chars": num_chars + max_added_chars,
        }
        return (await self._processes.ask(asked))["text"]

    async def close(self) -> None:
        """Ends the processes; a rendering under way has MAX_WAIT_S to finish."""
        await self._processes.close()


def render_end(template: Template) -> str:
    """Renders a question and an answer; returns the text after the answer. Blocks for seconds.

    Ends the renderer's process. Raises InvalidRequest if the template refuses these turns, Unavailable without a
    process.
    """
    child = Child(_task(template))
    asked = {
        "messages": [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": MARKER}],
        "tools": (),
        "variables": dict(template.variables),
        "continues": False,
        "opens": False,
        "max_chars": MAX_TEMPLATE_BYTES,
    }
    try:
        return child.ask(asked)["text"].partition(MARKER)[2]
    finally:
        child.end()


def _task(template: Template) -> Task:
    first = {"template": template.source, "memory_bytes": MEMORY_BYTES}
    too_long = "the model's chat template takes too long for them"
    return Task("text.template.template_child", first, "renders chat templates", "messages", too_long)
