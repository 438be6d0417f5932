"""HTTP of a real cluster, with the demo model: curl's requests, and the death of gateways."""

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.baton_service import num_in_use
from tests.cluster.served_cluster import ServedCluster, wait_until
from tests.harness.fork_server import ForkServer

pytestmark = pytest.mark.cluster
QUESTION = "Rooms: Ben 19, Anna 48, Clara 77, David 12, Emma 55. Question: which room has Clara?"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, forks: ForkServer) -> Iterator[ServedCluster]:
    """The demo model, for the first two tests; each leaves it as it was."""
    served = ServedCluster(f"h{os.getpid()}", tmp_path_factory.mktemp("http"), forks=forks)
    served.do("up", "--prefill", "1", "--decode", "1", "--grpc-port", "0", "--redis-url", "off")
    try:
        yield served
    finally:
        served.run("down")
    assert served.left_behind() == []


def test_curl_is_answered_and_a_gateway_that_dies_comes_back(cluster: ServedCluster) -> None:
    address = cluster.status()["http_address"]
    chat = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    answer = curl(address, "/v1/chat/completions", chat)
    assert json.loads(answer)["choices"][0]["message"]["content"].strip() == "77."
    stream = curl(address, "/v1/completions", {"prompt": QUESTION, "temperature": 0, "stream": True})
    *events, done = stream.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    assert "".join(json.loads(one[6:])["choices"][0]["text"] for one in events).strip() == "77."
    tokens = json.loads(curl(address, "/tokenize", {"messages": chat["messages"]}))["tokens"]
    assert cluster.generate(tokens)["text"].strip() == "77."
    assert "baton_generation_tokens_total" in curl(address, "/metrics")

    cluster.actor("gateway-0").kill()
    wait_until(lambda: curl(address, "/ready", check=False) == "{}", "the gateway is back")
    assert json.loads(curl(address, "/v1/chat/completions", chat))["usage"]["prompt_tokens"]
    assert cluster.status()["http_address"] == address


def test_a_gateway_that_dies_under_load_takes_its_own_requests_and_no_others(cluster: ServedCluster) -> None:
    asked = (",".join(map(str, range(40, 90))), "--json", "--temperature", "0", "--max-tokens", "1500", "--ignore-eos")
    expected = json.loads(cluster.do("generate", "--token-ids", *asked))["token_ids"]
    orphan: dict[str, Any] = {"prompt": QUESTION, "max_tokens": 1900, "n": 16, "ignore_eos": True, "stream": True}
    address, before = cluster.status()["http_address"], num_generated(cluster)
    with ExitStack() as commands, ThreadPoolExecutor() as threads:
        orphans = [threads.submit(curl, address, "/v1/completions", orphan, check=False) for _ in range(3)]
        wait_until(lambda: cluster.status()["num_running"] == len(orphans), "the gateway's requests run")
        others = [commands.enter_context(cluster.started("generate", "--token-ids", *asked)) for _ in range(2)]
        wait_until(lambda: cluster.status()["num_running"] > len(orphans), "another runs, too")
        cluster.actor("gateway-0").kill()
        assert not [one for one in orphans if "[DONE]" in one.result()]
        wait_until(lambda: cluster.status()["num_running"] <= len(others), "the orphans are gone")
        num_whole = len(orphans) * orphan["n"] * orphan["max_tokens"]
        assert num_generated(cluster) - before < num_whole, "the orphans have ended by themselves"
        assert [json.loads(other.communicate(timeout=60)[0])["token_ids"] for other in others] == [expected] * 2
    wait_until(lambda: not num_in_use(cluster.status()), "all pages, leases and holds are given back")
    cluster.do("status", "--check")


def test_of_two_gateways_one_may_die_under_load(tmp_path: Path, forks: ForkServer) -> None:
    cluster = ServedCluster(f"m{os.getpid()}", tmp_path, forks=forks)
    cluster.do("up", "--prefill", "1", "--decode", "1", "--gateways", "2", "--grpc-port", "0", "--redis-url", "off")
    try:
        status = cluster.status()
        address = status["http_address"]
        pids = {one["id"]: one["pid"] for one in status["gateways"]}
        assert list(pids) == ["gateway-0", "gateway-1"]
        asked = (
            ",".join(map(str, range(40, 90))),
            "--json",
            "--temperature",
            "0",
            "--max-tokens",
            "1500",
            "--ignore-eos",
        )
        expected = json.loads(cluster.do("generate", "--token-ids", *asked))["token_ids"]
        # Several choices each: a command takes seconds to start where the machine is busy.
        long = {"prompt": QUESTION, "max_tokens": 1500, "n": 4, "ignore_eos": True, "stream": True}
        with ExitStack() as commands, ThreadPoolExecutor(10) as threads:
            streams = [threads.submit(curl, address, "/v1/completions", long, check=False) for _ in range(8)]
            other = commands.enter_context(cluster.started("generate", "--token-ids", *asked))
            wait_until(lambda: cluster.status()["num_running"] == len(streams) + 1, "all requests run")
            wait_until(
                lambda: sum(open_requests(curl(address, "/metrics")).values()) == len(streams) + 1,
                "a page of metrics tells of all streams, and of its own request",
            )
            num_orphans = num_clients(pids["gateway-1"], address)
            cluster.actor("gateway-1").kill()
            num_whole = sum("[DONE]" in stream.result() for stream in streams)
            assert json.loads(other.communicate(timeout=60)[0])["token_ids"] == expected
        assert num_whole == len(streams) - num_orphans
        assert "data: [DONE]" in curl(address, "/v1/completions", {**long, "max_tokens": 2})
        wait_until(lambda: all(one["is_alive"] for one in cluster.status()["gateways"]), "the gateway is replaced")
        status = cluster.status()
        assert (status["http_address"], status["gateways"][0]["pid"]) == (address, pids["gateway-0"])
        assert status["gateways"][1]["pid"] != pids["gateway-1"]
        wait_until(lambda: len(open_requests(curl(address, "/metrics"))) == 2, "both tell their metrics")
        wait_until(lambda: not num_in_use(cluster.status()), "all pages, leases and holds are given back")
        cluster.do("status", "--check")
    finally:
        cluster.run("down")
    assert cluster.left_behind() == []


def num_generated(cluster: ServedCluster) -> int:
    """Tokens that all workers have sampled."""
    workers = (worker for role in ("prefill", "decode") for worker in cluster.workers(role).values())
    return sum(worker["generated_tokens"] for worker in workers)


def num_clients(pid: int, address: str) -> int:
    """Connections of clients to a gateway."""
    port = int(address.rpartition(":")[2])
    connections = psutil.Process(pid).net_connections("tcp")
    return sum(one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED for one in connections)


def open_requests(page: str) -> dict[str, float]:
    """Requests under way by gateway."""
    lines = [line for line in page.splitlines() if line.startswith("baton_http_open_requests{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


def curl(address: str, path: str, body: Any = None, *, check: bool = True) -> str:
    data = ["-H", "Content-Type: application/json", "-d", json.dumps(body)] if body is not None else []
    command = ["curl", "--silent", "--show-error", "--max-time", "60", *data, f"http://{address}{path}"]
    return subprocess.run(command, capture_output=True, text=True, check=check).stdout
