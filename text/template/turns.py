"""The turns of a conversation as a chat template takes them: roles that it leaves out, orders that it refuses.

A template is tried once, with turns that have a marker in them. Its rules change each turn by the turns before it
alone: a conversation that grows keeps its prefix.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wire.errors import InvalidRequest

Tools = tuple[Mapping[str, Any], ...]

ROLES = ("system", "developer", "user", "assistant", "tool")
_INSTRUCTING = ("system", "developer")
MARKER = "kestrel 4711"
"""A text that no chat template has; it shows whether and where a turn is written."""


@dataclass(frozen=True)
class ChatTurn:
    """A turn of a conversation. `role` is one of ROLES.

    tool_calls: an assistant's calls, as templates take them: arguments are an object. more: further text fields, such
    as `name`, a tool's `tool_call_id`, and an assistant's `reasoning_content`.
    """

    role: str
    content: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, Any]:
        """The message as templates take it, without absent fields."""
        calls = {"tool_calls": list(self.tool_calls)} if self.tool_calls else {}
        return {"role": self.role, "content": self.content, **calls, **self.more}


def _marked(*roles: str) -> tuple[ChatTurn, ...]:
    return tuple(ChatTurn(role, MARKER) for role in roles)


_CALLED = {"id": "calla0001", "type": "function", "function": {"name": "look_up", "arguments": {"city": "Rome"}}}
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks up a city.", "parameters": _CITY}}
_RESULT = (
    *_marked("user"),
    ChatTurn("assistant", "", (_CALLED,)),
    ChatTurn("tool", MARKER, more={"tool_call_id": "calla0001"}),
)
TRIALS: Mapping[str, tuple[ChatTurn, ...]] = {
    "user": _marked("user"),
    "assistant": _marked("user", "assistant", "user"),
    "system": _marked("system", "user"),
    "developer": _marked("developer", "user"),
    "tool": _RESULT,
    "tool without tools": _RESULT,
    "first": _marked("system", "developer", "user"),
    "late": _marked("user", "system", "assistant", "developer", "user"),
    "users": _marked("user", "user"),
    "assistants": _marked("user", "assistant", "assistant", "user"),
}
"""Conversations to try a template with: each role, instructions first and late, turns of one role in a row.

The trial named "tool" also offers a tool.
"""


@dataclass(frozen=True)
class TurnRules:
    """The rules of one chat template.

    untaken: the trials that the template did not take. True: it left out a turn's text; False: it refused.
    """

    untaken: Mapping[str, bool] = field(default_factory=dict)

    def fit(self, turns: Sequence[ChatTurn], tools: Tools) -> tuple[tuple[ChatTurn, ...], tuple[str, ...]]:
        """Returns turns that the template takes, and the changes in words.

        A late system or developer turn becomes a user's turn, if the template does not take it there. Tool results and
        turns with calls are never joined. Raises InvalidRequest for a role whose text the template leaves out.
        """
        made, changes, is_first = list[ChatTurn](), list[str](), True
        for turn in turns:
            is_first = is_first and turn.role in _INSTRUCTING
            fitted = replace(turn, role=self._role(turn.role, is_first))
            beside = "" if tools or turn.role != "tool" else " without tools"
            if self.untaken.get(fitted.role + beside):
                problem = f"the model's chat template leaves out the text of messages of the role {turn.role}{beside}"
                raise InvalidRequest("messages", problem)
            changes += [f"{turn.role}-as-{fitted.role}"] if fitted.role != turn.role else []
            if made and self._is_joined(made[-1], fitted, is_first):
                last = made.pop()
                fitted = replace(last, content="\n\n".join(filter(None, (last.content, fitted.content))))
                changes.append("joined")
            made.append(fitted)
        return tuple(made), tuple(dict.fromkeys(changes))

    def _role(self, role: str, is_first: bool) -> str:
        if role in _INSTRUCTING and not is_first and "late" in self.untaken:
            return "user"
        return "system" if role == "developer" and role in self.untaken else role

    def _is_joined(self, last: ChatTurn, turn: ChatTurn, is_first: bool) -> bool:
        trial = "first" if is_first else f"{turn.role}s"
        is_alike = last.more == turn.more and (is_first or last.role == turn.role)
        return trial in self.untaken and is_alike and not (last.tool_calls or turn.tool_calls)


TAKES_ALL = TurnRules()


async def tried(render: Callable[[Sequence[ChatTurn], Tools], Awaitable[str]]) -> TurnRules:
    """Tries a template; returns its rules. render: raises InvalidRequest for turns that the template refuses.

    A template that refuses a single user turn has no rules: each chat fails with the template's own words.
    """
    untaken: dict[str, bool] = {}
    for trial, turns in TRIALS.items():
        try:
            tools = (_TOOL,) if trial == "tool" else ()
            prompt = await render(TurnRules(untaken).fit(turns, tools)[0], tools)
            if prompt.count(MARKER) < sum(turn.content == MARKER for turn in turns):
                untaken[trial] = True
        except InvalidRequest:
            if trial == "user":
                break
            untaken[trial] = False
    return TurnRules(untaken)
