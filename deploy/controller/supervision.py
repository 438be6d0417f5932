"""Tasks that a cluster depends on: they go on, whatever happens in them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from deploy.controller.event_log import EventLog

PAUSE_S = 1.0

log = logging.getLogger(__name__)


async def repeat(what: str, step: Callable[[], Awaitable[None]], events: EventLog) -> None:
    """One step after another, until cancelled. A step that fails is noted as an event; the next follows in a second."""
    while True:
        await persist(what, step, events)


async def persist(what: str, step: Callable[[], Awaitable[None]], events: EventLog) -> None:
    """The same step, until it succeeds. Each failure is noted as an event; the next try follows in a second."""
    while True:
        try:
            return await step()
        except Exception as error:
            log.exception("%s failed", what)
            events.note(f"{what} failed, and goes on: {error!r}")
            await asyncio.sleep(PAUSE_S)
