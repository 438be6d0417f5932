"""Roles that a template leaves out, and orders that it refuses: found once, met in place, told."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from tests.harness.templates import BY_PARITY, FIRST_ALONE, LENIENT, NO_SYSTEM, SILENT, STRICT
from text.answer.frame import ToolUse
from text.chat import Chat, Rendered
from text.child_processes import ChildProcesses
from text.template import template_processes
from text.template.template_processes import Template, TemplateProcesses
from text.template.turns import TAKES_ALL, TRIALS, ChatTurn
from wire.errors import InvalidRequest, Unavailable

LETTERS = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}


class Renderers(dict[str, TemplateProcesses]):
    """A process for each template, for all tests."""

    def __missing__(self, source: str) -> TemplateProcesses:
        self[source] = TemplateProcesses(Template(source, {"bos_token": ""}))
        return self[source]


@pytest.fixture(scope="module")
def renderers() -> Iterator[Renderers]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(template_processes, "NUM_PROCESSES", 1)
        renderers = Renderers()
        yield renderers
        for one in renderers.values():
            asyncio.run(one.close())


def turns_of(letters: str) -> list[ChatTurn]:
    """A turn for each letter; its text is the letter and its place."""
    return [ChatTurn(LETTERS[letter], f"{letter}{place}") for place, letter in enumerate(letters)]


async def render(renderer: TemplateProcesses, turns: Sequence[ChatTurn]) -> Rendered:
    return await Chat(tuple(turns)).render(renderer, (), 1000)


ADAPTED = {
    "what a template takes comes as it is": (STRICT, "sua", "[system]s0[user]u1[assistant]a2", ""),
    "of all roles": (LENIENT, "dusua", "[developer]d0[user]u1[system]s2[user]u3[assistant]a4", ""),
    "turns in a row that it takes": (LENIENT, "ssuuaau", "[system]s0[system]s1[user]u2[user]u3[assistant]a4", ""),
    "an unknown role": (STRICT, "du", "[system]d0[user]u1", "developer-as-system"),
    "instructions in a row": (STRICT, "sddu", "[system]s0\n\nd1\n\nd2[user]u3", "developer-as-system joined"),
    "late instructions": (STRICT, "suaudu", "[user]u3\n\nd4\n\nu5", "developer-as-user joined"),
    "behind an assistant's turn": (STRICT, "uasu", "[assistant]a1[user]s2\n\nu3", "system-as-user joined"),
    "as Claude Code sends them": (STRICT, "sus", "[system]s0[user]u1\n\ns2", "system-as-user joined"),
    "as Codex sends them": (STRICT, "dduu", "[system]d0\n\nd1[user]u2\n\nu3", "developer-as-system joined"),
    "an assistant's turns in a row": (STRICT, "uaau", "[assistant]a1\n\na2[user]u3", "joined"),
    "only the first may instruct": (FIRST_ALONE, "sdu", "[system]s0\n\nd1[user]u2", "joined"),
    "a known role, late": (
        FIRST_ALONE,
        "duadu",
        "[developer]d0[user]u1[assistant]a2[user]d3[user]u4",
        "developer-as-user",
    ),
    "a place in which it happens to be taken": (BY_PARITY, "us", "[user]u0\n\ns1", "system-as-user joined"),
    "late, of a template without the role": (NO_SYSTEM, "usau", "[user]u0[user]s1[assistant]a2", "system-as-user"),
}


@pytest.mark.parametrize(("source", "letters", "said", "adapted"), ADAPTED.values(), ids=ADAPTED)
async def test_a_template_gets_what_it_takes(
    renderers: Renderers, source: str, letters: str, said: str, adapted: str
) -> None:
    rendered = await render(renderers[source], turns_of(letters))
    assert said in rendered.text
    assert rendered.adapted == tuple(adapted.split())
    assert all(turn.content in rendered.text for turn in turns_of(letters))


REFUSED = {
    "instructions that would be lost": (SILENT, "su", "leaves out the text of messages of the role system"),
    "of a developer, too": (SILENT, "du", "leaves out the text of messages of the role developer"),
    "what it refuses by its own words": (NO_SYSTEM, "su", "System role not supported"),
    "a developer, for whom system stands": (NO_SYSTEM, "du", "System role not supported"),
    "a user's text that would be lost": ("{{ messages | length }}", "u", "of the role user"),
    "what cannot be met": (BY_PARITY, "au", "Roles must alternate"),
}


@pytest.mark.parametrize(("source", "letters", "said"), REFUSED.values(), ids=REFUSED)
async def test_what_cannot_be_met_is_refused_with_its_reason(
    renderers: Renderers, source: str, letters: str, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        await render(renderers[source], turns_of(letters))
    assert refused.value.ids["param"] == "messages"


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


async def test_results_of_tools_and_turns_with_calls_are_never_joined(renderers: Renderers) -> None:
    calling, renderer = ChatTurn("assistant", "", (CALL,)), renderers[STRICT]
    result = ChatTurn("tool", "5", more={"tool_call_id": "1"})
    rendered = await render(renderer, [*turns_of("u"), calling, result, result, *turns_of("su")])
    assert rendered.text.endswith("</tool_call>[result]5[result]5[user]s0\n\nu1[assistant]")
    for turns in ([*turns_of("ua"), calling], [*turns_of("u"), calling, *turns_of("a")]):
        with pytest.raises(InvalidRequest, match="Roles must alternate"):
            await render(renderer, turns)


async def test_results_of_tools_that_would_be_lost_are_refused(renderers: Renderers) -> None:
    turns = [*turns_of("u"), ChatTurn("assistant", "", (CALL,)), ChatTurn("tool", "5", more={"tool_call_id": "1"})]
    with pytest.raises(InvalidRequest, match="of the role tool"):
        await render(renderers[STRICT.replace("message.role == 'tool'", "message.role == 'ipython'")], turns)


IF_TOOLS = STRICT.replace("message.role == 'tool'", "message.role == 'tool' and tools")


async def test_results_that_a_template_writes_beside_tools_alone_are_taken_with_them(renderers: Renderers) -> None:
    turns = (*turns_of("u"), ChatTurn("assistant", "", (CALL,)), ChatTurn("tool", "5", more={"tool_call_id": "1"}))
    tools = ToolUse(({"type": "function", "function": {"name": "f"}},))
    rendered = await Chat(turns, tools).render(renderers[IF_TOOLS], (), 1000)
    assert rendered.text.endswith("</tool_call>[result]5[assistant]")
    with pytest.raises(InvalidRequest, match="of the role tool without tools"):
        await render(renderers[IF_TOOLS], turns)


async def test_turns_of_other_speakers_are_not_joined(renderers: Renderers) -> None:
    ann, bob = (ChatTurn("user", "hi", more={"name": name}) for name in ("ann", "bob"))
    assert "hi\n\nhi" in (await render(renderers[STRICT], [ann, ann])).text
    with pytest.raises(InvalidRequest, match="Roles must alternate"):
        await render(renderers[STRICT], [ann, bob])


@pytest.mark.parametrize("source", [STRICT, LENIENT, FIRST_ALONE, BY_PARITY])
async def test_a_conversation_that_grows_keeps_the_prefix_of_its_earlier_prompt(
    renderers: Renderers, source: str
) -> None:
    """Each prompt but for the opener of the answer begins the next one: no later turn changes what stands before it."""
    for letters in ("sduusasuuadsua", "usasuauasu", "dduuaduauua", "uaasuasau"):
        whole = turns_of(letters)
        prompts = [(await render(renderers[source], whole[:end])).text for end in range(1, len(whole) + 1)]
        for before, after in pairwise(prompts):
            assert after.startswith(before.removesuffix("[assistant]"))


async def test_a_template_is_tried_once(renderers: Renderers, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, renderer = [], renderers[STRICT + "{# another #}"]
    ask = ChildProcesses.ask

    async def noted(processes: ChildProcesses, task: Mapping[str, Any]) -> dict[str, str]:
        asked.append(task)
        return await ask(processes, task)

    monkeypatch.setattr(ChildProcesses, "ask", noted)
    rules, again = await asyncio.gather(renderer.turn_rules(), renderer.turn_rules())
    assert again is rules
    assert rules.untaken == {
        "developer": True,
        **dict.fromkeys(("first", "late", "users", "assistants"), False),
    }
    num_trials = len(asked)
    assert num_trials == len(TRIALS)
    await render(renderer, turns_of("u"))
    assert len(asked) == num_trials + 1


async def test_a_template_that_refuses_a_plain_question_has_no_rules(renderers: Renderers) -> None:
    renderer = renderers["{{ raise_exception('no') if messages | length < 2 }}"]
    assert await renderer.turn_rules() == TAKES_ALL


async def test_a_template_without_a_process_is_tried_again(
    renderers: Renderers, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = renderers[LENIENT + "{# another #}"]
    await renderer.render(Chat(tuple(turns_of("u"))), 1000)
    with monkeypatch.context() as patched:

        async def none(*_: object) -> dict[str, str]:
            raise Unavailable("no process")

        patched.setattr(ChildProcesses, "ask", none)
        with pytest.raises(Unavailable):
            await render(renderer, turns_of("u"))
    assert (await render(renderer, turns_of("d"))).text == "[developer]d0[assistant]"
