"""The line to the process of Ray, with small programs in its place."""

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from deploy.local import ray_process
from deploy.local.ray_process import RayProcess
from deploy.plan.config import ClusterConfig
from deploy.processes.process import ProcessRef, end_session, spawn_leader
from tests.deploy.plan.test_cluster_plan import planned
from wire.errors import ConfigError
from wire.settings import to_json

PLAN = planned(ClusterConfig())
PROGRAM = """
import json, sys
from multiprocessing.connection import Connection
line = Connection(0)
say = lambda **message: line.send_bytes(json.dumps(message).encode())
"""


def start(ray: RayProcess) -> None:
    ray.wait_for_ray()
    ray.launch(PLAN, lambda: None)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The program that the next process runs, after the first lines."""
    programs: list[str] = []
    spawned: list[ProcessRef] = []

    def spawn(_command: list[str], log: Path, env: Mapping[str, str], stdin: int) -> ProcessRef:
        spawned.append(spawn_leader([sys.executable, "-c", PROGRAM + programs[0]], log, env, stdin))
        return spawned[-1]

    monkeypatch.setattr(ray_process, "spawn_leader", spawn)
    yield programs
    for process in spawned:
        end_session(process, grace_s=5)


def test_ray_and_then_the_cluster_are_heard_of(
    processes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = tmp_path / "go-on"
    processes.append(
        "say(address='ray:1')\nplan = line.recv_bytes()\n"
        f"import pathlib\nwhile not pathlib.Path({str(go_on)!r}).exists(): pass\n"
        "say(address=str(len(plan)), operator_address='o:2')"
    )
    monkeypatch.setattr(ray_process, "PROGRESS_EVERY_S", 0.01)
    ray = RayProcess(tmp_path, "baton-x", None)
    assert ray.wait_for_ray() == "ray:1"
    assert ray.launch(PLAN, on_wait=go_on.touch) == {
        "address": str(len(to_json(PLAN))),
        "operator_address": "o:2",
    }
    ray.close()


def test_a_failure_is_told_with_its_reason(processes: list[str], tmp_path: Path) -> None:
    processes.append("say(failure='no such Ray')")
    with pytest.raises(ConfigError, match="no such Ray"):
        RayProcess(tmp_path, "baton-x", None).wait_for_ray()


@pytest.mark.parametrize("before", ["", "say(address='ray:1')\n"])
def test_a_process_that_dies_leaves_its_last_words(processes: list[str], tmp_path: Path, before: str) -> None:
    processes.append(before + "sys.exit('out of luck')")
    ray = RayProcess(tmp_path, "baton-x", None)
    with pytest.raises(ConfigError, match="did not start:\nout of luck"):
        start(ray)


def test_a_silent_process_is_not_waited_for_without_end(
    processes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_process, "RAY_TIMEOUT_S", 0.05)
    processes.append("line.recv_bytes()")
    with pytest.raises(ConfigError, match="did not answer in time"):
        RayProcess(tmp_path, "baton-x", None).wait_for_ray()


@pytest.mark.parametrize(
    ("status", "asks"), [(None, False), (grpc.StatusCode.UNAUTHENTICATED, True), (grpc.StatusCode.UNIMPLEMENTED, False)]
)
def test_a_control_service_asks_for_a_token_or_not(status: grpc.StatusCode | None, asks: bool) -> None:
    def answer(_request: bytes, context: grpc.ServicerContext) -> bytes:
        return b"" if status is None else context.abort(status, "")

    class Service(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Service()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        assert ray_process.asks_for_token(address) is asks
    finally:
        server.stop(None).wait()


def test_a_control_service_that_does_not_answer_asks_for_nothing() -> None:
    assert not ray_process.asks_for_token("127.0.0.1:1")
