"""Checks of a chat: its messages, its tools, and the variables of its template."""

import json
from typing import Any

from text.answer.frame import ToolUse
from text.chat import Chat
from text.template.turns import ROLES, ChatTurn
from wire.convert import given
from wire.errors import InvalidRequest, require
from wire.pb import inference_pb2 as pb
from wire.rpc import MAX_TURNS

MAX_TOOLS = 128
MAX_TOOL_DEPTH = 64
MAX_TOLD_CHARS = 64
FURTHER_FIELDS = ("tool_call_id", "name", "reasoning_content")
RENDERERS_OWN = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "documents",
        "messages",
        "return_assistant_tokens_mask",
        "tools",
    }
)
"""Variable names that the renderer of templates uses itself."""


def valid_chat(conversation: pb.Conversation) -> Chat:
    """Reads the messages of a chat. Raises InvalidRequest."""
    require(len(conversation.messages) > 0, "messages", "must not be empty")
    require(len(conversation.messages) <= MAX_TURNS, "messages", f"at most {MAX_TURNS}")
    for one in conversation.messages:
        require(one.role in ROLES, "messages", f"a role must be one of {', '.join(ROLES)}")
    continues, budget = conversation.continue_final_message, given(conversation, "thinking_token_budget")
    is_assistants = conversation.messages[-1].role == "assistant"
    require(not continues or is_assistants, "continue_final_message", "the last message must be an assistant's")
    require(budget is None or budget > 0, "thinking_token_budget", "must be at least 1")
    turns, tools = tuple(map(_message, conversation.messages)), _tool_use(conversation)
    return Chat(turns, tools, _variables(conversation.chat_template_kwargs), continues, budget)


def _tool_use(conversation: pb.Conversation) -> ToolUse:
    """Reads tools and the tool choice. The template does not get `strict`."""
    require(len(conversation.tools) <= MAX_TOOLS, "tools", f"at most {MAX_TOOLS}")
    tools = tuple(_function(one, f"tools[{place}]") for place, one in enumerate(conversation.tools))
    functions, choice = {one["function"]["name"]: one["function"] for one in tools}, conversation.tool_choice
    require(len(functions) == len(tools), "tools", "must have names of their own")
    strict = frozenset(name for name, function in functions.items() if function.pop("strict", False) is True)
    required = choice.required or bool(choice.name)
    require(bool(tools) or not required, "tool_choice", "wants tools")
    require(choice.name in functions or not choice.name, "tool_choice", "must name one of the tools")
    parallel = choice.parallel or not choice.HasField("parallel")
    use = ToolUse(tools, strict, required, choice.name, parallel)
    for name in functions if required else strict:
        schema = functions[name].get("parameters") or {}
        is_object = isinstance(schema, dict) and schema.get("type", "object") == "object"
        require(is_object, use.field(name), "must be of type object")
    return use


def _variables(text: str) -> dict[str, Any]:
    """Reads the further variables of a template."""
    param = "chat_template_kwargs"
    try:
        read = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(param, "must be JSON") from error
    require(isinstance(read, dict) and _is_shallow(read, MAX_TOOL_DEPTH), param, "must be an object, not too deep")
    for name in read:
        is_free = name not in RENDERERS_OWN and not name.endswith("_token") and name.isidentifier()
        require(is_free, param, f"{name[:MAX_TOLD_CHARS]} is no variable that a client may set")
    return dict(read)


def _message(message: pb.Message) -> ChatTurn:
    calls = tuple(_function(one, "messages") for one in message.tool_calls)
    require(not calls or message.role == "assistant", "messages", "only an assistant has tool_calls")
    arguments = all(isinstance(one["function"].get("arguments"), dict) for one in calls)
    require(arguments, "messages", "the arguments of a call must be an object")
    more = {name: getattr(message, name) for name in FURTHER_FIELDS if message.HasField(name)}
    return ChatTurn(message.role, message.content, calls, more)


def _function(text: str, param: str) -> dict[str, Any]:
    """Reads a tool or a tool call."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(param, "a tool, or a call of one, must be JSON") from error
    function = read.get("function") if isinstance(read, dict) else None
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    require(_is_shallow(read, MAX_TOOL_DEPTH), param, f"may be nested at most {MAX_TOOL_DEPTH} deep")
    require(named, param, "a tool, or a call of one, must be an object that names a function")
    return {**read}


def _is_shallow(value: object, depth: int) -> bool:
    within = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_shallow(one, depth - 1) for one in within)
