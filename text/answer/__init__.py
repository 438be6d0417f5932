"""The answer of a chat: its text in parts (reasoning, content, tool calls), and the frame that holds it. Pure."""
