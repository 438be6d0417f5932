"""The answer of a chat: its text in parts (reasoning, content, calls of tools), and the frame that holds it. Pure."""
