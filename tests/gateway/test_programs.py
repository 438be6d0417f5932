"""What agent programs send, to a model whose chat template knows tools, is strict about turns, and has no reasoning."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from baton import AsyncClient
from baton.request import Message
from router.ports.server import RouterServer
from tests.gateway.local_gateway import Answer, LocalGateway, serving
from tests.gateway.test_responses import prompt_of
from tests.gateway.test_tool_calls import say
from tests.harness.fake_cluster import CONFIG, FakeCluster
from tests.harness.templates import STRICT
from text.template import template_processes
from text.template.template_processes import Template, TemplateProcesses
from wire.errors import Unsupported

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TURNS: list[Message] = [{"role": role, "content": f"{role}'s"} for role in ("developer", "user", "system", "user")]


class LastingProcesses(TemplateProcesses):
    """A renderer that outlives the clusters of all tests."""

    async def close(self) -> None:
        """Goes on."""


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateProcesses]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(template_processes, "NUM_PROCESSES", 1)
        renderer = LastingProcesses(Template(STRICT, {"bos_token": ""}))
    yield renderer
    asyncio.run(TemplateProcesses.close(renderer))


@pytest.fixture
async def strict(renderer: TemplateProcesses) -> AsyncIterator[LocalGateway]:
    """A gateway before a model of that template."""
    async with serving(
        config=replace(CONFIG, model=replace(CONFIG.model, max_context_len=4000)), renderer=renderer
    ) as gateway:
        say(gateway, "ok")
        yield gateway


@pytest.mark.parametrize("stream", [False, True])
async def test_what_messages_were_changed_in_is_told_in_a_header(strict: LocalGateway, stream: bool) -> None:
    answer = await strict.post(CHAT, {"messages": TURNS, "stream": stream, "max_tokens": 5})
    assert prompt_of(strict) == "[system]developer's[user]user's\n\nsystem's\n\nuser's[assistant]"
    assert answer.headers["x-baton-adapted"] == "developer-as-system, system-as-user, joined"
    answer = await strict.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], "stream": stream})
    assert "x-baton-adapted" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_that_may_depend_on_other_requests_are_told_in_a_header(stream: bool) -> None:
    for promised in (False, True):
        async with serving(config=replace(CONFIG, model=replace(CONFIG.model, batch_invariant=promised))) as gateway:
            say(gateway, "ok")
            answer = await gateway.post("/v1/completions", {"prompt": "hi", "stream": stream, "max_tokens": 2})
            assert answer.headers.get("x-baton-batch-invariant") == (None if promised else "false")


async def test_it_is_told_over_grpc_before_the_answer(renderer: TemplateProcesses) -> None:
    cluster = FakeCluster(replace(CONFIG, settings=replace(CONFIG.settings, metrics_port=0)), renderer=renderer)
    router = RouterServer(cluster.router)
    addresses = await router.start()
    await cluster.resize(1, 1)
    async with AsyncClient(addresses.public) as client:
        for prompt, words in ((TURNS, "developer-as-system, system-as-user, joined"), (TURNS[1:2], ""), ("hi", "")):
            async with client.stream(prompt, max_tokens=2) as stream:
                assert await stream.adapted() == words
                assert await stream.admitted() > 0
    await router.stop()


CLAUDE_CODE: dict[str, Any] = {
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Today is Monday.</system-reminder>"},
                {"type": "text", "text": "say hello", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": "Skills: none."},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.1c0; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Help with code.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [
        {
            "name": "Read",
            "description": "Reads a file.",
            "input_schema": {
                "type": "object",
                "properties": {"file_path": {"type": "string"}},
                "required": ["file_path"],
                "additionalProperties": False,
            },
        }
    ],
    "metadata": {"user_id": "{}"},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
"""As version 2.1.197 asks, shortened."""
CLAUDE_HEADERS = {
    "anthropic_version": "2023-06-01",
    "anthropic_beta": "claude-code-20250219,context-management-2025-06-27,mid-conversation-system-2026-04-07",
    "x_app": "cli",
}
READ_CALL = '<tool_call>{"name": "Read", "arguments": {"file_path": "a.txt"}}</tool_call>'


def told(answer: Answer, header: str) -> set[str]:
    return set(answer.headers.get(header, "").split(", "))


async def ask_as_claude_code(gateway: LocalGateway, **changed: Any) -> Answer:
    return await gateway.post(MESSAGES, {**CLAUDE_CODE, **changed}, **CLAUDE_HEADERS)


async def test_claude_code_runs_with_its_tools(strict: LocalGateway) -> None:
    refused = await ask_as_claude_code(strict)
    words = r"input length and `max_tokens` exceed context limit: (\d+) \+ 32000 > 4000, decrease input length or "
    num_tokens = re.match(words, refused.json["error"]["message"])
    assert num_tokens is not None  # it lowers max_tokens by these numbers, and asks again
    most = 4000 - int(num_tokens[1])
    say(strict, READ_CALL)
    answer = await ask_as_claude_code(strict, max_tokens=most)
    assert answer.status == 200
    assert told(answer, "x-baton-adapted") == {"system-as-user", "joined"}
    ignored = {"x-anthropic-billing-header", "output_config.effort", "context_management", "metadata", "cache_control"}
    assert told(answer, "x-baton-ignored") == ignored
    prompt = prompt_of(strict)
    assert prompt.endswith("say hello\n\nSkills: none.[assistant]")
    assert "[system]You are an agent.Help with code.[user]<system-reminder>" in prompt
    call = next(one["content_block"] for one in answer.named_events if one["type"] == "content_block_start")
    assert (call["type"], call["name"]) == ("tool_use", "Read")
    say(strict, "ok")
    turns = [
        *CLAUDE_CODE["messages"],
        {"role": "assistant", "content": [{**call, "input": {"file_path": "a.txt"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "no such file"}]},
    ]
    second = await ask_as_claude_code(strict, messages=turns, max_tokens=100)
    assert second.status == 200
    assert prompt_of(strict) == f"{prompt}{READ_CALL}[result]no such file[assistant]"


async def test_the_line_of_billing_costs_no_hit(strict: LocalGateway) -> None:
    prompts = []
    for line in (
        "cc_version=2.1.1.0a; cc_entrypoint=cli; cch=1a2;",
        "cc_version=2.1.1.7f; cc_entrypoint=cli; cch=9f8;",
    ):
        header = f"x-anthropic-billing-header: {line}"
        for system in (
            [{"type": "text", "text": header}, {"type": "text", "text": "Be brief."}],
            f"{header}\nBe brief.",
        ):
            body = {"system": system, "max_tokens": 5}
            answer = await ask_as_claude_code(strict, **body)
            assert "x-anthropic-billing-header" in told(answer, "x-baton-ignored")
            prompts.append(prompt_of(strict))
            counted = {name: one for name, one in CLAUDE_CODE.items() if name != "max_tokens"} | {"system": system}
            num_tokens = (await strict.post(f"{MESSAGES}/count_tokens", counted)).json["input_tokens"]
            assert num_tokens == len(prompts[-1])
    assert len(set(prompts)) == 1
    assert "[system]Be brief.[user]" in prompts[0]


@pytest.mark.parametrize(
    "system",
    [
        "x-anthropic-billing-header: a=b; is a header. Explain it.",
        "What is x-anthropic-billing-header: a=b;",
        "x-anthropic-billing-header: none",
    ],
)
async def test_a_system_prompt_about_billing_is_kept(strict: LocalGateway, system: str) -> None:
    answer = await ask_as_claude_code(strict, system=system, max_tokens=5)
    assert f"[system]{system}[user]" in prompt_of(strict)
    assert "x-anthropic-billing-header" not in told(answer, "x-baton-ignored")


async def test_tools_of_anthropics_services_are_left_out_and_named(strict: LocalGateway) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    answer = await ask_as_claude_code(strict, tools=[search, *CLAUDE_CODE["tools"]], max_tokens=5)
    assert "web_search" in told(answer, "x-baton-ignored")
    assert prompt_of(strict).count("[tool]") == 1
    alone = await ask_as_claude_code(strict, tools=[search], max_tokens=5)
    assert (alone.status, prompt_of(strict).count("[tool]")) == (200, 0)


EXEC = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
}
SPAWN = {**EXEC, "name": "spawn_agent"}
CODEX: dict[str, Any] = {
    "stream": True,
    "input": [
        {"type": "message", "id": "m1", "role": "developer", "content": [{"type": "input_text", "text": "Say QUUX."}]},
        {
            "type": "message",
            "id": "m2",
            "role": "developer",
            "content": [{"type": "input_text", "text": "## Skills: none"}, {"type": "input_text", "text": "Read-only"}],
        },
        {"type": "message", "id": "m3", "role": "user", "content": [{"type": "input_text", "text": "<cwd>/tmp</cwd>"}]},
        {"type": "message", "id": "m4", "role": "user", "content": [{"type": "input_text", "text": "say hello"}]},
    ],
    "tools": [
        EXEC,
        {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [SPAWN]},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto", "effort": "low"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k1",
    "client_metadata": {"session_id": "k1"},
}
"""As version 0.171.0 asks, shortened."""
SPAWN_CALL = '<tool_call>{"name": "multi_agent_v1__spawn_agent", "arguments": {"cmd": "ls"}}</tool_call>'


async def test_codex_runs_with_namespaces_of_tools(strict: LocalGateway) -> None:
    say(strict, SPAWN_CALL)
    answer = await strict.post(RESPONSES, CODEX)
    assert answer.status == 200
    assert told(answer, "x-baton-adapted") == {"developer-as-system", "joined"}
    assert told(answer, "x-baton-ignored") == {
        *("web_search", "reasoning.effort", "summary", "prompt_cache_key", "client_metadata"),
    }
    prompt = prompt_of(strict)
    assert prompt.endswith("[system]Say QUUX.\n\n## Skills: noneRead-only[user]<cwd>/tmp</cwd>\n\nsay hello[assistant]")
    tools = [json.loads(one.partition("[system]")[0])["function"] for one in prompt.split("[tool]")[1:]]
    described = {"description": "Agents.\nRuns a command.", "parameters": EXEC["parameters"]}
    assert [one["name"] for one in tools] == ["exec_command", "multi_agent_v1__spawn_agent"]
    assert described.items() <= tools[1].items()
    last = answer.named_events[-1]["response"]
    [call] = last["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "multi_agent_v1", "spawn_agent")
    items = [one["item"] for one in answer.named_events if one["type"].startswith("response.output_item")]
    assert all((one["namespace"], one["name"]) == ("multi_agent_v1", "spawn_agent") for one in items)
    assert [(one.get("namespace"), one["name"]) for one in last["tools"]] == [
        (None, "exec_command"),
        ("multi_agent_v1", "spawn_agent"),
    ]
    say(strict, "ok")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.txt"}
    second = await strict.post(RESPONSES, {**CODEX, "input": [*CODEX["input"], call, result]})
    assert second.status == 200
    assert prompt_of(strict) == f"{prompt}{SPAWN_CALL}[result]a.txt[assistant]"


async def test_a_function_of_a_namespace_can_be_forced(strict: LocalGateway) -> None:
    choice = {"type": "function", "namespace": "multi_agent_v1", "name": "spawn_agent"}
    say(strict, SPAWN_CALL)
    answer = await strict.post(RESPONSES, {**CODEX, "tool_choice": choice, "stream": False})
    assert (answer.status, answer.json["output"][0]["name"]) == (200, "spawn_agent")


async def test_long_names_in_namespaces_stay_apart_within_their_bound(strict: LocalGateway) -> None:
    functions = [{**EXEC, "name": f"{'a' * 40}{end}"} for end in "bc"]
    space = {"type": "namespace", "name": "n" * 40, "tools": functions}
    answer = await strict.post(RESPONSES, {**CODEX, "tools": [space]})
    prompt = prompt_of(strict)
    names = [json.loads(one.partition("[system]")[0])["function"]["name"] for one in prompt.split("[tool]")[1:]]
    assert (answer.status, len(set(names))) == (200, 2)
    assert all(len(one) == 64 for one in names)
    call = {"type": "function_call", "call_id": "a", "namespace": "n" * 40, "name": f"{'a' * 40}c", "arguments": "{}"}
    await strict.post(RESPONSES, {**CODEX, "tools": [space], "input": [*CODEX["input"], call]})
    assert f'<tool_call>{{"name": "{names[1]}", "arguments": {{}}}}</tool_call>' in prompt_of(strict)


@pytest.mark.parametrize("kind", ["custom", "local_shell", "web_search_preview_2025_03_11", "mcp", "image_generation"])
async def test_other_kinds_of_tools_are_left_out_and_named(strict: LocalGateway, kind: str) -> None:
    answer = await strict.post(RESPONSES, {**CODEX, "tools": [{"type": kind, "name": "a"}, EXEC]})
    assert (answer.status, prompt_of(strict).count("[tool]")) == (200, 1)
    assert kind.removesuffix("_2025_03_11") in told(answer, "x-baton-ignored")


CUT = '{"city": "Par'


async def test_a_call_that_was_cut_comes_back(strict: LocalGateway) -> None:
    """The rest of a call that max_tokens ended has no end; the conversation goes on."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    cut = f'<tool_call>{{"name": "f", "arguments": {CUT}'
    say(strict, f"{cut}is")
    said = [{"role": "user", "content": "hi"}]
    body: dict[str, Any] = {"messages": said, "tools": [tool], "max_tokens": len(cut)}
    [choice] = (await strict.post(CHAT, body)).json["choices"]
    assert (choice["finish_reason"], choice["message"]["tool_calls"][0]["function"]["arguments"]) == ("length", CUT)
    say(strict, "ok")
    call = choice["message"]["tool_calls"][0]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "no JSON"}
    answer = await strict.post(CHAT, {**body, "messages": [*said, choice["message"], result]})
    rendered = f"<tool_call>{json.dumps({'name': 'f', 'arguments': {'arguments': CUT}})}</tool_call>[result]no JSON"
    assert (answer.status, rendered in prompt_of(strict)) == (200, True)
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": call["id"], "name": "f", "arguments": CUT},
        {"type": "function_call_output", "call_id": call["id"], "output": "no JSON"},
    ]
    answer = await strict.post(RESPONSES, {"input": items, "tools": [{**EXEC, "name": "f"}]})
    assert (answer.status, rendered in prompt_of(strict)) == (200, True)


