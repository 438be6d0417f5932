"""The gateways of a cluster: processes alike behind one port."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from deploy.actors.actor_host import ActorHost
from deploy.controller.event_log import EventLog
from deploy.controller.singleton import Singleton
from deploy.controller.tasks import Tasks
from deploy.processes.process import GATEWAY
from gateway.config import GatewayConfig
from wire.settings import to_json

TARGET = "gateway.actor:GatewayActor"


class Gateways:
    """A Singleton for each gateway. The first one takes the port; the others, and all later ones, join it."""

    def __init__(self, number: int, node_id: str, host: ActorHost, run_dir: Path, events: EventLog) -> None:
        self._run_dir = run_dir
        self._each = [
            Singleton(f"{GATEWAY}-{index}", TARGET, "", node_id, host, run_dir, events) for index in range(number)
        ]

    @property
    def names(self) -> list[str]:
        return [one.name for one in self._each]

    def configure(self, config: GatewayConfig) -> None:
        """Gives this configuration to each gateway that starts from now on."""
        self._config = config
        answers = [one.answer for one in self._each if one.answer is not None]
        port = int(json.loads(answers[0])["http_address"].rpartition(":")[2]) if answers else None
        for one in self._each:
            given = replace(config, name=one.name, joined_port=port, metrics_folder=str(self._run_dir))
            one.config_json = to_json(given)

    async def start(self) -> str:
        """Returns `{"http_address"}` when all serve, `{}` without any. Raises as `Singleton.start` does."""
        if not self._each:
            return "{}"
        first, *others = self._each
        answer = await first.start()
        self.configure(self._config)
        await asyncio.gather(*(one.start() for one in others))
        return answer

    async def take_over(self) -> None:
        """Returns when each gateway that was left behind is found, or replaced."""
        await asyncio.gather(*(one.take_over() for one in self._each))

    def watch(self, tasks: Tasks, on_restart: Callable[[str], None]) -> None:
        """Begins to replace each gateway that dies; calls `on_restart` with the name of one that serves again."""
        for one in self._each:
            tasks.begin(one.watch(partial(on_restart, one.name)))
