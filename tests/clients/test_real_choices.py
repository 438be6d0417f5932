"""Claude Code reads a file because a real model chose to; Codex is asked for its tool by name, and refuses the call.

`bash tests/clients.sh -k real_choices`.

The model has half a billion parameters, and programs' own prompts of 15,000 tokens are beyond it: it gets a short
system prompt, and of Claude Code one tool, by flags and settings that both document. Which tool it calls is its own.
"""

import json
from pathlib import Path

import pytest

from tests.clients.programs import NOTE, Program, claude_code, codex, run
from tests.clients.proxy import MESSAGES, RESPONSES, Exchange, Likeliest, proxy_before
from tests.cluster.served_cluster import ServedCluster

TIMEOUT_S, MAX_TOKENS = 840, 256
pytestmark = [pytest.mark.clients, pytest.mark.timeout(TIMEOUT_S + 660)]
SYSTEM = "You are a helpful assistant that works with files. Call a tool to see what a file says."


def calls_of(one: Exchange) -> list[str]:
    """Returns the names of the tools that an answer calls."""
    if one.route == MESSAGES:
        begun = [json.loads(line[6:]) for line in one.answer.decode().splitlines() if line.startswith("data: {")]
        blocks = [event["content_block"] for event in begun if event["type"] == "content_block_start"]
        return [block["name"] for block in blocks if block["type"] == "tool_use"]
    output = one.events["response.completed"]["response"]["output"]
    return [item["name"] for item in output if item["type"] == "function_call"]


@pytest.mark.parametrize("name", ["claude code", "codex"])
def test_a_program_calls_the_tool_that_the_model_chose(name: str, choosing: ServedCluster, tmp_path: Path) -> None:
    """The first call is unforced, and a later request has its result: of Claude Code what the file says.

    Of Codex any: this model asks for permissions beside the command, which Codex refuses without a person.
    """
    note, system = tmp_path / "project" / "note.txt", tmp_path / "system.md"
    system.write_text(SYSTEM)
    programs: dict[str, tuple[str, Program]] = {
        "claude code": (
            MESSAGES,
            claude_code(f"What does the file {note} say?", "--tools", "Read", "--system-prompt", SYSTEM),
        ),
        "codex": (
            RESPONSES,
            codex("Call exec_command with the cmd: cat note.txt", "-c", f"model_instructions_file={system}"),
        ),
    }
    route, program = programs[name]
    with proxy_before(choosing.status()["http_address"], Likeliest(MAX_TOKENS)) as proxy:
        ended = run(program, proxy.url, tmp_path, TIMEOUT_S)
    told = "\n".join([ended.output, ended.errors, *map(str, proxy.exchanges)])
    asked = [one for one in proxy.exchanges if one.route == route and one.body.get("tools") and one.status == 200]
    assert asked, told
    assert calls_of(asked[0]), told
    result = NOTE if route == MESSAGES else '"function_call_output"'
    assert [one for one in asked[1:] if result.encode() in one.request], told
