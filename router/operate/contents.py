"""The contents of the cluster's tiers by tenant and model, and their deletion, for the operator.

    CacheRequest ─▶ BlockSelection ─ drop_pages ─▶ each worker
                                   ─ count, clear ─▶ a worker of each node ─▶ its arena, Redis, files

Only the router can name the tenant of a namespace: stores know digests of roots, and roots need the secret.
"""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from router.other_namespaces import OtherName, OtherNamespaces, miss_in_other_namespace
from router.requests.dispatch import Dispatcher
from router.requests.versions import ModelVersions
from router.workers.members import Member, Members
from wire.block_names import digest_of
from wire.errors import BatonError, InvalidRequest, ModelNotFound, Unavailable
from wire.ids import DEFAULT_TENANT, PUBLIC, TENANT, BlockKey
from wire.pb import cluster_pb2, worker_pb2
from wire.pb import inference_pb2 as pb
from wire.trust.key_ring import KeyRing

TOKENS_AROUND = 8
"""Tokens shown before and after the place where two prompts differ."""
TIMEOUT_S = 120.0
"""Bound on a node's answer: it lists Redis and files page by page, and an engine may be in a long step."""


@dataclass(frozen=True)
class AskedBlocks:
    """The blocks of namespaces, or of a prompt, to count or to clear.

    keys: the keys of the prompt's blocks, a sequence for each version.
    """

    namespaces: Collection[bytes] = ()
    keys: Sequence[Sequence[BlockKey]] = ()

    @property
    def message(self) -> worker_pb2.BlockSelection:
        """The selection as workers take it."""
        return worker_pb2.BlockSelection(namespaces=self.namespaces, keys=[key for keys in self.keys for key in keys])

    @property
    def num_blocks(self) -> int:
        """The number of the prompt's blocks, which is the same in each version."""
        return len(self.keys[0]) if self.keys else 0


