"""Block events of the nodes: read by any worker of a node, for the router's index and for subscribers alike.

    NodeEvents.pages ─ place ─▶ Line ═▶ worker ─▶ the directory of its node
                     ◀ page ──       ◀═        ◀─

A reader asks for a node's next page when it has taken the last one, so that nothing piles up for a slow one: the
directory's ring is all that is kept, and a snapshot takes the place of what has left it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from router.block_index import BlockIndex
from router.workers.members import Members
from wire import errors
from wire.errors import BatonError, Unavailable
from wire.pb import worker_pb2
from wire.pools import WorkerState

PAGE_TIMEOUT_S = 3.0
"""A worker answers within a second, events or not."""
PAUSE_S = 0.5
"""Before a node that did not answer is asked again, and between two looks for new nodes."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodePage:
    """The next page of a node's events; None where the worker that was asked did not tell them."""

    node_id: str
    page: worker_pb2.EventPage | None


class NodeEvents:
    """The events of all nodes that have workers."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._num_failed = Counter[str]()

    async def pages(self, cursor_of: Callable[[str], worker_pb2.EventCursor]) -> AsyncGenerator[NodePage, None]:
        """Yields the pages of each node in order, those of all nodes as they come, without end.

        cursor_of: tells the place behind which a node's next page begins. The last page of a node that is gone has a
        cursor without an epoch. To be closed.
        """
        asking: dict[str, asyncio.Task[NodePage]] = {}
        nodes, failed = set[str](), set[str]()
        try:
            while True:
                nodes |= {member.info.node_id for member in self._members}
                for node_id in sorted(nodes - asking.keys()):
                    pause_s = PAUSE_S if node_id in failed else 0.0
                    asking[node_id] = asyncio.create_task(self._ask(node_id, cursor_of(node_id), pause_s))
                if not asking:
                    await asyncio.sleep(PAUSE_S)
                    continue
                await asyncio.wait(asking.values(), timeout=PAUSE_S, return_when=asyncio.FIRST_COMPLETED)
                for node_id in sorted(node_id for node_id, task in asking.items() if task.done()):
                    one = asking.pop(node_id).result()
                    (failed.add if one.page is None else failed.discard)(node_id)
                    if one.page is not None and not one.page.cursor.epoch:
                        nodes.discard(node_id)
                    yield one
        finally:
            for task in asking.values():
                task.cancel()

    async def _ask(self, node_id: str, after: worker_pb2.EventCursor, pause_s: float) -> NodePage:
        """Asks one worker of a node, another one after each failure."""
        await asyncio.sleep(pause_s)
        here = [member for member in self._members if member.info.node_id == node_id]
        if not here:
            return NodePage(node_id, worker_pb2.EventPage(node_id=node_id, after=after))
        lines = [member.line for member in here if member.state is not WorkerState.LOST]
        try:
            if not lines:
                raise Unavailable("all workers of the node are lost")
            page = await lines[self._num_failed[node_id] % len(lines)].events(after, PAGE_TIMEOUT_S)
            page.node_id = node_id
            return NodePage(node_id, page)
        except BatonError as error:
            log.debug("no block events of node %r: %s", node_id, error.message)
            self._num_failed[node_id] += 1
            return NodePage(node_id, None)


class IndexFeed:
    """A task between `start` and `stop` that keeps an index true."""

    def __init__(self, events: NodeEvents, index: BlockIndex) -> None:
        self._events = events
        self._index = index
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
            except Exception as bug:  # else placement would go by an index that stands still
                errors.report(bug)
                self._index.clear()
                await asyncio.sleep(PAUSE_S)

    async def _follow(self) -> None:
        async with aclosing(self._events.pages(self._index.cursor)) as pages:
            async for one in pages:
                if one.page is None:
                    self._index.break_off(one.node_id)
                else:
                    self._index.take(one.page)
