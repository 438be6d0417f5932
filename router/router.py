"""A router without its ports: the assembly of the parts that serve requests."""

import asyncio
import math
from functools import partial

from prometheus_client import CollectorRegistry

from router.block_index import BlockIndex
from router.config import RouterConfig
from router.moves import PromptMoves
from router.observe.demand import DemandMeter
from router.observe.metrics import RequestMetrics
from router.observe.trace_exporter import TraceExporter
from router.observe.traces import Traces
from router.observe.vllm_names import VllmNames
from router.observe.worker_metrics import WorkerCollector
from router.operate.contents import StoreAdministration
from router.operate.status import StatusReader, StatusWatch
from router.other_namespaces import OtherNamespaces
from router.placement import Placement, PrefixMap
from router.requests.admission import Admission
from router.requests.attempt import Services
from router.requests.dispatch import Dispatcher
from router.requests.forecast import Forecast
from router.requests.prompt import PromptPreparer
from router.requests.replay import IsolatedRetries, Quarantine
from router.requests.tokenizing import NO_PREFIXES, PublicPrefixes
from router.requests.versions import ModelVersions
from router.workers.controller_port import ControllerPort
from router.workers.holds import HoldBudgets
from router.workers.line import Connect
from router.workers.members import Members
from router.workers.membership import Membership
from router.workers.node_events import IndexFeed
from text.chat import NoRenderer, Renderer
from text.tokenizer_protocol import TextCodec
from wire.load.fairness import FairShares
from wire.pools import Role
from wire.trust.key_ring import KeyRing


class Router:
    """A router: between `start` and `stop`, `dispatcher` takes requests, `membership` workers. Needs an event loop.

    connect: opens a connection to a worker's address. renderer: renders chats; None for a model without a template.
    """

    def __init__(
        self,
        config: RouterConfig,
        codec: TextCodec,
        connect: Connect,
        port: ControllerPort,
        renderer: Renderer | None = None,
        prefixes: PublicPrefixes = NO_PREFIXES,
    ) -> None:
        model, layout = config.model, config.model.layout
        self.config = config
        self.port = port
        self.keys = KeyRing(config.keys)
        self.metrics = RequestMetrics()
        self.members = Members(model.fingerprint, layout.encode())
        self.versions = ModelVersions(config, self.members)
        shares = self.shares = FairShares()
        self.holds = HoldBudgets(self.members, is_alone=config.settings.routers == 1, shares=shares)
        self.index = BlockIndex(layout)
        self._feed = IndexFeed(self.members, self.index)
        self._placement = Placement(
            self.members,
            PrefixMap(config.max_prefix_keys),
            self.index,
            layout.block_size,
            config.settings.max_worker_wait_s,
            config.settings.disaggregation,
        )
        self.membership = Membership(self.members, connect, port, self._members_changed)
        self._isolated_retries = IsolatedRetries()
        self._prompts = PromptPreparer(codec=codec, renderer=renderer or NoRenderer(), prefixes=prefixes)
        self._namespaces = OtherNamespaces(config, lambda: [one.model.namespace for one in self.versions])
        self._moves = PromptMoves(partial(self.members.ready, Role.PREFILL), lambda: self.holds.full_nodes)
        traces, limits = config.traces, config.limits
        self._exporter = TraceExporter(traces.endpoint) if traces.endpoint is not None else None
        services = Services(
            prompts=self._prompts,
            placement=self._placement,
            holds=self.holds,
            isolated_retries=self._isolated_retries,
            quarantine=Quarantine(),
            mark_lost=self.membership.mark_lost,
            metrics=self.metrics,
            namespaces=self._namespaces,
            demand=DemandMeter(limits, self.members),
            shares=shares,
            moves=self._moves,
            forecast=Forecast(math.inf if limits.ttft_ms is None else limits.ttft_ms / 1000),
            traces=None if self._exporter is None else Traces(traces.ratio, model.name, self._exporter),
        )
        self.dispatcher = Dispatcher(services, self.versions, Admission(config.settings), config.settings)
        self.administration = StoreAdministration(
            self.versions, self.members, self.dispatcher, self.keys, self._namespaces
        )
        self.statuses = StatusReader(self.members, self.dispatcher, self.check)
        self.watch = StatusWatch(self.statuses, asyncio.get_running_loop().time)
        self.metrics.registry.register(WorkerCollector(lambda: self.watch.last, config.limits))
        self.metrics_page = self.metrics.registry
        if config.settings.metrics_compat == "vllm":
            self.metrics_page = CollectorRegistry()
            self.metrics_page.register(VllmNames(self.metrics.registry, model.name))

    def start(self) -> None:
        self.holds.start()
        self.watch.start()
        self._feed.start()
        if self._exporter is not None:
            self._exporter.start()

    async def stop(self) -> None:
        """Ends open requests with Unavailable."""
        self.dispatcher.stop()
        await self._feed.stop()
        await self.watch.stop()
        await self.holds.stop()
        await self.membership.close()
        await self._prompts.close()
        self._namespaces.close()
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.stop)

    def check(self) -> list[str]:
        """Lists violated invariants of the router; most can be checked only while no request is open."""
        problems = [*self.dispatcher.check(), *self.membership.check()]
        if not self.dispatcher.num_running + self.dispatcher.num_queued:
            problems += [
                *self.shares.check(),
                *self.holds.check(),
                *self._moves.check(),
                *self._isolated_retries.check(),
                *self.members.check(),
            ]
        return [f"router: {problem}" for problem in problems]

    def _members_changed(self) -> None:
        self.holds.resize()
        self._placement.wake()
        self._moves.fill()
