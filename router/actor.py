"""The router as a Ray actor: a plain class, which `deploy` makes an actor, and its connection to the controller."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from router.config import RouterConfig
from router.ports.server import RouterServer
from router.requests.tokenizing import PublicPrefixes
from router.router import Router
from router.workers.controller_port import KEYS_TIMEOUT_S, ORDER_TIMEOUT_S, REPORT_TIMEOUT_S, ControllerReport
from router.workers.grpc_transport import GrpcTransport
from text.chat import NoRenderer
from text.template.template_processes import Template, TemplateProcesses
from text.tokenizer import Tokenizer
from wire.errors import BatonError, Unavailable
from wire.ids import WorkerId
from wire.pools import MemberList, MembersAnswer, PoolSizes, SizesAsked
from wire.trust.key_ring import KeyList
from wire.typed_reader import from_json, to_json, to_message

PAUSE_S = 0.5
_NO_ANSWER = "the controller does not answer"


class RouterActor:
    """The router's object in its actor. Calls carry text only: JSON in and out."""

    def __init__(self, config_json: str) -> None:
        """Reads the configuration. Raises ConfigError."""
        self._config = from_json(RouterConfig, config_json, "router")
        self._setting = asyncio.Lock()
        self._server: RouterServer | None = None
        self._router: Router | None = None

    async def start(self) -> str:
        """Begins to serve; returns the router's Addresses.

        Raises ConfigError or ModelError.
        """
        config = self._config
        # Else texts of all threads queue for a pool of the library's, the short behind the long.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        folder = Path(config.model.folder)
        codec = await asyncio.to_thread(Tokenizer.load, folder)
        await asyncio.to_thread(codec.min_tokens, "", 0)  # else the first long text would wait for the vocabulary
        template = await asyncio.to_thread(Template.load, folder)
        renderer = (
            None
            if template is None
            else TemplateProcesses(template, config.model.tool_format, config.model.reasoning_format)
        )
        connect = partial(GrpcTransport, token=config.cluster.token, identity=config.cluster.identity)
        port = RayController(config.cluster.controller, config.cluster.ray_namespace)
        prefixes = await PublicPrefixes.make(config, codec, renderer or NoRenderer())
        self._router = Router(config, codec, connect, port, renderer, prefixes)
        self._server = RouterServer(self._router)
        addresses = await self._server.start()
        # What there is now stays: to look through it again and again would stop the router for 0.1 s each time.
        gc.collect()
        gc.freeze()
        return to_json(addresses)

    async def set_members(self, members_json: str) -> str:
        """Replaces the members by a MemberList. Returns MembersAnswer.

        A list waits for the one before, whose caller may have given up: it is taken with the versions that it names.
        """
        router, members = self._started, from_json(MemberList, members_json, "members")
        async with self._setting:
            router.members.sizes = members.sizes
            router.versions.replace(members.models)
            reasons = await router.membership.set(members.workers)
            return to_message(MembersAnswer(reasons, router.dispatcher.needed))

    async def demand(self) -> str:
        """Returns the Demand."""
        return to_message(self._started.dispatcher.demand)

    async def set_keys(self, keys_json: str) -> None:
        """Replaces the accepted keys by this KeyList."""
        self._started.keys.replace(from_json(KeyList, keys_json, "keys"))

    async def stop(self) -> None:
        """Ends open requests and closes the ports."""
        if self._server is not None:
            await self._server.stop()

    @property
    def _started(self) -> Router:
        if self._router is None:
            raise Unavailable("the router has not started")
        return self._router


class RayController:
    """A ControllerPort to the controller's actor, found by name. The actor's methods take and return text.

    A dead controller is back in seconds, and knows the orders that its predecessor took. Then the outcome is asked for
    again, and an order that was perhaps not taken is given again.
    """

    def __init__(self, name: str, ray_namespace: str) -> None:
        self._name = name
        self._ray_namespace = ray_namespace
        self._actor: Any = None

    async def scale(self, prefill: int | None, decode: int | None) -> PoolSizes:
        async with _answering(ORDER_TIMEOUT_S):
            order = await self._insist("scale", to_message(SizesAsked(prefill, decode)))
            return from_json(PoolSizes, await self._insist("scaled", order), "sizes")

    async def drain(self, worker_id: WorkerId) -> None:
        async with _answering(ORDER_TIMEOUT_S):
            await self._insist("drain", worker_id)
            await self._insist("drained", worker_id)

    async def roll(self, revision: str) -> int:
        async with _answering(ORDER_TIMEOUT_S):
            return int(await self._insist("rolled", await self._insist("roll", revision)))

    async def shutdown(self) -> None:
        await self._call("shutdown", REPORT_TIMEOUT_S)

    async def reload_keys(self) -> None:
        await self._call("reload_keys", KEYS_TIMEOUT_S)

    async def report(self) -> ControllerReport:
        return from_json(ControllerReport, await self._call("report", REPORT_TIMEOUT_S), "report")

    async def worker_lost(self, worker_id: WorkerId) -> None:
        await self._call("worker_lost", REPORT_TIMEOUT_S, worker_id)

    async def _call(self, method: str, timeout_s: float, *arguments: str) -> str:
        async with _answering(timeout_s):
            return await self._ask(method, *arguments)

    async def _insist(self, method: str, *arguments: str) -> str:
        """Repeats a call while the controller is dead, or not back yet."""
        while True:
            with suppress(RayActorError):
                return await self._ask(method, *arguments)
            await asyncio.sleep(PAUSE_S)

    async def _ask(self, method: str, *arguments: str) -> str:
        if self._actor is None:
            self._actor = await asyncio.to_thread(ray.get_actor, self._name, self._ray_namespace)
        try:
            answer: str = await getattr(self._actor, method).remote(*arguments)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, BatonError) else Unavailable(_NO_ANSWER) from error
        except RayActorError:
            self._actor = None
            raise
        return answer


@asynccontextmanager
async def _answering(timeout_s: float) -> AsyncIterator[None]:
    """Raises Unavailable if the controller is gone, or does not answer in time."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except (RayError, ValueError, TimeoutError) as error:
        raise Unavailable(_NO_ANSWER) from error
