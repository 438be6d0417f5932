"""What an operator sees of a cluster: gates in timelines, metrics over HTTP, a log line for each request."""

import asyncio
import logging
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from engine.model.batch import Batch
from engine.model.hash_model import HashModel
from kernels.backend import KVPages
from router.ports.server import MetricsServer
from tests.harness.cluster import until
from tests.harness.local_cluster import LocalCluster, Sizes
from tests.local_cluster.test_local_cluster import LAYOUT, PROMPT, ask
from wire.errors import InvalidRequest
from wire.journal import GATES
from wire.pb import inference_pb2 as pb
from worker.config import BatchSettings

STEP_S = 0.003


class SlowModel(HashModel):
    """Steps take long enough for others to wait for."""

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        time.sleep(STEP_S)
        return super().forward(batch, kv)


MODEL = SlowModel(LAYOUT, vocab_size=300)
ONE_AT_A_TIME = BatchSettings(max_running=1)
SMALL_STEPS = BatchSettings(max_step_tokens=40, max_running=8, max_chunk_tokens=32)


def assert_tiles(timeline: pb.Timeline) -> None:
    """Spans follow one another: no gap, no overlap, from the arrival to the end."""
    reached_ms = 0.0
    for span in timeline.spans:
        assert span.start_ms == pytest.approx(reached_ms, abs=1e-6), span.name
        reached_ms = span.start_ms + span.duration_ms
    assert reached_ms == pytest.approx(timeline.total_ms, abs=1e-6)


def waited_ms(timeline: pb.Timeline) -> dict[str, float]:
    return {span.name: span.duration_ms for span in timeline.spans if span.name in GATES}


async def timelines(cluster: LocalCluster, num_requests: int = 6) -> list[pb.Timeline]:
    """Of requests that come at the same time."""
    prompts = [(number, *PROMPT) for number in range(num_requests)]
    outputs = await asyncio.gather(*(cluster.generate(ask(prompt, 20)) for prompt in prompts))
    return [output.complete.timeline for output in outputs]


@pytest.mark.parametrize(
    ("gate", "num_prefill", "sizes"),
    [
        ("router.wait_room", 1, Sizes(num_slots=10)),
        ("prefill.wait_slot", 1, Sizes(batch=ONE_AT_A_TIME)),
        ("prefill.wait_pages", 1, Sizes(num_blocks=9)),
        ("prefill.wait_turn", 1, Sizes(batch=SMALL_STEPS)),
        ("decode.wait_slot", 0, Sizes(batch=ONE_AT_A_TIME)),
        ("decode.wait_pages", 0, Sizes(num_blocks=9)),
        ("decode.wait_turn", 0, Sizes(batch=SMALL_STEPS)),
    ],
)
async def test_a_timeline_names_the_gate_at_which_its_request_waited(gate: str, num_prefill: int, sizes: Sizes) -> None:
    async with LocalCluster.running(MODEL, num_prefill, 1, sizes) as cluster:
        seen = await timelines(cluster)
    for timeline in seen:
        assert_tiles(timeline)
    longest = max(waited_ms(timeline)[gate] for timeline in seen if gate in waited_ms(timeline))
    assert longest > STEP_S * 1000


async def test_waiting_for_a_decode_worker() -> None:
    async with LocalCluster.running(MODEL, 1, 0) as cluster:
        request = asyncio.create_task(cluster.generate(ask()))
        await until(lambda: cluster.router.dispatcher.num_running)  # from its first token on it waits
        await asyncio.sleep(0.05)
        await cluster.enlist("p0", "d0")
        timeline = (await request).complete.timeline
    assert_tiles(timeline)
    assert waited_ms(timeline)["router.wait_decode"] > 10


@asynccontextmanager
async def scraped(cluster: LocalCluster) -> AsyncIterator[str]:
    """The address at which a cluster's metrics are served."""
    server = MetricsServer(cluster.router.metrics.registry, cluster.router.keys)
    try:
        yield await server.start("127.0.0.1", 0)
    finally:
        await server.stop()


async def scrape(address: str) -> dict[tuple[str, ...], float]:
    """Values by name and labels' values, in the order of the labels' names."""

    def read() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            return str(response.read().decode())

    families = text_string_to_metric_families(await asyncio.to_thread(read))
    return {(one.name, *map(str, one.labels.values())): one.value for family in families for one in family.samples}


async def test_one_scrape_tells_of_the_whole_cluster() -> None:
    async with LocalCluster.running(MODEL, 1, 2) as cluster, scraped(cluster) as address:
        for _ in range(2):
            await cluster.generate(ask(max_tokens=10))
        await cluster.router.watch.read()
        values = await scrape(address)
        await cluster.enlist("p0", "d0")
        await cluster.router.watch.read()
        later = await scrape(address)
    assert values["baton_requests_total", "OK"] == 2
    assert values[("baton_time_to_first_token_seconds_count",)] == 2
    assert values[("baton_inter_token_latency_seconds_count",)] == 18
    assert values[("baton_generation_tokens_total",)] == 20
    assert values["baton_prefix_cache_queries_total", "device"] == 2 * len(PROMPT)
    assert values["baton_prefix_cache_hits_total", "device"] == len(PROMPT) // 16 * 16
    assert values["baton_num_requests_running", "router", "router"] == 0
    assert values["baton_worker_computed_prompt_tokens_total", "prefill", "p0"] == len(PROMPT) + len(PROMPT) % 16
    assert values["baton_worker_computed_prompt_tokens_total", "decode", "d0"] == 0
    assert values["baton_kv_blocks", "", "prefill", "cached", "device", "p0"] == len(PROMPT) // 16
    assert values["baton_kv_blocks", "", "node", "free", "host", "node"] > 0
    assert values["baton_worker_up", "decode", "d1"] == 1
    assert {name for name in later if "d1" in name} == set()


async def test_a_worker_that_hangs_does_not_hold_up_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.operate.status.ASK_TIMEOUT_S", 0.05)
    async with LocalCluster.running(MODEL, 1, 1) as cluster, scraped(cluster) as address:

        async def never(*_: object) -> None:
            await asyncio.get_running_loop().create_future()

        monkeypatch.setattr(cluster.workers["d0"].service, "status", never)
        await cluster.router.watch.read()
        values = await scrape(address)
    assert values["baton_worker_up", "prefill", "p0"] == 1
    assert values["baton_worker_up", "decode", "d0"] == 0


async def test_each_request_leaves_one_line_without_a_word_of_its_client(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "router.requests.dispatch")
    async with LocalCluster.running(MODEL, 1, 1) as cluster:
        secret = pb.GenerateRequest(text="my secret", sampling_params=pb.SamplingParams(max_tokens=3, stop=["hush"]))
        secret.request_id = "r-1"
        await cluster.generate(secret)
        too_long = ask(tuple(range(200)) * 200)
        too_long.request_id = "r-2"
        with pytest.raises(InvalidRequest):
            await cluster.generate(too_long)
    lines = [record for record in caplog.records if record.getMessage() == "request ended"]
    (line,) = lines[:1]
    told = vars(line)
    assert told["request_id"] == "r-1"
    assert (told["outcome"], told["prompt_tokens"], told["output_tokens"]) == ("OK", len("my secret"), 3)
    assert (told["prefill_worker"], told["decode_worker"], told["attempts"]) == ("p0", "d0", 1)
    assert 0 < told["ttft_ms"] <= told["total_ms"]
    assert "secret" not in caplog.text + str(told)
    assert "hush" not in caplog.text + str(told)
