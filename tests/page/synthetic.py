"""An operator's service without a cluster: workers and requests whose figures change, for the page."""

import random
import time
from collections import deque
from typing import Any

from gateway.observe.watch import OperatorClient
from wire.errors import PermissionDenied
from wire.pb import cluster_pb2, worker_pb2
from wire.pb import inference_pb2 as pb
from wire.trust.key_ring import bearer, page_key

KEY = page_key("synthetic")
BLOCK_BYTES = 1 << 20
NUM_PAGES = 2048


class SyntheticOperator(OperatorClient):
    """`num_workers` on nodes of 8, and `requests_per_s` that end. name: of the model, a tenant and an error.

    Messages are made before they are asked for, so that a call costs what it costs over gRPC: their bytes are parsed.
    """

    def __init__(self, num_workers: int, requests_per_s: float, name: str = "synthetic") -> None:
        super().__init__("127.0.0.1:1")
        self._draw = random.Random(1)
        self._name = name
        self._requests_per_s = requests_per_s
        self._began_s = time.monotonic()
        self._ended: deque[cluster_pb2.EndedRequest] = deque(maxlen=1000)
        self._num_ended = 0
        self._statuses = [self._status(num_workers, step).SerializeToString() for step in range(16)]
        self._num_asked = 0
        self._shapes = [self._request(shape) for shape in range(64)]

    async def _call(self, method: str, request: Any) -> Any:
        if bearer([value for _, value in self._metadata]) != KEY:
            raise PermissionDenied("not this key")
        return self._last_status() if method == "GetStatus" else self._list(request)

    def _last_status(self) -> cluster_pb2.ClusterStatus:
        self._num_asked += 1
        return cluster_pb2.ClusterStatus.FromString(self._statuses[self._num_asked % len(self._statuses)])

    def _list(self, asked: cluster_pb2.ListRequestsRequest) -> cluster_pb2.ListRequestsResponse:
        num_ended = int((time.monotonic() - self._began_s) * self._requests_per_s) + 60
        while self._num_ended < num_ended:
            self._num_ended += 1
            ended = cluster_pb2.EndedRequest.FromString(self._shapes[self._num_ended % len(self._shapes)])
            ended.number, ended.ended_s = self._num_ended, time.time()
            ended.request_id = f"acme/r-{self._num_ended}"
            self._ended.append(ended)
        listed = [one for one in self._ended if one.number > asked.after and asked.request_id in ("", one.request_id)]
        return cluster_pb2.ListRequestsResponse(requests=listed[-(asked.limit or 200) :])

    def _status(self, num_workers: int, step: int) -> cluster_pb2.ClusterStatus:
        workers = [self._worker(index, num_workers, step) for index in range(num_workers)]
        far = worker_pb2.TierStatus(tier="redis", state="up", counts=self._far(step))
        pools = [
            cluster_pb2.PoolStatus(role=role, size=num_workers // 2, num_ready=num_workers // 2)
            for role in ("prefill", "decode")
        ]
        return cluster_pb2.ClusterStatus(
            model=self._name,
            workers=workers,
            pools=pools,
            num_running=40 + self._draw.randrange(9),
            num_queued=self._draw.randrange(9),
            tiers=[workers[0].tiers[0], far],
            prefix_cache=cluster_pb2.PrefixCache(queries=9000, hits=[pb.TierTokens(tier="host", tokens=4000 + step)]),
            events=[cluster_pb2.ClusterEvent(age_s=60.0, text=f"{self._name} was replaced")],
        )

    def _far(self, step: int) -> dict[str, int]:
        none = dict.fromkeys(("errors", "corrupt", "forged", "refused", "write_errors"), 0)
        return {"hits": 700 + step, "misses": 300, "written": 5000 + 9 * step} | none

    def _worker(self, index: int, num_workers: int, step: int) -> worker_pb2.WorkerStatus:
        role = "prefill" if index < num_workers // 2 else "decode"
        blocks = self._blocks()
        arena = worker_pb2.TierStatus(tier="host", epoch="e", blocks=self._blocks(), block_bytes=BLOCK_BYTES)
        arena.counts.update(holds=self._draw.randrange(6), leases=self._draw.randrange(3))
        return worker_pb2.WorkerStatus(
            worker_id=f"{role}-{index % (num_workers // 2)}",
            role=role,
            state="ready",
            node_id=f"node-{index // 8}",
            blocks=blocks,
            computed_prompt_tokens=1000 * step,
            cached_prompt_tokens=700 * step,
            generated_tokens=300 * step,
            num_running=self._draw.randrange(20),
            num_waiting=self._draw.randrange(4),
            memory_bytes=3 << 30,
            tiers=[arena],
        )

    def _blocks(self) -> worker_pb2.BlockCounts:
        owned, published, cached = (self._draw.randrange(500) for _ in range(3))
        free = NUM_PAGES - owned - published - cached
        return worker_pb2.BlockCounts(owned=owned, published=published, cached=cached, free=free, total=NUM_PAGES)

    def _request(self, shape: int) -> bytes:
        at_ms, timeline = 0.0, pb.Timeline(prefill_worker=f"prefill-{shape % 4}", decode_worker=f"decode-{shape % 5}")
        for name, worker, counts in (
            ("router.check", "router", {}),
            ("router.tokenize", "router", {}),
            ("router.wait_room", "router", {}),
            ("prefill.queue", timeline.prefill_worker, {}),
            ("prefill.fetch", timeline.prefill_worker, {"blocks_redis": 3}),
            ("prefill.compute", timeline.prefill_worker, {"tokens_computed": 700}),
            ("prefill.publish", timeline.prefill_worker, {}),
            ("network", "router", {}),
            ("decode.wait_pages", timeline.decode_worker, {}),
            ("decode.fetch", timeline.decode_worker, {"blocks_host": 44}),
            ("decode.generate", timeline.decode_worker, {"tokens": 60}),
        ):
            took_ms = self._draw.expovariate(1 / (900 if name == "decode.generate" else 60))
            timeline.spans.add(name=name, worker=worker, start_ms=at_ms, duration_ms=took_ms, counts=counts)
            at_ms += took_ms
        timeline.total_ms = at_ms
        is_lost = shape % 16 == 3
        return cluster_pb2.EndedRequest(
            tenant=self._name if shape % 16 == 5 else "acme",
            outcome="UNAVAILABLE" if is_lost else "OK",
            reason="UNAVAILABLE" if is_lost else "",
            message=self._name if is_lost else "",
            prompt_tokens=700,
            output_tokens=60,
            attempts=1,
            ttft_ms=at_ms / 3,
            timeline=timeline,
            causes=[f"{at_ms / 2:.0f} ms: generated 60 tokens at {timeline.decode_worker}"],
        ).SerializeToString()