class StoreAdministration:
    """Counts and clears the blocks of tiers. Silent nodes and tiers become `problems` of the answer, not errors.

    Names only namespaces of the served versions of the model and of tenants with a key.
    """

    def __init__(
        self, versions: ModelVersions, members: Members, dispatcher: Dispatcher, keys: KeyRing, names: OtherNamespaces
    ) -> None:
        self._versions = versions
        self._names = names
        self._members = members
        self._dispatcher = dispatcher
        self._keys = keys

    async def count(self, request: cluster_pb2.CacheRequest) -> cluster_pb2.CacheContents:
        """Counts blocks. Raises InvalidRequest or ModelNotFound, and Unavailable without workers."""
        selection = await self._select(request)
        return self._contents(selection, await self._of_nodes(worker_pb2.Ask(count=selection.message)))

    async def clear(self, request: cluster_pb2.CacheRequest) -> cluster_pb2.CacheContents:
        """Clears blocks, devices first, since only devices and arenas feed cold tiers. Raises the errors of `count`."""
        if request == cluster_pb2.CacheRequest():
            raise InvalidRequest("everything", "wanted where no tenant, model or prompt is given")
        selection = await self._select(request)
        drop = worker_pb2.Ask(drop_pages=AskedBlocks(keys=selection.keys).message)
        dropped = await asyncio.gather(*(_ask(member, drop) for member in self._members))
        contents = self._contents(selection, await self._of_nodes(worker_pb2.Ask(clear=selection.message)))
        contents.dropped_pages = sum(one.blocks for told in dropped for one in told.holdings)
        contents.problems.extend(problem for told in dropped for problem in told.problems)
        return contents

    async def compare(self, request: cluster_pb2.ComparePromptsRequest) -> cluster_pb2.PromptComparison:
        """Compares two prompts by a tenant's block names. Raises the errors of `count`."""
        tenant, texts = request.tenant or DEFAULT_TENANT, (request.first, request.second)
        _require_tenants([tenant])
        first, second = [await self._dispatcher.name_blocks(pb.GenerateRequest(text=one), tenant) for one in texts]
        ids = first[0].prompt_ids, second[0].prompt_ids
        num_tokens, num_shared = _num_same(*ids), _num_same(first[0].keys, second[0].keys)
        around = slice(max(0, num_tokens - TOKENS_AROUND), num_tokens + TOKENS_AROUND)
        shown = [self._dispatcher.detokenize(pb.DetokenizeRequest(token_ids=one[around])).text for one in ids]
        selection = AskedBlocks(keys=[one.keys[:num_shared] for one in first])
        told = await self._of_nodes(worker_pb2.Ask(count=selection.message)) if num_shared else {}
        contents = self._contents(selection, told)
        return cluster_pb2.PromptComparison(
            first_tokens=len(ids[0]),
            second_tokens=len(ids[1]),
            shared_tokens=num_tokens,
            first_text=shown[0],
            second_text=shown[1],
            block_size=self._versions.wanted.model.layout.block_size,
            shared_blocks=num_shared,
            held=contents.rows,
            problems=contents.problems,
        )

    async def explain(self, request: cluster_pb2.ExplainMissesRequest) -> cluster_pb2.MissExplanation:
        """Explains the uncached blocks of an ended request; now looks for the first of them in other namespaces.

        Raises RequestNotFound.
        """
        recent = self._dispatcher.recent
        [ended] = recent.list(cluster_pb2.ListRequestsRequest(request_id=request.request_id, limit=1)).requests
        journal, problems = recent.find(ended.number), list[str]()
        if journal is not None and (others := await self._names.of(journal)):
            told = await self._holdings_of(others)
            miss = miss_in_other_namespace(others, (one for each in told for one in each.holdings))
            if miss is not None:
                ended.misses[0].cause, ended.misses[0].how = miss.cause, miss.how
            problems = [problem for each in told for problem in each.problems]
        return cluster_pb2.MissExplanation(request=ended, problems=problems)

    async def _holdings_of(self, others: Sequence[OtherName]) -> Sequence[worker_pb2.Holdings]:
        """Asks which tiers hold blocks now; a cluster without workers is a problem of the answer."""
        selection = worker_pb2.BlockSelection(keys=[one.key for one in others])
        try:
            return [*(await self._of_nodes(worker_pb2.Ask(count=selection))).values()]
        except Unavailable as error:
            return [worker_pb2.Holdings(problems=[error.message])]

    async def _select(self, request: cluster_pb2.CacheRequest) -> AskedBlocks:
        if request.everything and request != cluster_pb2.CacheRequest(everything=True):
            raise InvalidRequest("everything", "goes without tenant, model and prompt")
        tenants = [request.tenant] if request.HasField("tenant") else []
        _require_tenants(tenants)
        if request.HasField("model") and request.model != self._versions.wanted.model.name:
            raise ModelNotFound(f"no blocks are known to be of that model: known is {self._versions.wanted.model.name}")
        if (prompt := request.WhichOneof("prompt")) is not None:
            given = pb.GenerateRequest(**{prompt: getattr(request, prompt)})
            named = await self._dispatcher.name_blocks(given, request.tenant or DEFAULT_TENANT)
            return AskedBlocks(keys=[one.keys for one in named])
        is_any = not tenants and not request.HasField("model")
        return AskedBlocks(() if is_any else self._digests(tenants or self._tenants))

    @property
    def _tenants(self) -> list[str]:
        return sorted({DEFAULT_TENANT, PUBLIC, *self._keys.tenants})

    def _digests(self, tenants: list[str]) -> dict[bytes, str]:
        return {digest_of(version.root_of(one)): one for version in self._versions for one in tenants}

    async def _of_nodes(self, question: worker_pb2.Ask) -> dict[str, worker_pb2.Holdings]:
        """Asks a worker of each node in turn: a clear counts a shared tier's blocks once, a list once for each node."""
        by_node = {member.info.node_id: member for member in self._members}
        if not by_node:
            raise Unavailable("no worker is ready to ask the tiers: see `baton status`")
        return {node_id: await _ask(member, question) for node_id, member in by_node.items()}

    def _contents(self, selection: AskedBlocks, told: dict[str, worker_pb2.Holdings]) -> cluster_pb2.CacheContents:
        problems, num_blocks = [one for answer in told.values() for one in answer.problems], selection.num_blocks
        rows = self._rows(told, num_blocks)
        return cluster_pb2.CacheContents(rows=rows, prompt_blocks=num_blocks, problems=problems)

    def _rows(self, told: dict[str, worker_pb2.Holdings], num_blocks: int) -> Iterator[cluster_pb2.CacheRow]:
        """Yields a row for each namespace of a tier. num_blocks: the prompt's blocks, asked for in each version."""
        known = self._digests(self._tenants)
        for node_id, one in ((node_id, one) for node_id, answer in told.items() for one in answer.holdings):
            tenant = known.get(one.namespace, "")
            yield cluster_pb2.CacheRow(
                tier=one.tier,
                node_id=node_id,
                tenant=tenant,
                model=self._versions.wanted.model.name if tenant else "",
                blocks=one.blocks,
                bytes=one.bytes,
                newest_s=one.newest_s,
                oldest_s=one.oldest_s,
                share=self._keys.shares.get(tenant),
                places=[place % num_blocks for place in one.places],
            )


def _require_tenants(tenants: Sequence[str]) -> None:
    if not all(map(TENANT.fullmatch, tenants)):
        raise InvalidRequest("tenant", "not the name of a tenant")


def _num_same(first: Sequence[object], second: Sequence[object]) -> int:
    """Counts the equal first values of two sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


async def _ask(member: Member, question: worker_pb2.Ask) -> worker_pb2.Holdings:
    try:
        return await member.line.questions.holdings(question, TIMEOUT_S)
    except BatonError as error:
        return worker_pb2.Holdings(problems=[f"{member.id}: {error.message}"])
