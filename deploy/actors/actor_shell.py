"""What every actor of a cluster is to Ray: a process that makes one object of ours and passes calls on to it."""

import asyncio
import importlib
from pathlib import Path
from typing import Any

from deploy.processes import process_record
from wire.errors import Unavailable
from wire.logs import start_logging


class ActorShell:
    """The object's module is imported here, not where the actor is asked for: the controller needs no torch.

    The import begins with the process, and the object is made by `start`, so that both may overlap with other work.
    """

    def __init__(self, name: str, module: str, class_name: str, run_dir: str) -> None:
        """`name` is what the process is called in its log, and in the cluster's folder."""
        start_logging(name)
        process_record.write_own(Path(run_dir), name)
        self._class: Any = getattr(importlib.import_module(module), class_name)
        self._object: Any = None
        self._starting: asyncio.Task[str] | None = None

    async def start(self, config_json: str) -> str:
        """Makes the object and starts it, once: whoever asks again gets the same answer. Raises what that raises."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(config_json))
        return await asyncio.shield(self._starting)

    async def call(self, method: str, *arguments: str | int) -> str:
        """A method of the started object. Raises Unavailable before that."""
        if self._object is None:
            raise Unavailable("the actor has not started")
        answer: str = await getattr(self._object, method)(*arguments)
        return answer

    async def _start(self, config_json: str) -> str:
        self._object = await asyncio.to_thread(self._class, config_json)
        answer: str = await self._object.start()
        return answer

    async def ping(self) -> str:
        """Answers as long as the event loop turns."""
        return ""
