"""A chat template from a model's folder, and the processes that render it."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from text.chat import Chat
from text.model_file import read_text
from wire.errors import InvalidRequest, ModelError, Unavailable

NUM_PROCESSES = 2
START_TIMEOUT_S = 30.0
MAX_WAIT_S = 5.0
"""Bound on the wait for a rendering, longer than MAX_CPU_S: its process may be stopped, or starved by others."""
MEMORY_BYTES = 256 << 20
MAX_TEMPLATE_BYTES = 1 << 20
MAX_CONFIG_BYTES = 8 << 20


@dataclass(frozen=True)
class Template:
    """A chat template in Jinja's language, and the names of special tokens that it may write."""

    source: str
    variables: Mapping[str, str]

    @property
    def tool_format(self) -> str:
        """Returns the format of tool calls that the template asks for, a key of CALL_MARKS; "" if it knows no tools."""
        if not re.search(r"\btools\b", self.source):
            return ""
        asked = {"qwen": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama": '"parameters":'}
        return next((name for name, sign in asked.items() if sign in self.source), "")

    @classmethod
    def load(cls, folder: Path) -> "Template | None":
        """Reads chat_template.jinja, or tokenizer_config.json; None where there is no template. Raises ModelError."""
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
    """A Renderer over processes, which begin with it, and threads that wait for them."""

    def __init__(self, template: Template) -> None:
        self.tool_format = template.tool_format
        self._variables = dict(template.variables)
        self._children = [_Child(template.source) for _ in range(NUM_PROCESSES)]
        self._idle = list(self._children)
        self._threads = ThreadPoolExecutor(NUM_PROCESSES, "render")
        for child in self._children:
            self._threads.submit(child.start)

    async def render(self, chat: Chat, max_added_chars: int) -> str:
        """Raises Unavailable where no process can be had."""
        given = {"messages": [one.variables for one in chat.messages], "tools": chat.tools}
        num_chars = len(chat.text) + sum(len(json.dumps(one)) for one in chat.tools)
        num_chars += sum(len(json.dumps(one.tool_calls)) for one in chat.messages if one.tool_calls)
        asked = {**given, "variables": self._variables, "max_chars": num_chars + max_added_chars}
        answer = await asyncio.wrap_future(self._threads.submit(self._ask, asked))
        if "failure" in answer:
            raise InvalidRequest("messages", answer["failure"])
        return answer["text"]

    async def close(self) -> None:
        """Ends the processes; a rendering under way has MAX_WAIT_S to finish."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._end)

    def _ask(self, asked: dict[str, Any]) -> dict[str, str]:
        child = self._idle.pop()  # there are as many as threads
        try:
            return child.ask(asked)
        finally:
            self._idle.append(child)

    def _end(self) -> None:
        for child in self._children:
            child.end()


class _Child:
    """A process of template_child.py. One that ends, or is ended after MAX_WAIT_S, is replaced by another."""

    def __init__(self, source: str) -> None:
        self._first = {"template": source, "memory_bytes": MEMORY_BYTES}
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._is_over = False

    def start(self) -> None:
        """Starts a process, unless there is one, and blocks until it is ready. Raises Unavailable."""
        with self._turn:
            self._ready()

    def ask(self, asked: dict[str, Any]) -> dict[str, str]:
        """Blocks for the answer. Raises InvalidRequest for messages that take too long, or that the process dies of.

        Unavailable where it has not answered after MAX_WAIT_S.
        """
        with self._turn:
            answer = self._exchange(self._ready(), asked, MAX_WAIT_S)
        if answer is None:
            raise InvalidRequest("messages", "the model's chat template takes too long for them")
        return answer

    def end(self) -> None:
        """Ends the process, once it has nothing to do; no other takes its place."""
        self._is_over = True
        with self._turn:
            self._kill()

    def _ready(self) -> "subprocess.Popen[bytes]":
        if self._is_over:
            raise Unavailable("no process renders chat templates any more")
        if self._process is not None and self._process.poll() is not None:
            self._kill()
        if self._process is None:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command, silent = [sys.executable, "-m", "text.template_child"], subprocess.DEVNULL
            self._line, theirs = Pipe()
            with theirs:
                self._process = subprocess.Popen(
                    command, env=environment, stdin=theirs.fileno(), stdout=silent, stderr=silent
                )
            if self._exchange(self._process, self._first, START_TIMEOUT_S) is None:
                raise Unavailable("no process renders chat templates")
        return self._process

    def _exchange(
        self, process: "subprocess.Popen[bytes]", message: dict[str, Any], timeout_s: float
    ) -> dict[str, str] | None:
        """Returns the answer; None from a process that ended amid it. Ends one that is late, and raises Unavailable."""
        is_late = threading.Event()
        timer = threading.Timer(timeout_s, _end_late, [process, is_late])
        timer.start()
        try:
            self._line.send_bytes(json.dumps(message).encode())
            answer: dict[str, str] | None = json.loads(self._line.recv_bytes())
        except (OSError, EOFError):
            answer = None
        finally:
            timer.cancel()
        if answer is None:
            self._kill()
            if is_late.is_set():
                raise Unavailable("the process that renders chat templates did not answer in time: ask again")
        return answer

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._line.close()
            self._process = None


def _end_late(process: "subprocess.Popen[bytes]", is_late: threading.Event) -> None:
    is_late.set()
    process.kill()
