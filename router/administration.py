"""What the cluster's tiers hold, by tenant and model, and its withdrawal, for the operator.

    CacheRequest ─▶ BlockSelection ─ drop_pages ─▶ each worker
                                   ─ count, clear ─▶ a worker of each node ─▶ its arena, Redis, files

Only the router can tell whose a namespace is: stores know digests of roots, which nobody can make without the secret.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from router.config import RouterConfig
from router.requests.dispatch import Dispatcher
from router.requests.tokenizing import PUBLIC
from router.workers.line import Line
from router.workers.members import Members
from wire.errors import BatonError, InvalidRequest, ModelNotFound, Unavailable
from wire.ids import DEFAULT_TENANT, TENANT, BlockKey
from wire.names import digest_of
from wire.pb import cluster_pb2, worker_pb2
from wire.pb import inference_pb2 as pb
from wire.trust.key_ring import KeyRing

DROP_TIMEOUT_S = 40.0
"""More than a worker waits for a step of its engine."""
LOOK_TIMEOUT_S = 120.0
"""Of one node: it lists Redis and files a page at a time."""
Look = Callable[[Line, worker_pb2.BlockSelection, float], Awaitable[worker_pb2.Holdings]]


@dataclass(frozen=True)
class Namespace:
    """The owner of blocks, as an operator knows it."""

    tenant: str = ""
    model: str = ""


class Namespaces:
    """The namespaces that this cluster can name: of its model, for each tenant that a key was made for."""

    def __init__(self, config: RouterConfig, keys: KeyRing) -> None:
        self._config = config
        self._keys = keys

    def matching(self, tenant: str | None, model: str | None) -> dict[bytes, Namespace]:
        """Returns the digests of a tenant's and a model's namespaces; None is any.

        Raises InvalidRequest or ModelNotFound.
        """
        name = self._config.model.name
        if tenant is not None and not (TENANT.fullmatch(tenant) or tenant == PUBLIC):
            raise InvalidRequest("tenant", "not the name of a tenant")
        if model not in (None, name):
            raise ModelNotFound(f"no blocks are known to be of that model: known is {name}")
        tenants = {DEFAULT_TENANT, PUBLIC, *self._keys.tenants} if tenant is None else {tenant}
        return {digest_of(self._config.root_of(one)): Namespace(one, name) for one in sorted(tenants)}


class StoreAdministration:
    """Counts and clears what tiers hold. A node or tier that does not answer is a problem of the answer, no error."""

    def __init__(self, members: Members, dispatcher: Dispatcher, namespaces: Namespaces, keys: KeyRing) -> None:
        self._members = members
        self._dispatcher = dispatcher
        self._namespaces = namespaces
        self._keys = keys

    async def count(self, request: cluster_pb2.CacheRequest) -> cluster_pb2.CacheContents:
        """Counts blocks. Raises InvalidRequest or ModelNotFound, and Unavailable without workers."""
        selection = await self._select(request)
        return self._contents(selection, await self._of_nodes(Line.count, selection))

    async def clear(self, request: cluster_pb2.CacheRequest) -> cluster_pb2.CacheContents:
        """Clears blocks, devices first: what is in no device and no arena reaches no cold tier. Raises as `count`."""
        if not (request.everything or request.HasField("tenant") or request.HasField("model") or _has_prompt(request)):
            raise InvalidRequest("everything", "wanted where no tenant, model or prompt is given")
        selection = await self._select(request)
        dropped = await asyncio.gather(*(self._drop(member.line, selection) for member in self._members))
        contents = self._contents(selection, await self._of_nodes(Line.clear, selection))
        contents.dropped_pages = sum(one.blocks for told in dropped for one in told.holdings)
        contents.problems.extend(problem for told in dropped for problem in told.problems)
        return contents

    async def places(self, keys: tuple[BlockKey, ...]) -> dict[tuple[str, str], list[int]]:
        """Finds which of some blocks each node's tiers hold, by node and tier. Raises Unavailable without workers."""
        told = await self._of_nodes(Line.count, worker_pb2.BlockSelection(keys=keys))
        found = ((node_id, one) for node_id, answer in told.items() for one in answer.holdings)
        return {(node_id, one.tier): sorted(one.places) for node_id, one in found}

    async def _select(self, request: cluster_pb2.CacheRequest) -> worker_pb2.BlockSelection:
        tenant = request.tenant if request.HasField("tenant") else None
        model = request.model if request.HasField("model") else None
        if request.everything and (tenant, model, _has_prompt(request)) != (None, None, False):
            raise InvalidRequest("everything", "goes without tenant, model and prompt")
        namespaces = self._namespaces.matching(tenant, model)
        if _has_prompt(request):
            has_text = request.HasField("text")
            given = pb.GenerateRequest(**({"text": request.text} if has_text else {"token_ids": request.token_ids}))
            prompt = await self._dispatcher.name_blocks(given, DEFAULT_TENANT if tenant is None else tenant)
            return worker_pb2.BlockSelection(keys=prompt.keys)
        return worker_pb2.BlockSelection(namespaces=[] if (tenant, model) == (None, None) else namespaces)

    async def _drop(self, line: Line, selection: worker_pb2.BlockSelection) -> worker_pb2.Holdings:
        try:
            return await line.drop_pages(worker_pb2.BlockSelection(keys=selection.keys), DROP_TIMEOUT_S)
        except BatonError as error:
            return worker_pb2.Holdings(problems=[f"a worker: {error.message}"])

    async def _of_nodes(self, look: Look, selection: worker_pb2.BlockSelection) -> dict[str, worker_pb2.Holdings]:
        """Asks a worker of each node, one node after another: what nodes share is then cleared, and counted, once."""
        node_ids = sorted({member.info.node_id for member in self._members})
        if not node_ids:
            raise Unavailable("no worker is there that could ask the tiers")
        return {node_id: await self._of_node(node_id, look, selection) for node_id in node_ids}

    async def _of_node(self, node_id: str, look: Look, selection: worker_pb2.BlockSelection) -> worker_pb2.Holdings:
        """Asks the workers of a node until one answers."""
        problem = "its workers are gone"
        for member in self._members:
            if member.info.node_id == node_id:
                try:
                    return await look(member.line, selection, LOOK_TIMEOUT_S)
                except BatonError as error:
                    problem = error.message
        return worker_pb2.Holdings(problems=[problem])

    def _contents(
        self, selection: worker_pb2.BlockSelection, told: dict[str, worker_pb2.Holdings]
    ) -> cluster_pb2.CacheContents:
        problems = [f"{node_id or 'the node'}: {one}" for node_id, answer in told.items() for one in answer.problems]
        return cluster_pb2.CacheContents(rows=self._rows(told), prompt_blocks=len(selection.keys), problems=problems)

    def _rows(self, told: dict[str, worker_pb2.Holdings]) -> Iterator[cluster_pb2.CacheRow]:
        known = self._namespaces.matching(None, None)
        for node_id, answer in told.items():
            for one in answer.holdings:
                owner = known.get(one.namespace, Namespace())
                yield cluster_pb2.CacheRow(
                    tier=one.tier,
                    node_id=node_id,
                    tenant=owner.tenant,
                    model=owner.model,
                    blocks=one.blocks,
                    bytes=one.bytes,
                    newest_s=one.newest_s,
                    oldest_s=one.oldest_s,
                    share=self._keys.shares.get(owner.tenant),
                )


def _has_prompt(request: cluster_pb2.CacheRequest) -> bool:
    return request.WhichOneof("prompt") is not None
