"""The inbox of a worker on a loop of virtual time, which no thread may hold up."""

import asyncio

from worker.loop import Command, Inbox


class VirtualInbox(Inbox):
    """An inbox that never blocks; `has_news` is set from each command, or ring, to the next take."""

    def __init__(self) -> None:
        super().__init__()
        self.has_news = asyncio.Event()

    def put(self, command: Command) -> bool:
        self.has_news.set()
        return super().put(command)

    def ring(self) -> None:
        self.has_news.set()
        super().ring()

    def take(self, timeout_s: float) -> list[Command]:
        self.has_news.clear()
        return super().take(0.0)
