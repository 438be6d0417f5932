"""The line to the process of Ray, with small programs in its place."""

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from deploy.local import ray_process
from deploy.local.ray_process import RayProcess
from deploy.plan.authority import Authority
from deploy.plan.config import ClusterConfig
from deploy.processes.process import ProcessRef, end_session, spawn_leader
from tests.deploy.plan.test_cluster_plan import planned
from wire.errors import ConfigError
from wire.pools import Addresses
from wire.trust.identity import Identity
from wire.typed_reader import to_json

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
        "say(ray_address='ray:1')\nplan = line.recv_bytes()\n"
        f"import pathlib\nwhile not pathlib.Path({str(go_on)!r}).exists(): pass\n"
        "say(addresses=dict(public=str(len(plan)), operator='o:2'))"
    )
    monkeypatch.setattr(ray_process, "PROGRESS_EVERY_S", 0.01)
    ray = RayProcess(tmp_path, None)
    assert ray.wait_for_ray() == "ray:1"
    assert ray.launch(PLAN, on_wait=go_on.touch) == Addresses(str(len(to_json(PLAN))), operator="o:2")
    ray.close()


def test_a_failure_is_told_with_its_reason(processes: list[str], tmp_path: Path) -> None:
    processes.append("say(failure='no such Ray')")
    with pytest.raises(ConfigError, match="no such Ray"):
        RayProcess(tmp_path, None).wait_for_ray()


@pytest.mark.parametrize("before", ["", "say(ray_address='ray:1')\n"])
def test_a_process_that_dies_leaves_its_last_words(processes: list[str], tmp_path: Path, before: str) -> None:
    processes.append(before + "sys.exit('out of luck')")
    ray = RayProcess(tmp_path, None)
    with pytest.raises(ConfigError, match="did not start:\nout of luck"):
        start(ray)


def test_a_silent_process_is_not_waited_for_without_end(
    processes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_process, "RAY_TIMEOUT_S", 0.05)
    processes.append("line.recv_bytes()")
    with pytest.raises(ConfigError, match="did not answer within"):
        RayProcess(tmp_path, None).wait_for_ray()


@contextmanager
def control_service(status: grpc.StatusCode | None, identity: Identity | None = None) -> Iterator[str]:
    """The address of a service that answers each call so; None answers well."""

    def answer(_request: bytes, context: grpc.ServicerContext) -> bytes:
        return b"" if status is None else context.abort(status, "")

    class Service(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Service()])
    if identity is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        pair = identity.key_pem.encode(), identity.certificate_pem.encode()
        credentials = grpc.ssl_server_credentials([pair], identity.authority_pem.encode(), True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


UNAUTHENTICATED, UNIMPLEMENTED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED
ANSWERS: list[tuple[grpc.StatusCode | None, bool]] = [(None, False), (UNAUTHENTICATED, True), (UNIMPLEMENTED, False)]


@pytest.mark.parametrize(("status", "asks"), ANSWERS)
def test_a_control_service_asks_for_a_token_or_not(status: grpc.StatusCode | None, asks: bool) -> None:
    with control_service(status) as address:
        assert ray_process.asks_for_token(address) is asks


@pytest.mark.parametrize(("status", "asks"), ANSWERS)
def test_a_control_service_behind_tls_is_asked_as_ray_would_ask_it(
    status: grpc.StatusCode | None, asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = Authority.make().issue("ray", "127.0.0.1")
    texts = {"CA_CERT": identity.authority_pem, "SERVER_KEY": identity.key_pem, "SERVER_CERT": identity.certificate_pem}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setenv(f"RAY_TLS_{name}", str(tmp_path / name))
    with control_service(status, identity) as address:
        assert not ray_process.asks_for_token(address), "it does not answer without TLS"
        monkeypatch.setenv("RAY_USE_TLS", "1")
        assert ray_process.asks_for_token(address) is asks


def test_a_control_service_that_does_not_answer_asks_for_nothing() -> None:
    assert not ray_process.asks_for_token("127.0.0.1:1")
