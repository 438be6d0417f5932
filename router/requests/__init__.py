"""A request from its message to its last token: checks, admission, the coroutine that serves it."""
