"""Ray's nodes on this machine, as the scripts of deploy start them."""

import json
import os
import secrets
import signal
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.cluster.served_cluster import wait_until

START_S = 60.0


class RayNodes:
    """Nodes of one cluster; each has a process that ends all of its own."""

    def __init__(self, folder: Path, ended: ExitStack) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._folder = folder
        self._ended = ended

    def head(self, **resources: int) -> psutil.Process:
        port = self.address.rpartition(":")[2]
        return self.start("head", "bash", "deploy/head.sh", "--port", port, "--resources", json.dumps(resources))

    def join(self, role: str) -> psutil.Process:
        return self.start(role, "bash", "deploy/join.sh", self.address, "--role", role)

    def node(self, **resources: int) -> psutil.Process:
        """Adds a node with places for workers of several roles."""
        command = ["bash", "deploy/ray_node.sh", "--address", self.address, "--resources", json.dumps(resources)]
        return self.start("node", *command)

    def start(self, name: str, *command: str) -> psutil.Process:
        """Runs a command that starts Ray as a node; returns its process once the node is there."""
        log = self._folder / f"{name}.log"
        whole = [*command, "--node-ip-address", "127.0.0.1", "--block"]
        with log.open("w") as output:
            process = psutil.Popen(whole, env={**os.environ, **self.env}, stdout=output, stderr=output)
        self._ended.callback(_end, process)
        wait_until(lambda: "Ray runtime started" in log.read_text() or process.poll() is not None, name, START_S)
        assert process.poll() is None, log.read_text()
        return process


def kill_raylet(node: psutil.Process) -> None:
    """Ends a node as a loss of power does: its actors end with its raylet."""
    for child in node.children(recursive=True):
        if child.name() == "raylet":
            child.send_signal(signal.SIGKILL)


def _end(process: Any) -> None:
    """Lets Ray end the processes of a node, and ends those that stay."""
    with suppress(psutil.NoSuchProcess):
        children = process.children(recursive=True)
        process.terminate()
        _, alive = psutil.wait_procs([process, *children], timeout=20)
        for one in alive:
            with suppress(psutil.NoSuchProcess):
                one.kill()
