"""One of two routers is killed again and again amid streams of four tenants: none of them is lost, or differs."""

import http.client
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton import Client
from benchmarks.baton_service import num_in_use
from deploy.processes.process import recorded
from engine.engine import ChoiceOutput, Engine
from tests.cluster.served_cluster import ALWAYS, ServedCluster, wait_until
from tests.harness.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.harness.fork_server import ForkServer
from wire.sampling import SamplingParams

TENANTS = ("acme", "beta", "globex", "initech")
NUM_STREAMS = int(os.environ.get("BATON_TEST_STREAMS", "8"))
NUM_TOKENS = int(os.environ.get("BATON_TEST_TOKENS", "3000"))
KILL_EVERY_S = float(os.environ.get("BATON_TEST_KILL_EVERY_S", "1.5"))
PROMPT_LEN = 100
TIMEOUT_S = float(os.environ.get("BATON_TEST_TIMEOUT_S", "280"))
MAX_STALL_S = 20.0
"""Bound on a silence within a stream on a busy machine: the time in which a router is back, twice."""
ROUTERS = ("router", "router-1")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(TIMEOUT_S + 20)]


@dataclass
class Asked:
    """A prompt of a tenant, the right answer, and what of it has come, with the longest silence before a part."""

    prompt_ids: tuple[int, ...]
    settings: dict[str, Any]
    expected: ChoiceOutput
    key: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    stall_s: float = 0.0
    last_s: float = 0.0

    def add(self, text: str) -> None:
        now_s = time.monotonic()
        self.stall_s = max(self.stall_s, now_s - self.last_s) if self.last_s else 0.0
        self.last_s = now_s
        self.text += text

    def over_grpc(self, addresses: str) -> None:
        with (
            Client(addresses, timeout_s=TIMEOUT_S, api_key=self.key) as client,
            client.stream(self.prompt_ids, **self.settings) as stream,
        ):
            for chunk in stream:
                self.add(chunk.text)
                self.token_ids += chunk.token_ids
            assert stream.completion.usage.completion_tokens == NUM_TOKENS
            assert stream.completion.usage.prompt_tokens == PROMPT_LEN

    def over_http(self, address: str) -> None:
        body = {"prompt": self.prompt_ids, "stream": True, "return_token_ids": True, **self.settings}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        for line in filter(bytes.strip, connection.getresponse()):
            data = line.removeprefix(b"data: ").strip()
            if data.startswith(b":"):
                continue
            if data == b"[DONE]":
                connection.close()
                return
            (choice,) = json.loads(data)["choices"]
            self.add(choice["text"])
            self.token_ids += choice.get("token_ids") or []
        raise AssertionError("the stream broke")


def ask(checkpoint: Path, keys: Sequence[str], num_streams: int = NUM_STREAMS) -> list[Asked]:
    """Prompts, greedy and seeded in turns, with what an engine in this process answers to them."""
    engine = Engine.load(str(checkpoint), num_blocks=num_streams * (PROMPT_LEN + NUM_TOKENS + 32) // 16)
    prompts = [
        tuple((number * 101 + place * 7) % VOCAB_SIZE for place in range(PROMPT_LEN)) for number in range(num_streams)
    ]
    asked = []
    for temperature, some in enumerate((prompts[::2], prompts[1::2])):
        settings: dict[str, Any] = {"temperature": temperature, "seed": 7, "ignore_eos": True, "max_tokens": NUM_TOKENS}
        right = engine.generate(some, SamplingParams(**settings))
        asked += [
            Asked(one.prompt_ids, settings, one.choices[0], key) for one, key in zip(right, cycle(keys), strict=False)
        ]
    return asked[::2] + asked[1::2]


def is_alive(cluster: ServedCluster, router: str) -> bool:
    process = recorded(Path(cluster.state()["run_dir"]), router)
    return process is not None and process.is_alive


def kill_until(cluster: ServedCluster, streams: Sequence[Future[None]]) -> int:
    """Kills one router after the other while streams run; returns how many."""
    for num_killed, (name, other) in enumerate(cycle((ROUTERS, ROUTERS[::-1]))):
        if not wait(streams, KILL_EVERY_S).not_done:
            return num_killed
        wait_until(partial(is_alive, cluster, other), "the other router is back")
        if (process := recorded(Path(cluster.state()["run_dir"]), name)) is not None and process.is_alive:
            psutil.Process(process.pid).kill()
    raise AssertionError


def test_no_stream_is_lost_or_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: ForkServer) -> None:
    monkeypatch.delenv("BATON_API_KEY", raising=False)
    checkpoint = make_checkpoint("llama-gqa", tmp_path / "model", max_position_embeddings=max(8192, 2 * NUM_TOKENS))
    cluster = ServedCluster(f"y{os.getpid()}", tmp_path, forks=forks)
    config = tmp_path / "config.toml"
    config.write_text("[router]\nrouters = 2\n")
    keys = [cluster.do("key create", "--tenant", tenant).strip() for tenant in TENANTS]
    asked = ask(checkpoint, keys)
    flags = ["--config", str(config), *ALWAYS, "--grpc-port", "0", "--redis-url", "off"]
    cluster.do("up", "--model", str(checkpoint), *flags)
    try:
        status = cluster.status()
        public = cluster.state()["addresses"]["public"]
        assert len(public.split(",")) == 2
        with ThreadPoolExecutor(NUM_STREAMS) as threads:
            half = NUM_STREAMS // 2
            streams = [threads.submit(one.over_grpc, public) for one in asked[:half]]
            streams += [threads.submit(one.over_http, status["http_address"]) for one in asked[half:]]
            num_killed = kill_until(cluster, streams)
            failures = [str(failure) for stream in streams if (failure := stream.exception()) is not None]
        assert failures == []
        assert [one.token_ids for one in asked] == [one.expected.token_ids for one in asked]
        assert [one.text for one in asked] == [one.expected.text for one in asked]
        assert num_killed >= 2, "the streams were too short"
        stalls = sorted(one.stall_s for one in asked)
        told = f"longest silence of a stream: median {statistics.median(stalls):.2f} s, most {stalls[-1]:.2f} s"
        sys.stderr.write(f"{num_killed} routers killed, {NUM_STREAMS} streams, {told}\n")
        assert stalls[-1] < MAX_STALL_S
        wait_until(lambda: "does not answer" not in cluster.do("status"), "both routers are back")
        wait_until(lambda: not num_in_use(cluster.status()), "all pages, leases and holds are given back")
        wait_until(cluster.is_sound, "all invariants hold")
    finally:
        down = cluster.run("down")
    assert cluster.left_behind() == [], down
