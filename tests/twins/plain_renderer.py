"""The chat template's twin."""

import json

from text.chat import Chat


class PlainRenderer:
    """The in-memory twin: a line for each tool and turn."""

    tool_format = "qwen"

    async def render(self, chat: Chat, max_added_chars: int) -> str:
        tools = "".join(f"tool: {json.dumps(one)}\n" for one in chat.tools)
        calls = [
            "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in one.tool_calls) for one in chat.messages
        ]
        turns = zip(chat.messages, calls, strict=True)
        return tools + "".join(f"{one.role}: {one.content}{made}\n" for one, made in turns) + "assistant:"

    async def close(self) -> None:
        """Has nothing to close."""
