"""Clients that people have, unmodified, in an environment of their own: `bash tests/clients.sh`."""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from baton import AsyncClient
from baton.request import Message
from tests.clients.conftest import MODEL
from tests.cluster.served_cluster import ServedCluster

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]
PROGRAMS = Path(__file__).parent
TIMEOUT_S = 150
INVALID_ARGUMENT = 3
"""As gRPC numbers it; the exit code of buf is eight times that."""


class Served:
    """Addresses of a gateway and of its router, and the texts that the cluster answers."""

    def __init__(self, address: str, grpc: str, chat: str, text: str) -> None:
        self.address, self.grpc, self.chat, self.text = address, grpc, chat, text

    async def run(self, program: str, environment: str = ".") -> Any:
        """Runs a program against the gateway, by the clients of an environment; returns what it prints."""
        python = Path(os.environ["BATON_CLIENTS_VENV"]) / environment / "bin/python"
        printed = await self.output(str(python), str(PROGRAMS / program), f"http://{self.address}/v1")
        return json.loads(printed.splitlines()[-1])  # litellm prints advice before

    async def output(self, *command: str, exit_code: int = 0) -> str:
        """Returns what a command prints, of one that fails its errors."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment
        )
        assert done.returncode == exit_code, done.stderr
        return done.stderr if exit_code else done.stdout


@pytest.fixture
async def served(cluster: ServedCluster) -> Served:
    status = cluster.status()
    async with AsyncClient(status["address"]) as client:
        chat = await client.generate([Message(role="user", content="hello")], max_tokens=6, seed=1)
        text = await client.generate("hello", max_tokens=6, seed=1)
    return Served(status["http_address"], status["address"], chat.text, text.text)


async def test_openai(served: Served) -> None:
    answered = await served.run("openai_program.py")
    assert (answered["chat"], answered["chat_streamed"]) == (served.chat, served.chat)
    assert (answered["text"], answered["text_streamed"]) == (served.text, served.text)
    assert answered["usage"]["completion_tokens"] == answered["whole_usage"]["completion_tokens"] == 6
    assert answered["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    assert answered["finish_reason"] == "length"
    assert answered["request_id"]
    assert answered["tiers"] == ["flex", None]
    assert answered["refused"] == {
        "temperature": "temperature",
        "suffix": "suffix",
        "response_format": "response_format",
        "model": "model_not_found",
    }


async def test_openai_with_tools(served: Served) -> None:
    answered = await served.run("openai_tools_program.py")
    whole, streamed, chosen = answered["arguments"]
    assert whole == streamed == chosen == "".join(answered["deltas"])
    assert len(answered["deltas"]) > 2
    assert answered["parsed"] == [json.loads(whole)] * 2
    assert answered["reasons"] == ["tool_calls", "tool_calls", "tool_calls", "stop"]
    assert answered["typed"]["name"] in ("Tom", "Lucy")
    assert answered["after"] > 0
    assert answered["refused"] == "tools"


async def test_responses(served: Served) -> None:
    answered = await served.run("responses_program.py")
    assert answered["text"] == [served.chat] * 3
    assert answered["statuses"] == ["incomplete", "incomplete", "completed", "completed", "completed"]
    assert answered["last"] == "response.incomplete"
    assert answered["usage"]["output_tokens"] == 6
    whole, streamed, joined = answered["arguments"]
    assert whole == streamed == joined
    assert answered["num_deltas"] > 2
    assert answered["typed"]["name"] in ("Tom", "Lucy")
    assert answered["after"] > 0
    assert answered["left_out"] == "web_search"
    assert answered["refused"] == {
        "store": "store",
        "previous_response_id": "previous_response_id",
        "tool_choice": "tool_choice.type",
    }


async def test_anthropic(served: Served) -> None:
    answered = await served.run("anthropic_program.py")
    assert answered["text"] == [served.chat] * 3
    assert answered["reasons"] == ["max_tokens", "max_tokens", "tool_use", "tool_use"]
    assert [one["output_tokens"] for one in answered["usage"]] == [6, 6]
    lens = {one["input_tokens"] + one["cache_read_input_tokens"] for one in answered["usage"]}
    assert len(lens) == 1
    whole, streamed, joined = answered["calls"]
    assert whole == streamed == joined
    assert answered["typed"].keys() == whole.keys() == {"pet", "times"}
    assert answered["num_deltas"] > 2
    assert answered["after"] == answered["counted"]
    assert (answered["ran"], answered["num_counted"]) == ([["tool_use"]] * 2, 2)
    assert answered["refused"] == {
        "model": [404, "not_found_error", True],
        "tools": [400, "invalid_request_error", True],
        "thread": [400, "invalid_request_error", True],
    }


async def test_litellm(served: Served) -> None:
    answered = await served.run("litellm_program.py")
    assert (answered["chat"], answered["chat_streamed"]) == (served.chat, served.chat)
    assert answered["refused"] == 400
    assert answered["cached_tokens"] >= 0
    assert is_answer(answered["typed"])
    assert is_look(answered["call"])
    assert answered["messages"] == 6
    assert answered["too_long"] == ["prompt", "max_tokens"] * 2


async def test_langchain(served: Served) -> None:
    answered = await served.run("langchain_program.py", "older")
    assert (answered["chat"], answered["chat_streamed"]) == (served.chat, served.chat)
    assert answered["usage"]["output_tokens"] == 6
    assert all(map(is_answer, answered["typed"]))
    name, arguments = answered["call"]
    assert name == "Look"
    assert is_look(arguments)


async def test_instructor(served: Served) -> None:
    answered = await served.run("instructor_program.py", "older")
    assert answered.keys() == {"tools", "schema", "anthropic", "partial"}
    assert all(map(is_answer, answered.values()))


async def test_pydantic_ai(served: Served) -> None:
    answered = await served.run("pydantic_ai_program.py")
    kinds = {"chats tool", "chats schema", "responses tool", "responses schema"}
    assert answered["answers"].keys() == kinds
    assert all(map(is_answer, answered["answers"].values()))
    assert answered["streamed"] == served.chat


async def test_inspect(served: Served) -> None:
    answered = await served.run("inspect_program.py")
    assert (answered["status"], answered["scored"]) == ("success", ["C"])
    assert answered["chat"] == served.chat
    assert is_answer(answered["typed"])
    assert {name for name, _ in answered["calls"]} == {"look"}
    assert all(is_look(arguments) for _, arguments in answered["calls"])


async def test_node(served: Served) -> None:
    """Modules are looked for where the program is: it lies beside them for a moment."""
    venv = Path(os.environ["BATON_CLIENTS_VENV"])
    program = Path(shutil.copy(PROGRAMS / "node_program.mjs", venv))
    answered = json.loads(await served.output("node", str(program), f"http://{served.address}/v1"))
    assert is_answer(answered.pop("typed"))
    assert all(map(is_answer, answered.pop("parsed")))
    assert all(map(is_look, answered.pop("calls")))
    assert answered == {
        "chat": served.chat,
        "streamed": served.chat,
        "responded": served.chat,
        "refused": "temperature",
        "vercel": served.chat,
        "vercelStreamed": served.chat,
        "tokens": 6,
    }


async def test_buf_curl(served: Served) -> None:
    """Knows the messages by reflection, and sends what curl would over HTTP/2 to the gRPC port."""
    service = f"http://{served.grpc}/baton.v1.Inference"
    buf = str(Path(os.environ["BATON_CLIENTS_VENV"]) / "node_modules/.bin/buf")
    [listed] = messages_of(await served.output(buf, "curl", "--protocol", "grpc", f"{service}/ListModels"))
    assert [model["name"] for model in listed["models"]] == [MODEL]
    ask = (buf, "curl", "--protocol", "grpc", f"{service}/Generate", "-d")
    sampling = {"maxTokens": 6, "seed": 1}
    streamed = messages_of(await served.output(*ask, json.dumps({"text": "hello", "samplingParams": sampling})))
    assert "".join(one["chunk"].get("text", "") for one in streamed[:-1]) == served.text
    assert streamed[-1]["complete"]["usage"]["completionTokens"] == 6
    hot = {"text": "hello", "samplingParams": {"temperature": 3}}
    refused = json.loads(await served.output(*ask, json.dumps(hot), exit_code=INVALID_ARGUMENT << 3))
    assert refused["code"] == "invalid_argument"
    assert "temperature" in refused["message"]


def is_answer(value: dict[str, Any]) -> bool:
    """Whether a value is an Answer of tests/clients/pets.py."""
    return value.keys() == {"name", "is_sure"} and value["name"] in ("Tom", "Lucy") and type(value["is_sure"]) is bool


def is_look(value: dict[str, Any]) -> bool:
    """Whether a value is a Look of tests/clients/pets.py."""
    return value.keys() == {"pet", "times"} and value["pet"] in ("dog", "cat", "parrot") and value["times"] in (1, 2, 3)


def messages_of(printed: str) -> list[Any]:
    """Reads one JSON value after another."""
    found, decoder = [], json.JSONDecoder()
    while printed := printed.strip():
        value, end = decoder.raw_decode(printed)
        found.append(value)
        printed = printed[end:]
    return found


async def test_curl(served: Served) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 6, "seed": 1})
    url = f"http://{served.address}/v1/completions"
    head = ("-H", "Content-Type: application/json")
    whole = json.loads(await served.output("curl", "-sS", "--fail", url, *head, "-d", body))
    assert whole["choices"][0]["text"] == served.text
    streamed = json.dumps({**json.loads(body), "stream": True})
    events = (await served.output("curl", "-sSN", "--fail", url, *head, "-d", streamed)).split("\n\n")[:-2]
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events) == served.text
    asked = await served.output("curl", "-sS", "--fail", url, *head, "-H", "Expect: 100-continue", "-d", body)
    assert json.loads(asked)["choices"] == whole["choices"]