@pytest.mark.parametrize("content", [[], None, [{"type": "reasoning_text", "text": "I thought."}]])
async def test_items_of_reasoning_come_back(strict: LocalGateway, content: object) -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "r", "summary": [], "content": content},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
        {"role": "user", "content": "Go on."},
    ]
    assert (await strict.post(RESPONSES, {"input": items})).status == 200
    assert prompt_of(strict) == "[user]hi[assistant]Hello.[user]Go on.[assistant]"


EFFORTS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "chats": (CHAT, {"reasoning_effort": "medium"}, {"reasoning_effort"}),
    "chats with a budget": (CHAT, {"thinking_token_budget": 5}, {"thinking_token_budget"}),
    "responses": (RESPONSES, {"reasoning": {"effort": "high"}}, {"reasoning.effort"}),
    "messages": (MESSAGES, {"output_config": {"effort": "max"}}, {"output_config.effort"}),
    "thinking": (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 32000}}, {"thinking.budget_tokens"}),
    "no thinking": (MESSAGES, {"thinking": {"type": "disabled"}}, {""}),
}


@pytest.mark.parametrize(("path", "given", "ignored"), EFFORTS.values(), ids=EFFORTS)
async def test_hints_of_effort_without_a_channel_are_left_out_and_named(
    strict: LocalGateway, path: str, given: dict[str, Any], ignored: set[str]
) -> None:
    said = {"input": "hi"} if path == RESPONSES else {"messages": [{"role": "user", "content": "hi"}]}
    answer = await strict.post(path, {**said, **given})
    assert (answer.status, told(answer, "x-baton-ignored")) == (200, ignored)


async def test_a_budget_of_grpc_wants_a_channel(strict: LocalGateway) -> None:
    with pytest.raises(Unsupported, match="thinking_token_budget: the model's chat template knows no channel"):
        await strict.client.generate(TURNS, thinking_token_budget=5)
