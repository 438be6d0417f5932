"""Agent programs, unmodified, against a model of long context and a strict template: `bash tests/clients.sh`.

Between program and gateway stands a proxy, which keeps each request and its answer.
"""

import json
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.clients.programs import (
    MODEL,
    NOTE,
    TIMEOUT_S,
    Ended,
    Program,
    aider,
    claude_code,
    cline,
    codex,
    opencode,
    qwen_code,
    run,
)
from tests.clients.proxy import MESSAGES, RESPONSES, Exchange, Forced, Proxy, proxy_before
from tests.clients.speaking_model import ANSWER, CONTEXT_LEN
from tests.cluster.served_cluster import ServedCluster

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]
COMMENT = b": ping\n\n"
"""What a stream says while no token comes."""
MAX_CHARACTERS_OF_A_TOKEN = 8
"""On the average of a text in English: half as many is usual."""
PROGRAMS = {
    "claude code": (claude_code(), "Read", {"file_path": "<here>/note.txt"}),
    "codex": (codex(), "exec_command", {"cmd": "cat note.txt"}),
    "opencode, chats": (opencode("@ai-sdk/openai-compatible"), "read", {"filePath": "<here>/note.txt"}),
    "opencode, responses": (opencode("@ai-sdk/openai"), "read", {"filePath": "<here>/note.txt"}),
    "opencode, messages": (opencode("@ai-sdk/anthropic"), "read", {"filePath": "<here>/note.txt"}),
    "qwen code, chats": (qwen_code("openai"), "read_file", {"file_path": "<here>/note.txt"}),
    "qwen code, messages": (qwen_code("anthropic"), "read_file", {"file_path": "<here>/note.txt"}),
    "cline": (cline(), "read_files", {"files": [{"path": "<here>/note.txt"}]}),
    "cline, thinking": (cline("--thinking", "medium"), "read_files", {"files": [{"path": "<here>/note.txt"}]}),
}
"""Each with the tool that it is made to call."""


@pytest.mark.parametrize("name", [*PROGRAMS, "aider"])
def test_a_program_ends_its_turn(name: str, speaking: ServedCluster, tmp_path: Path) -> None:
    program = PROGRAMS[name][0] if name in PROGRAMS else aider()
    passed = turn(program, speaking, tmp_path)
    assert any(is_answered(one) for one in passed.exchanges)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_calls_a_tool_and_reads_its_result(name: str, speaking: ServedCluster, tmp_path: Path) -> None:
    """Its streams have comments among their events, as a prompt that takes long gives them."""
    program, tool, arguments = PROGRAMS[name]
    here = json.loads(json.dumps(arguments).replace("<here>", str(tmp_path / "project")))
    passed = turn(program, speaking, tmp_path, Forced(tool, here), COMMENT)
    assert passed.was_forced
    assert [one for one in passed.exchanges if NOTE.encode() in one.request], "no request has the tool's result"


def test_a_new_session_of_claude_code_finds_the_prompt_of_the_one_before(
    speaking: ServedCluster, tmp_path: Path
) -> None:
    """The line in front of its system prompt, which is another for another question, is left out."""
    turn(claude_code(), speaking, tmp_path)
    passed = turn(claude_code("which colour has the kettle?"), speaking, tmp_path)
    usage = passed.exchanges[-1].events["message_delta"]["usage"]
    found, computed = usage["cache_read_input_tokens"], usage["input_tokens"]
    assert found > 10 * computed


def test_claude_code_lowers_max_tokens_by_the_words_of_the_error(speaking: ServedCluster, tmp_path: Path) -> None:
    program = claude_code(CLAUDE_CODE_MAX_OUTPUT_TOKENS=str(CONTEXT_LEN - 1000))
    passed, ended = run_before(program, speaking, tmp_path)
    statuses = [one.status for one in passed.exchanges if one.route == MESSAGES]
    assert statuses == [400, 200]
    assert ended.status == 0
    assert ANSWER in ended.output


def test_instructions_of_codex_are_in_the_prompt(speaking: ServedCluster, tmp_path: Path) -> None:
    """It sends them as a developer, a role that this template passes over."""
    passed = turn(codex(), speaking, tmp_path)
    [sent] = [one.body for one in passed.exchanges if one.route == RESPONSES]
    others = [item for item in sent["input"] if item["role"] != "developer"]
    instructions = [item for item in sent["input"] if item["role"] == "developer"]
    least = len(json.dumps(instructions)) / MAX_CHARACTERS_OF_A_TOKEN
    assert input_tokens(speaking, sent) - input_tokens(speaking, {**sent, "input": others}) > least


def input_tokens(cluster: ServedCluster, body: dict[str, Any]) -> int:
    """Returns the length of the prompt that a request of /v1/responses becomes."""
    connection = HTTPConnection(cluster.status()["http_address"], timeout=TIMEOUT_S)
    try:
        sent = json.dumps({**body, "stream": False, "max_output_tokens": 16})
        connection.request("POST", RESPONSES, sent, {"Content-Type": "application/json"})
        answered = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    return int(answered["usage"]["input_tokens"])


def turn(
    program: Program, cluster: ServedCluster, folder: Path, forced: Forced | None = None, comment: bytes = b""
) -> Proxy:
    """Runs a program to the end of its turn, all of whose requests are served; returns what passed."""
    passed, ended = run_before(program, cluster, folder, forced, comment)
    told = "\n".join([ended.output, ended.errors, *map(str, passed.exchanges)])
    assert [str(one) for one in passed.exchanges if not is_served(one)] == [], told
    assert ended.status == 0, told
    assert ANSWER in ended.output, told
    assert ended.left == []
    return passed


def run_before(
    program: Program, cluster: ServedCluster, folder: Path, forced: Forced | None = None, comment: bytes = b""
) -> tuple[Proxy, Ended]:
    """Runs a program against a proxy before the cluster."""
    with proxy_before(cluster.status()["http_address"], forced, comment) as proxy:
        ended = run(program, proxy.url, folder)
    return proxy, ended


def is_served(one: Exchange) -> bool:
    """Whether a request was served, or is the probe of a connection with which Claude Code begins."""
    return one.status == 200 or (one.method, one.path, one.status) == ("HEAD", "/", 404)


def is_answered(one: Exchange) -> bool:
    return one.method == "POST" and one.body.get("model") == MODEL and bool(one.answer)
