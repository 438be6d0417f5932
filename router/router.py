"""A router without its servers: the parts that serve requests, put together."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from router.config import RouterConfig
from router.observe.cluster_status import StatusReader
from router.observe.metrics import RequestMetrics
from router.observe.status_watch import StatusWatch
from router.observe.worker_metrics import WorkerCollector
from router.placement.prefix_map import PrefixMap
from router.placement.worker_pool import WorkerPool
from router.requests.admission import Admission
from router.requests.dispatch import Dispatcher
from router.requests.quarantine import Quarantine
from router.requests.steps import Services
from router.requests.trials import Trials
from router.requests.validator import Limits
from router.workers.controller_port import ControllerPort
from router.workers.hold_keeper import HoldKeeper
from router.workers.members import Members
from router.workers.membership import Membership
from router.workers.worker_client import WorkerClient
from text.codec import TextCodec
from wire.keys import namespace_root

TENANT = "default"
NO_ADAPTER = ""
NUM_TOKENIZER_THREADS = 2


class Router:
    """Between `start` and `stop`, `dispatcher` takes requests and `membership` workers. Made within an event loop.

    `connect` makes a client for a worker's address.
    """

    def __init__(
        self, config: RouterConfig, codec: TextCodec, connect: Callable[[str], WorkerClient], port: ControllerPort
    ) -> None:
        model, layout = config.model, config.model.layout
        self.config = config
        self.port = port
        self.metrics = RequestMetrics()
        self._members = Members(model.fingerprint, layout.encode())
        self._block_size = layout.block_size
        self._holds = HoldKeeper(self._members)
        self._pool = WorkerPool(
            self._members, PrefixMap(config.max_prefix_keys), layout.block_size, config.streams.max_worker_wait_s
        )
        self._threads = ThreadPoolExecutor(NUM_TOKENIZER_THREADS, thread_name_prefix="tokenize")
        self.membership = Membership(self._members, connect, port, self._members_changed)
        root = namespace_root(config.cluster.secret, TENANT, model.fingerprint, layout.encode(), NO_ADAPTER)
        services = Services(
            root,
            codec,
            self._threads,
            self._pool,
            self._holds,
            Trials(),
            Quarantine(),
            self.membership.suspect,
            self.metrics,
        )
        self.dispatcher = Dispatcher(services, Admission(config.admission), config.streams, self._limits)
        self.statuses = StatusReader(self._members, self.dispatcher, self._holds)
        self.watch = StatusWatch(self.statuses, time.monotonic)
        self.metrics.registry.register(WorkerCollector(lambda: self.watch.last))

    def start(self) -> None:
        self._holds.start()
        self.watch.start()

    async def stop(self) -> None:
        """Ends what is under way; clients of open requests are told that the service is unavailable."""
        self.dispatcher.stop()
        await self.watch.stop()
        await self._holds.stop()
        await self.membership.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _members_changed(self) -> None:
        self._holds.resize()
        self._pool.wake()

    def _limits(self) -> Limits:
        """What fits now: without workers, whatever the model can take."""
        model = self.config.model
        num_blocks = self._members.num_pool_blocks
        if num_blocks is None:
            num_blocks = -(-model.max_context_len // self._block_size)
        return Limits(model.name, model.vocab_size, model.max_context_len, num_blocks, self._block_size)
