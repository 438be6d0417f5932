"""What agent programs send, to a model whose chat template knows tools, is strict about turns, and has no reasoning."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton import AsyncClient
from baton.request import Message
from router.config import Listeners
from router.ports.server import RouterServer
from tests.gateway.local_gateway import LocalGateway, serving
from tests.gateway.test_responses import prompt_of
from tests.gateway.test_tool_calls import say
from tests.harness.fake_cluster import CONFIG, FakeCluster
from tests.harness.templates import STRICT
from text.template import template_processes
from text.template.template_processes import Template, TemplateProcesses

CHAT = "/v1/chat/completions"
TURNS: list[Message] = [{"role": role, "content": f"{role}'s"} for role in ("developer", "user", "system", "user")]


@pytest.fixture
def renderer(monkeypatch: pytest.MonkeyPatch) -> TemplateProcesses:
    monkeypatch.setattr(template_processes, "NUM_PROCESSES", 1)
    return TemplateProcesses(Template(STRICT, {"bos_token": ""}))


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


async def test_it_is_told_over_grpc_before_the_answer(renderer: TemplateProcesses) -> None:
    cluster = FakeCluster(replace(CONFIG, listeners=Listeners(metrics_port=0)), renderer=renderer)
    router = RouterServer(cluster.router)
    addresses = await router.start()
    await cluster.resize(1, 1)
    async with AsyncClient(addresses.public) as client:
        for prompt, words in ((TURNS, "developer-as-system, system-as-user, joined"), (TURNS[1:2], ""), ("hi", "")):
            async with client.stream(prompt, max_tokens=2) as stream:
                assert await stream.adapted() == words
                assert await stream.admitted() > 0
    await router.stop()
