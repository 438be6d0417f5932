"""`baton doctor` before a cluster that is told what to be like."""

import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import Distribution, PackageNotFoundError, version
from pathlib import Path
from typing import Any

import grpc
import pytest

from cli import doctor
from cli.__main__ import main
from deploy.local import run_dir
from deploy.local.key_file import KeyFile
from deploy.local.state import ClusterPhase, ClusterState, StateFile
from deploy.plan.authority import Authority
from deploy.processes.process import ProcessRef
from wire.convert import tiers_to_pb
from wire.pb import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc
from wire.pb import inference_pb2 as pb
from wire.pools import Addresses
from wire.rpc import TOKEN_METADATA
from wire.trust.certificates import TlsFiles
from wire.trust.key_ring import Allowance, KeyList, Scope, make_key
from wire.typed_reader import to_json

(ACME, ACME_TEXT), (GLOBEX, GLOBEX_TEXT) = (
    make_key(name, [Scope.GENERATE], Allowance()) for name in ("acme", "globex")
)
GONE = ProcessRef(pid=2**22 + 1, started=1.0, boot="none")


@dataclass
class Patient(inference_pb2_grpc.InferenceServicer, cluster_pb2_grpc.ClusterServicer):
    """A healthy cluster of a prefill and two decode workers; tests make it ill."""

    status: cluster_pb2.ClusterStatus = field(default_factory=lambda: _healthy())
    tokens: dict[str, list[int]] = field(default_factory=dict)
    fetched: dict[str, int] = field(default_factory=lambda: {"blocks_host": 13})
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    leaked: dict[str, int] = field(default_factory=dict)
    is_cached: bool = True
    tells_all: bool = False
    run_dir: Path = Path()

    def GetStatus(self, request: cluster_pb2.GetStatusRequest, context: Any) -> cluster_pb2.ClusterStatus:  # noqa: N802
        assert request.check
        return self.status

    def Probe(self, request: cluster_pb2.ProbeRequest, context: Any) -> cluster_pb2.ProbeResponse:  # noqa: N802
        assert dict(context.invocation_metadata())[TOKEN_METADATA] == "secret"
        is_handed_over = request.worker_id == "prefill-0"
        span = pb.Span(name="decode.fetch", counts=self.fetched if is_handed_over else self.leaked)
        token_ids = self.tokens.get(request.worker_id, [1, 2, 3])
        return cluster_pb2.ProbeResponse(token_ids=token_ids, timeline=pb.Timeline(spans=[span]))

    def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:  # noqa: N802
        return pb.ListModelsResponse(models=[pb.Model(name="small", max_context_len=2048)])

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:  # noqa: N802
        prompt, key = tuple(request.token_ids.ids), dict(context.invocation_metadata()).get("authorization", "")
        is_stranger = key == f"Bearer {GLOBEX_TEXT}" and not self.tells_all
        cached = {"device": 192} if self.is_cached and prompt in self.prompts and not is_stranger else {}
        self.prompts.append(prompt)
        yield pb.GenerateResponse(chunk=pb.Chunk(token_ids=[5, 6]))
        usage = pb.Usage(prompt_tokens=len(prompt), cached_tokens=tiers_to_pb(cached))
        yield pb.GenerateResponse(complete=pb.Complete(choices=[pb.Choice()], usage=usage))


def _healthy() -> cluster_pb2.ClusterStatus:
    status = cluster_pb2.ClusterStatus()
    for worker_id, role in (("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")):
        status.workers.add(worker_id=worker_id, role=role, state="ready")
    status.pools.add(role="prefill", size=1, num_ready=1)
    status.pools.add(role="decode", size=2, num_ready=2)
    status.tiers.add(tier="redis", state="up", counts={"hits": 7})
    return status


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Patient]:
    server, fake = grpc.server(ThreadPoolExecutor(2)), Patient()
    inference_pb2_grpc.add_InferenceServicer_to_server(fake, server)
    cluster_pb2_grpc.add_ClusterServicer_to_server(fake, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    monkeypatch.setattr(run_dir, "ROOT", tmp_path)
    fake.run_dir = run_dir.create("default")
    state = ClusterState(
        name="default",
        phase=ClusterPhase.RUNNING,
        command=GONE,
        run_dir=str(fake.run_dir),
        token="secret",
        addresses=Addresses(address, address, address),
    )
    StateFile("default").write(state)
    yield fake
    server.stop(None).wait(5)


def findings(capsys: pytest.CaptureFixture[str], status: int) -> dict[str, dict[str, str]]:
    assert main(["doctor", "--json"]) == status
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] == (status == 0)
    checks: dict[str, dict[str, str]] = told["checks"]
    return checks


