"""A supervised head is killed under streams whose router and workers are on another node: none is lost or differs.

bash tests/head.sh runs it by itself: Ray 2.60 ends a node whose agent takes 15 s to start. BATON_TEST_STREAMS,
BATON_TEST_TOKENS and BATON_TEST_HEAD_KILLS size it.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from baton import Client
from deploy.local.head_supervisor import HEAD
from deploy.processes.process import ProcessRef, recorded
from tests.cluster.ray_nodes import RayNodes
from tests.cluster.served_cluster import ALWAYS, ServedCluster, wait_until
from tests.cluster.test_two_routers import PROMPT_LEN, TENANTS, Asked, ask
from tests.harness.checkpoints import make_checkpoint
from tests.harness.fork_server import ON_RAY, ForkServer
from wire.errors import BatonError

pytestmark = [pytest.mark.cluster, pytest.mark.head, pytest.mark.timeout(420)]
NUM_STREAMS = int(os.environ.get("BATON_TEST_STREAMS", "2"))
"""More starve Ray's own processes of a machine with two cores: its nodes end where these take 15 s to start."""
NUM_KILLS = int(os.environ.get("BATON_TEST_HEAD_KILLS", "1"))
BACK_S = 180.0
"""Bound on the head's absence on a busy machine."""
LOOK_EVERY_S = 0.5
SETTINGS = """
[pools]
prefill = 1
decode = 1
[worker]
prefill = { resources = { prefill = 1 } }
decode = { resources = { decode = 1 } }
[router]
routers = 2
[http]
gateways = 2
[ray]
standby_frontends = true
"""


class SupervisedHead:
    """A head under `deploy/head.sh --supervise`, and a node beside it with places for one worker of each role."""

    def __init__(self, folder: Path, ended: ExitStack) -> None:
        self.nodes = RayNodes(folder, ended)
        self._folder = folder / "baton" / f"head-{self.nodes.address.rpartition(':')[2]}"
        port = self.nodes.address.rpartition(":")[2]
        command = ["bash", "deploy/head.sh", "--supervise", "--port", port, "--node-ip-address", "127.0.0.1"]
        env = {**os.environ, **self.nodes.env, "XDG_STATE_HOME": str(folder)}
        with (folder / "supervisor.log").open("w") as output:
            self.supervisor = psutil.Popen(command, env=env, stdout=output, stderr=output)
        ended.callback(self.end)
        wait_until(self.has_started, "the head", BACK_S)
        self.nodes.node(prefill=1, decode=1)

    def has_started(self) -> bool:
        output = self._folder / "head.log"
        return output.exists() and "Ray runtime started" in output.read_text()

    @property
    def process(self) -> ProcessRef | None:
        return recorded(self._folder, HEAD)

    def kill(self) -> None:
        """Ends all processes of the head's node at once."""
        assert self.process is not None
        for pid in self.process.session():
            psutil.Process(pid).kill()

    def end(self) -> None:
        self.supervisor.terminate()
        assert self.supervisor.wait(60) == 0
        assert self.process is not None
        assert self.process.session() == []


@pytest.fixture
def served(tmp_path: Path, forks: ForkServer) -> Iterator[tuple[ServedCluster, SupervisedHead, list[Asked]]]:
    """A cluster of two nodes, its head, and prompts of four tenants with what an engine here answers."""
    checkpoint = make_checkpoint("llama-gqa", tmp_path / "model", max_position_embeddings=8192)
    config = tmp_path / "config.toml"
    config.write_text(SETTINGS)
    with ExitStack() as ended, pytest.MonkeyPatch.context() as patch:
        patch.delenv("BATON_API_KEY", raising=False)
        head = SupervisedHead(tmp_path, ended)
        for name, value in head.nodes.env.items():
            patch.setenv(name, value)
        cluster = ServedCluster(f"v{os.getpid()}", tmp_path, forks=forks, target=ON_RAY)
        keys = [cluster.do("key create", "--tenant", tenant).strip() for tenant in TENANTS]
        asked = ask(checkpoint, keys, NUM_STREAMS)
        flags = [
            "--config",
            str(config),
            "--ray-address",
            head.nodes.address,
            "--grpc-port",
            "0",
            "--redis-url",
            "off",
            *ALWAYS,
        ]
        cluster.do("up", "--model", str(checkpoint), *flags)
        try:
            yield cluster, head, asked
        finally:
            cluster.run("down")
        assert cluster.left_behind() == []


def answers(address: str, one: Asked) -> bool:
    """Whether a router takes a new request."""
    try:
        with Client(address, timeout_s=5, api_key=one.key) as client:
            return len(client.generate(one.prompt_ids[:20], temperature=0, max_tokens=4).choices[0].token_ids) > 0
    except BatonError:
        return False


def test_streams_of_another_node_outlive_the_head_which_comes_back(
    served: tuple[ServedCluster, SupervisedHead, list[Asked]],
) -> None:
    cluster, head, asked = served
    here, beside = cluster.state()["addresses"]["public"].split(",")
    before = {role: [worker["pid"] for worker in cluster.workers(role).values()] for role in ("prefill", "decode")}
    is_over = threading.Event()
    done: list[Asked] = []

    def ask_on(one: Asked) -> None:
        """Asks the router beside the head, answer after answer, until the head is back for good."""
        while not is_over.is_set():
            again = replace(one, text="", token_ids=[], stall_s=0.0, last_s=0.0)
            again.over_grpc(beside)
            done.append(again)

    waits_s = []
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        streams = [threads.submit(ask_on, one) for one in asked]
        try:
            for _ in range(NUM_KILLS):
                wait_until(lambda: answers(here, asked[0]), "the head's own router", BACK_S, LOOK_EVERY_S)
                killed, began_s = head.process, time.monotonic()
                head.kill()
                wait_until(lambda: head.process != killed, "the next head", BACK_S)  # noqa: B023
                wait_until(lambda: answers(here, asked[0]), "the head's own router", BACK_S, LOOK_EVERY_S)
                waits_s.append(time.monotonic() - began_s)
        finally:
            is_over.set()
        failures = [str(failure) for stream in streams if (failure := stream.exception()) is not None]
    stall_s = max(one.stall_s for one in done)
    told = f"{len(done)} streams, longest silence {stall_s:.2f} s, new requests at the head after {max(waits_s):.1f} s"
    sys.stderr.write(f"{NUM_KILLS} heads killed, {len(failures)} streams lost, {told}\n")
    assert failures == []
    assert [one.token_ids for one in done] == [one.expected.token_ids for one in done]
    assert [one.text for one in done] == [one.expected.text for one in done]
    assert all(len(one.prompt_ids) == PROMPT_LEN for one in done)
    after = {role: [worker["pid"] for worker in cluster.workers(role).values()] for role in before}
    assert after == before, "the new controller took over the workers that lived"
    assert any("the controller was lost, and is back" in event["text"] for event in cluster.status()["events"])
    wait_until(cluster.is_sound, "all invariants hold")
    cluster.do("down")
    killed = head.process
    head.kill()
    wait_until(lambda: head.process != killed and head.has_started(), "the next head", BACK_S)
    assert cluster.left_behind() == [], "no part of it comes back"
