"""A night of a cluster of two nodes under load, told by its log: losses, a change of keys, a roll, a drain.

    python benchmarks/night.py --out benchmarks/results/night.md

Four tenants stream all the time; every answer is compared with that of an engine in this process. Then the log is
searched for the lines that tell of each event, in order; the page has the whole log of the controller.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deploy.processes.process import recorded
from tests.cluster.ray_nodes import RayNodes, kill_raylet
from tests.cluster.served_cluster import ServedCluster, wait_until
from tests.cluster.test_two_routers import TENANTS, Asked, ask
from tests.harness.checkpoints import make_checkpoint

SETTINGS = """
[pools]
prefill = 1
decode = 2
[worker]
drain_grace_s = 20
prefill = { resources = { prefill = 1 } }
decode = { resources = { decode = 1 } }
[router]
routers = 2
"""
ROLLED = """
[batch]
max_running = 16
max_chunk_tokens = 256
"""
CALM_S = 5.0
WAIT_S = 240.0


@dataclass(frozen=True)
class Incident:
    """An event of the night: its act, and the words that the log must have of it, in order."""

    what: str
    act: Callable[[], None]
    words: tuple[str, ...]


class Night:
    """A cluster on two nodes, its load, and its incidents."""

    def __init__(self, folder: Path, ended: ExitStack) -> None:
        self._nodes = RayNodes(folder, ended)
        self._folder = folder
        self._nodes.head(prefill=2, decode=1)
        self._second = self._nodes.join("decode")
        os.environ.update(self._nodes.env)
        self.cluster = ServedCluster(f"night{os.getpid()}", folder, timeout_s=WAIT_S)
        checkpoint = make_checkpoint("llama-gqa", folder / "model", max_position_embeddings=8192)
        config = folder / "config.toml"
        config.write_text(SETTINGS)
        keys = [self.cluster.do("key create", "--tenant", tenant).strip() for tenant in TENANTS]
        self._asked = ask(checkpoint, keys, len(TENANTS))
        flags = [
            "--config",
            str(config),
            "--ray-address",
            self._nodes.address,
            "--grpc-port",
            "0",
            "--redis-url",
            "off",
        ]
        ended.callback(self.cluster.run, "down")
        self.cluster.do("up", "--model", str(checkpoint), *flags)
        self.done: list[Asked] = []
        self.failures: list[str] = []
        self._is_over = threading.Event()

    def incidents(self) -> list[Incident]:
        return [
            Incident("a router is killed", self._kill_router, ("the router-1 was lost", "the router-1 is back")),
            Incident(
                "a node loses its power, and another one joins",
                self._lose_node,
                ("was lost", "the node of node-", "is ready after"),
            ),
            Incident("a key is made", self._make_key, ("5 keys are in force",)),
            Incident(
                "the settings of all workers are rolled",
                self._roll,
                ("rolling 3 workers to revision 1", *3 * ("is replaced, and drains",), "have revision 1 now"),
            ),
            Incident("a node is drained", self._drain, (" drains", "has left", "is drained: its Ray can be stopped")),
        ]

    def live(self) -> list[Incident]:
        """Streams through all incidents, one after another."""
        incidents = self.incidents()
        with ThreadPoolExecutor(len(self._asked)) as threads:
            for one in self._asked:
                threads.submit(self._stream, one)
            try:
                for incident in incidents:
                    time.sleep(CALM_S)
                    sys.stderr.write(f"{datetime.now(UTC):%H:%M:%S} {incident.what}\n")
                    incident.act()
                time.sleep(CALM_S)
            finally:
                self._is_over.set()
        return incidents

    def log(self) -> list[str]:
        """Reads what `baton logs` shows of the controller, from its start."""
        return self.cluster.do("logs controller", "--lines", "10000").splitlines()

    def _stream(self, one: Asked) -> None:
        while not self._is_over.is_set():
            again = replace(one, text="", token_ids=[], stall_s=0.0, last_s=0.0)
            try:
                again.over_grpc(self.cluster.state()["addresses"]["public"])
            except Exception as error:  # a lost stream is counted, whatever ended it
                self.failures.append(repr(error))
            else:
                self.done.append(again)

    def _kill_router(self) -> None:
        process = recorded(Path(self.cluster.state()["run_dir"]), "router-1")
        assert process is not None
        psutil.Process(process.pid).kill()
        self._wait_for("the router-1 is back")

    def _lose_node(self) -> None:
        num_ready = sum("is ready after" in line for line in self.log())
        kill_raylet(self._second)
        self._nodes.node(decode=2)  # a place more than it needs: a roll starts a worker before another ends
        wait_until(lambda: sum("is ready after" in line for line in self.log()) > num_ready, "a replacement", WAIT_S)

    def _make_key(self) -> None:
        self.cluster.do("key create", "--tenant", "umbrella")

    def _roll(self) -> None:
        settings = self._folder / "rolled.toml"
        settings.write_text(ROLLED)
        self.cluster.do("roll", "--config", str(settings))

    def _drain(self) -> None:
        status = self.cluster.status()
        head = {worker["node"] for worker in status["pools"]["prefill"]}
        (other,) = {worker["node"] for worker in status["pools"]["decode"]} - head
        self.cluster.do("drain", other)

    def _wait_for(self, words: str) -> None:
        wait_until(lambda: any(words in line for line in self.log()), words, WAIT_S)


def told(log: list[str], incidents: list[Incident]) -> tuple[list[str], list[str]]:
    """Returns the lines that tell of the incidents, and the words that no later line has."""
    lines, missing, place = [], [], 0
    for words in (one for incident in incidents for one in incident.words):
        found = next((at for at in range(place, len(log)) if words in log[at]), None)
        if found is None:
            missing.append(words)
        else:
            lines.append(log[found])
            place = found
    return lines, missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a page of the night")
    options = parser.parse_args()
    began_s = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # Ray and the cluster end with it
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ended:
        night = Night(Path(folder), ended)
        incidents = night.live()
        log = night.log()
    wrong = sum((one.token_ids, one.text) != (one.expected.token_ids, one.expected.text) for one in night.done)
    _, missing = told(log, incidents)
    stall_s = max((one.stall_s for one in night.done), default=0.0)
    figures = f"{len(night.done)} streams, {len(night.failures)} lost, {wrong} wrong, longest silence {stall_s:.2f} s"
    page = "\n".join(_short(line) for line in log if line.startswith("{"))
    text = f"{figures}; {len(missing)} events without a line {missing}; {time.monotonic() - began_s:.0f} s\n{page}\n"
    sys.stdout.write(text)
    if options.out is not None:
        commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
        place = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        head = f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}, {place}; `python benchmarks/night.py`"
        options.out.write_text(f"# A night, from its log\n\n{head}\n\n{figures}.\n\n```\n{page}\n```\n")
    return int(bool(night.failures or wrong or missing))


def _short(line: str) -> str:
    """Shortens a line of JSON to its time, process and message."""
    record = json.loads(line)
    return f"{record['time'][11:19]} {record['process']}: {record['message']}"


if __name__ == "__main__":
    sys.exit(main())
