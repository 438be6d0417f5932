"""Block events of nodes, read through any worker of a node, for the router's index and for subscribers.

    EventReader ─ place ─▶ Line ═▶ worker ─▶ the directory of its node
                ◀─ page ──      ◀═        ◀─

A reader asks for a node's next page once it has taken the last, so that nothing queues up for a slow reader: only the
directory's ring keeps events, and a snapshot replaces events that have left it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from router.block_index import BlockIndex
from router.workers.members import Members
from wire import errors
from wire.errors import WireError
from wire.pb import worker_pb2

PAGE_TIMEOUT_S = 3.0
"""Bound on a page's time: a worker answers within a second, with or without events."""
PAUSE_S = 0.5
"""Pause before asking a silent node again, and between two looks for new nodes."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodePage:
    """The next page of a node's events; None if the worker did not answer."""

    node_id: str
    page: worker_pb2.EventPage | None


class EventReader(AbstractContextManager["EventReader"]):
    """A reader of all nodes' events, until its context ends. Belongs to the running event loop.

    cursor_of: returns the place after which a node's next page begins.
    """

    def __init__(self, members: Members, cursor_of: Callable[[str], worker_pb2.EventCursor]) -> None:
        self._members = members
        self._cursor_of = cursor_of
        self._nodes = set[str]()
        self._asking: dict[str, asyncio.Task[NodePage]] = {}
        self._num_failed = Counter[str]()
        self._has_failed = set[str]()

    async def next(self) -> NodePage:
        """Waits for the next page of any node; the pages of one node come in order.

        A node that is gone has a last page, whose cursor has no epoch.
        """
        while (node_id := next((one for one, task in self._asking.items() if task.done()), None)) is None:
            self._ask_all()
            if self._asking:
                await asyncio.wait(self._asking.values(), timeout=PAUSE_S, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(PAUSE_S)
        one = self._asking.pop(node_id).result()
        (self._has_failed.add if one.page is None else self._has_failed.discard)(node_id)
        if one.page is not None and not one.page.cursor.epoch:
            self._nodes.discard(node_id)
        return one

    def __exit__(self, *_: object) -> None:
        for task in self._asking.values():
            task.cancel()

    def _ask_all(self) -> None:
        self._nodes |= {member.info.node_id for member in self._members}
        for node_id in sorted(self._nodes - self._asking.keys()):
            self._asking[node_id] = asyncio.create_task(self._ask(node_id, self._cursor_of(node_id)))

    async def _ask(self, node_id: str, after: worker_pb2.EventCursor) -> NodePage:
        """Asks a worker of a node; after a failure pauses, then asks another worker."""
        await asyncio.sleep(PAUSE_S if node_id in self._has_failed else 0.0)
        here = [member for member in self._members if member.info.node_id == node_id]
        if not here:
            return NodePage(node_id, worker_pb2.EventPage(node_id=node_id, after=after))
        member = here[self._num_failed[node_id] % len(here)]
        try:
            page = await member.line.questions.events(after, PAGE_TIMEOUT_S)
            if not page.cursor.epoch:
                raise WireError("a page of events without a place")
        except Exception as error:
            log.debug("no block events of node %r by worker %s: %s", node_id, member.id, errors.known(error).message)
            self._num_failed[node_id] += 1
            return NodePage(node_id, None)
        page.node_id = node_id
        return NodePage(node_id, page)


class IndexFeed:
    """A task between `start` and `stop` that keeps a BlockIndex up to date."""

    def __init__(self, members: Members, index: BlockIndex) -> None:
        self._members = members
        self._index = index
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        with EventReader(self._members, self._index.cursor) as reader:
            while True:
                one = await reader.next()
                try:
                    self._take(one)
                except Exception as bug:  # else placement would go by an index that stands still
                    errors.report(bug)
                    self._index.clear()

    def _take(self, one: NodePage) -> None:
        if one.page is None:
            self._index.break_off(one.node_id)
        else:
            self._index.take(one.page)