def test_a_source_tree_that_nothing_was_installed_from(
    patient: Patient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> Distribution:
        raise PackageNotFoundError(name)

    installed = version("baton-serve")
    monkeypatch.setattr(Distribution, "from_name", find)
    assert installed in findings(capsys, 0)["versions"]["found"]


def test_a_healthy_cluster(patient: Patient, capsys: pytest.CaptureFixture[str]) -> None:
    checks = findings(capsys, 0)
    skipped = {name for name, one in checks.items() if one["verdict"] == "skipped"}
    assert skipped == {"versions", "clocks"}, "without a gateway there is nothing to compare with"
    assert {one["verdict"] for name, one in checks.items() if name not in skipped} == {"ok"}
    assert checks["workers"]["found"] == "ready: prefill 1 of 1, decode 2 of 2"
    assert checks["hand-off"]["found"] == "decode fetched 13 blocks of prefill-0"
    assert checks["tokens"]["found"] == "3 workers give the same 3 tokens"
    assert checks["cache"]["found"] == "the same prompt again: 192 from device of 200 tokens"
    assert checks["tiers"]["found"] == "redis up, 7 blocks read from it so far"
    assert len(patient.prompts) == 2
    assert len(set(patient.prompts)) == 1


def short_of_a_worker(patient: Patient) -> None:
    patient.status.pools[1].num_ready = 1
    patient.status.problems.append("the decode pool has 1 of 2 workers: the last events tell why")


def silent(patient: Patient) -> None:
    patient.status.workers[1].engine_silent_s = 9


def leaking(patient: Patient) -> None:
    patient.status.problems.append("decode-1: a page is lost")


def forged(patient: Patient) -> None:
    patient.status.tiers[0].counts["forged"] = 2


def without_redis(patient: Patient) -> None:
    patient.status.tiers[0].state = "broken"


def computing_twice(patient: Patient) -> None:
    patient.fetched = {}


def forgetful(patient: Patient) -> None:
    patient.is_cached = False


def telling_strangers(patient: Patient) -> None:
    patient.leaked = {"tokens_redis": 16, "blocks_redis": 1}


def of_two_minds(patient: Patient) -> None:
    patient.tokens = {"decode-1": [1, 2, 4]}


def open_to_others(patient: Patient) -> None:
    patient.run_dir.chmod(0o755)


@pytest.mark.parametrize(
    ("illness", "check", "found"),
    [
        (short_of_a_worker, "workers", "ready: prefill 1 of 1, decode 1 of 2"),
        (silent, "workers", "engines are silent: decode-0"),
        (leaking, "books", "decode-1: a page is lost"),
        (forged, "tiers", "redis had 2 forged blocks"),
        (without_redis, "tiers", "redis does not answer, and is left alone"),
        (computing_twice, "hand-off", "decode computed again what prefill-0 had computed"),
        (forgetful, "cache", "the same prompt twice, and nothing found"),
        (telling_strangers, "tenants", "a stranger found KV of a tenant: decode-0: 16 tokens in redis; decode-1"),
        (of_two_minds, "tokens", "decode-1 and prefill-0 differ over one prompt"),
        (open_to_others, "files", "others can read"),
    ],
)
def test_an_illness_is_found_and_no_other(
    illness: Callable[[Patient], None], check: str, found: str, patient: Patient, capsys: pytest.CaptureFixture[str]
) -> None:
    illness(patient)
    checks = findings(capsys, 1)
    assert [name for name, one in checks.items() if one["verdict"] == "wrong"] == [check]
    assert checks[check]["found"].startswith(found)
    assert checks[check]["advice"]


@pytest.mark.parametrize(
    ("other", "tells_all", "verdict", "found"),
    [
        (GLOBEX_TEXT, False, "ok", "nor by a key of globex"),
        (GLOBEX_TEXT, True, "wrong", "a stranger found KV of a tenant: globex: 192 tokens in device"),
        (ACME_TEXT, False, "wrong", "the other key is of no other tenant"),
        ("baton-00000000-no-key", False, "wrong", "the other key is of no other tenant"),
    ],
    ids=["of another", "of another, told all", "of the same", "of nobody"],
)
def test_a_second_key_proves_that_tenants_are_apart(
    other: str,
    tells_all: bool,
    verdict: str,
    found: str,
    patient: Patient,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    KeyFile.of("default").write(KeyList((ACME, GLOBEX)))
    monkeypatch.setenv("BATON_API_KEY", ACME_TEXT)
    monkeypatch.setenv("BATON_OTHER_API_KEY", other)
    patient.tells_all = tells_all
    told = findings(capsys, int(verdict == "wrong"))["tenants"]
    assert told["verdict"] == verdict
    assert found in told["found"]
    assert bool(told["advice"]) == (verdict == "wrong")


class GatewayPages(BaseHTTPRequestHandler):
    """The pages of a gateway that a check looks at, whose clock is `ahead_s` ahead."""

    ahead_s = 0.0

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string((timestamp or time.time()) + self.ahead_s)

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"version": version("baton-serve")}).encode())

    def log_message(self, *_: object) -> None:
        """Writes no log."""


