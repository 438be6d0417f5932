"""The service `Cluster`, which the command line speaks to."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from router.router import Router
from router.workers.node_events import EventReader
from wire.errors import BatonError, Cancelled, InvalidRequest
from wire.ids import QualifiedId, WorkerId
from wire.load.limit import Limit
from wire.pb import cluster_pb2, worker_pb2
from wire.pb import inference_pb2 as pb
from wire.pb.cluster_pb2_grpc import ClusterServicer
from wire.pools import Addresses

Context = grpc.aio.ServicerContext[Any, Any]

MAX_SUBSCRIBERS = 8
"""Bound on subscribers to block events; each has a reader, which asks every node's directory up to 60 times a second.
"""
NOWHERE = worker_pb2.EventCursor()
MAX_CURSORS, MAX_EPOCH_CHARS = 1024, 64


class ClusterApi(ClusterServicer):
    """The operator's service. The server's interceptor turns errors into statuses."""

    def __init__(self, router: Router, addresses: Addresses) -> None:
        self._router = router
        self._addresses = addresses
        self._port = router.port
        self._subscribers = Limit(MAX_SUBSCRIBERS, "watches of block events are open")

    async def GetStatus(self, request: cluster_pb2.GetStatusRequest, context: Context) -> cluster_pb2.ClusterStatus:  # noqa: N802
        router = self._router
        status = await (router.watch.recent() if request.recent else router.statuses.read(request))
        status.model = self._router.config.model.name
        status.batch_invariant = self._router.config.model.batch_invariant
        status.address = self._addresses.public
        status.metrics_address = self._addresses.metrics
        status.prefix_cache.CopyFrom(self._router.metrics.prefix_cache)
        status.uncached_blocks.update(router.dispatcher.recent.uncached_blocks)
        await self._add_report(status)
        return status

    async def Scale(self, request: cluster_pb2.ScaleRequest, context: Context) -> cluster_pb2.ScaleResponse:  # noqa: N802
        pools = await self._port.scale(
            request.prefill if request.HasField("prefill") else None,
            request.decode if request.HasField("decode") else None,
        )
        return cluster_pb2.ScaleResponse(prefill=pools.prefill, decode=pools.decode)

    async def Drain(self, request: cluster_pb2.DrainRequest, context: Context) -> cluster_pb2.DrainResponse:  # noqa: N802
        await self._port.drain(WorkerId(request.worker_id))
        return cluster_pb2.DrainResponse()

    async def Roll(self, request: cluster_pb2.RollRequest, context: Context) -> cluster_pb2.RollResponse:  # noqa: N802
        return cluster_pb2.RollResponse(revision=await self._port.roll(request.revision))

    async def Probe(self, request: cluster_pb2.ProbeRequest, context: Context) -> cluster_pb2.ProbeResponse:  # noqa: N802
        sampling = pb.SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
        asked = pb.GenerateRequest(token_ids=request.prompt, sampling_params=sampling)
        opened = self._router.dispatcher.open_on(WorkerId(request.worker_id), asked, context.time_remaining())
        answer = cluster_pb2.ProbeResponse()
        try:
            async for response in opened.outbox:
                answer.token_ids.extend(response.chunk.token_ids)
                answer.timeline.MergeFrom(response.complete.timeline)
        finally:
            opened.stop(Cancelled("the caller went away"))
        return answer

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        await self._router.dispatcher.abort_any(QualifiedId(request.request_id))
        return pb.AbortResponse()

    async def ListRequests(  # noqa: N802
        self, request: cluster_pb2.ListRequestsRequest, context: Context
    ) -> cluster_pb2.ListRequestsResponse:
        return self._router.dispatcher.recent.list(request)

    async def GetUsage(  # noqa: N802
        self, request: cluster_pb2.GetUsageRequest, context: Context
    ) -> cluster_pb2.UsageReport:
        return cluster_pb2.UsageReport(usage=self._router.metrics.usage)

    async def ExplainMisses(  # noqa: N802
        self, request: cluster_pb2.ExplainMissesRequest, context: Context
    ) -> cluster_pb2.MissExplanation:
        return await self._router.administration.explain(request)

    async def Shutdown(self, request: cluster_pb2.ShutdownRequest, context: Context) -> cluster_pb2.ShutdownResponse:  # noqa: N802
        await self._port.shutdown()
        return cluster_pb2.ShutdownResponse()

    async def ReloadKeys(  # noqa: N802
        self, request: cluster_pb2.ReloadKeysRequest, context: Context
    ) -> cluster_pb2.ReloadKeysResponse:
        await self._port.reload_keys()
        return cluster_pb2.ReloadKeysResponse()

    async def WatchBlocks(  # noqa: N802
        self, request: cluster_pb2.WatchBlocksRequest, context: Context
    ) -> AsyncIterator[worker_pb2.EventPage]:
        cursors = dict(request.after)
        if len(cursors) > MAX_CURSORS or any(len(one.epoch) > MAX_EPOCH_CHARS for one in cursors.values()):
            raise InvalidRequest(
                "after", f"has over {MAX_CURSORS} nodes, or an epoch over {MAX_EPOCH_CHARS} characters"
            )
        members = self._router.members
        with self._subscribers.taken(), EventReader(members, lambda one: cursors.get(one, NOWHERE)) as reader:
            while True:
                one = await reader.next()
                if one.page is not None and one.page.cursor != one.page.after:
                    cursors[one.node_id] = one.page.cursor
                    yield one.page

    async def ListCache(self, request: cluster_pb2.CacheRequest, context: Context) -> cluster_pb2.CacheContents:  # noqa: N802
        return await self._router.administration.count(request)

    async def ClearCache(self, request: cluster_pb2.CacheRequest, context: Context) -> cluster_pb2.CacheContents:  # noqa: N802
        return await self._router.administration.clear(request)

    async def ComparePrompts(  # noqa: N802
        self, request: cluster_pb2.ComparePromptsRequest, context: Context
    ) -> cluster_pb2.PromptComparison:
        return await self._router.administration.compare(request)

    async def _add_report(self, status: cluster_pb2.ClusterStatus) -> None:
        """Adds the controller's report to a status; without a controller the cluster still serves, and has a status."""
        events = self._router.watch.events
        try:
            report = await self._port.report()
            events += report.events
            status.problems.extend(report.problems)
            sized = {pool.role.value: pool for pool in report.pools}
            for pool in (one for one in status.pools if one.role in sized):
                told = sized[pool.role]
                pool.limit, pool.last_order, pool.last_order_age_s = told.limit, told.last_order, told.age_s
        except BatonError as error:
            status.problems.append(error.message)
        for event in sorted(events, key=lambda event: -event.age_s):
            status.events.add(age_s=event.age_s, text=event.text)
