"""A whole cluster in this process behind its real ports: HTTP, gRPC, and the directory's socket; no Ray."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import torch

from engine.model.decoder import Decoder
from gateway.actor import GatewayActor
from gateway.config import GatewayConfig
from kernels.selection import select_backend
from kv_store.node.directory_client import DirectoryClient
from kv_store.node.directory_server import DirectoryServer
from router.ports.server import RouterServer
from router.router import Router
from router.workers.grpc_transport import GrpcTransport
from tests.harness.assembled_worker import TOKEN
from tests.harness.local_cluster import LocalCluster, Parts, Sizes
from text.template.template_processes import Template, TemplateProcesses
from text.tokenizer import Tokenizer
from wire.typed_reader import to_json
from worker.assembly import Assembly, Tiers
from worker.config import ServerSettings
from worker.server import WorkerServer


class WiredCluster(LocalCluster):
    """Each worker has a gRPC server and a connection to the directory; tokenizer, template and model are a folder's."""

    def __init__(self, model_folder: Path, run_folder: Path) -> None:
        cpu = torch.device("cpu")
        super().__init__(Decoder.load(model_folder, None, cpu, 16, select_backend(cpu)), Sizes())
        template = Template.load(model_folder)
        assert template is not None
        codec = Tokenizer.load(model_folder)
        self.router = Router(self.router.config, codec, self._connect, self.port, TemplateProcesses(template))
        self._socket = str(run_folder / "directory")
        self._directory_server = DirectoryServer(self.directory, self._socket)
        self._addresses: dict[str, str] = {}
        self._servers = AsyncExitStack()

    async def serve(self) -> str:
        """Starts a router, a prefill worker, a decode worker and a gateway; returns the address for HTTP."""
        await asyncio.to_thread(self._directory_server.start)
        server = RouterServer(self.router)
        addresses = await server.start()
        await self.resize(1, 1)
        self._servers.push_async_callback(server.stop)
        gateway = GatewayActor(to_json(GatewayConfig(address=addresses.public, operator_address=addresses.operator)))
        address: str = json.loads(await gateway.start())["http"]
        self._servers.push_async_callback(gateway.stop)
        return address

    async def stop(self) -> None:
        await self._servers.aclose()
        await super().stop()
        await asyncio.to_thread(self._directory_server.stop)

    def _parts(self, name: str) -> Parts:
        return Parts(self._model, Tiers(self.arena, DirectoryClient(self._socket), [self.cold]))

    async def _start_worker(self, name: str) -> Assembly:
        worker = await super()._start_worker(name)
        server = WorkerServer(worker.service, ServerSettings(TOKEN))
        self._addresses[name] = await server.start()
        self._servers.push_async_callback(server.stop)
        return worker

    def _connect(self, address: str) -> GrpcTransport:
        return GrpcTransport(self._addresses[address], TOKEN)