def serve_tls(patient: Patient, shown: Authority, expected: Authority) -> HTTPServer:
    """Serves a gateway's pages with one certificate, where the state names another's file."""
    server, context = HTTPServer(("127.0.0.1", 0), GatewayPages), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for name, authority in (("shown", shown), ("expected", expected)):
        door = authority.issue("door", "elsewhere.example")
        (patient.run_dir / name).write_text(door.certificate_pem)
        (patient.run_dir / f"{name}.key").write_text(door.key_pem)
        if authority is shown:
            context.load_cert_chain(patient.run_dir / name, patient.run_dir / f"{name}.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    file = StateFile("default")
    state = file.read()
    assert state is not None
    tls = TlsFiles(str(patient.run_dir / "expected"), str(patient.run_dir / "expected.key"))
    addresses = replace(state.addresses, http=f"127.0.0.1:{server.server_address[1]}")
    file.write(replace(state, tls=tls, addresses=addresses))
    return server


def test_an_http_port_with_tls_is_looked_at(patient: Patient, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = Authority.make(), Authority.make()
    with serve_tls(patient, one, one) as server:
        checks = findings(capsys, 0)
        server.shutdown()
    assert {one["verdict"] for one in checks.values()} == {"ok"}
    assert "the ports' certificates are good until" in checks["clocks"]["found"]
    with serve_tls(patient, other, one) as server:
        checks = findings(capsys, 1)
        server.shutdown()
    assert checks["ports"]["verdict"] == "wrong"
    assert "certificate verify failed" in checks["ports"]["found"]


@pytest.mark.parametrize(("ahead_s", "verdict"), [(-90.0, "wrong"), (0.0, "ok"), (90.0, "wrong")])
def test_the_gateways_clock_is_compared(
    patient: Patient,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ahead_s: float,
    verdict: str,
) -> None:
    monkeypatch.setattr(GatewayPages, "ahead_s", ahead_s)
    authority = Authority.make()
    with serve_tls(patient, authority, authority) as server:
        clocks = findings(capsys, int(verdict == "wrong"))["clocks"]
        server.shutdown()
    assert clocks["verdict"] == verdict
    assert re.match(r"the gateway's clock (agrees|differs by (89|90|91) s)", clocks["found"])


def test_without_prefill_workers_there_is_no_hand_off(patient: Patient, capsys: pytest.CaptureFixture[str]) -> None:
    del patient.status.workers[0], patient.status.pools[0]
    assert findings(capsys, 0)["hand-off"]["verdict"] == "skipped"


def test_certificates_are_looked_at(patient: Patient, capsys: pytest.CaptureFixture[str]) -> None:
    record = patient.run_dir / "authority.json"
    record.write_text(to_json(Authority.make()))
    assert "certificates are good until 9999-12-31" in findings(capsys, 0)["clocks"]["found"]


def test_a_check_that_fails_amid_its_work_is_wrong(
    patient: Patient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: doctor.Live) -> doctor.Finding:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setitem(doctor.CHECKS, "ports", fail)
    assert findings(capsys, 1)["ports"]["found"] == "no answer (Connection refused)"


def test_a_port_that_resets_its_connections_is_named(patient: Patient, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        reset = threading.Thread(target=_reset, args=(listener, 3))
        reset.start()
        state = StateFile("default").read()
        assert state is not None
        StateFile("default").write(replace(state, addresses=replace(state.addresses, http=address)))
        checks = findings(capsys, 1)
        reset.join(5)
    wrong = {name: one["found"] for name, one in checks.items() if one["verdict"] == "wrong"}
    pages = {"ports": "/ready", "versions": "/version", "clocks": "/health"}
    assert wrong == {
        name: f"no answer (Connection reset by peer, from http://{address}{page})" for name, page in pages.items()
    }


def _reset(listener: socket.socket, num_connections: int) -> None:
    """Ends connections, each once its request is there, unread."""
    for _ in range(num_connections):
        connection, _ = listener.accept()
        connection.recv(1, socket.MSG_PEEK)
        connection.close()


def test_people_read_a_line_for_each_check(patient: Patient, capsys: pytest.CaptureFixture[str]) -> None:
    of_two_minds(patient)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split()[:2] == ["wrong", "tokens"]
    assert len(lines) == 2 + len(doctor.CHECKS)
