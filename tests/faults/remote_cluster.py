"""A whole cluster in this process whose router speaks to its workers over gRPC, on a line with faults to order."""

from contextlib import AsyncExitStack

from engine.model.batch import CausalModel
from router.workers.grpc_transport import GrpcTransport
from tests.faults.toxic_proxy import Line, toxic_proxy
from tests.harness.assembled_worker import TOKEN
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.local_cluster import Sizes
from worker.assembly import Assembly
from worker.config import ServerSettings
from worker.server import WorkerServer


class RemoteCluster(FaultyCluster):
    """`line` is that between the router and all workers, who do not die; `addresses` are their own, without it."""

    def __init__(self, model: CausalModel, sizes: Sizes) -> None:
        super().__init__(model, sizes)
        self.line = Line()
        self.addresses: dict[str, str] = {}
        self._proxied: dict[str, str] = {}
        self._servers = AsyncExitStack()

    async def stop(self) -> None:
        await super().stop()
        await self._servers.aclose()

    async def _start_worker(self, name: str) -> Assembly:
        worker = await super()._start_worker(name)
        server = WorkerServer(worker.service, ServerSettings(TOKEN))
        self.addresses[name] = await server.start()
        self._servers.push_async_callback(server.stop)
        self._proxied[name] = await self._servers.enter_async_context(toxic_proxy(self.addresses[name], self.line))
        return worker

    def _connect(self, address: str) -> GrpcTransport:
        return GrpcTransport(self._proxied[address], TOKEN)
