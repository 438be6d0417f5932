import importlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from baton.request import make_request
from cli import down
from cli.__main__ import COMMANDS, main, make_parser
from cli.generate import read_options, read_prompt
from deploy.local import run_dir
from deploy.local.state import ClusterPhase, ClusterState, StateFile
from deploy.plan.config import ClusterConfig
from deploy.processes.process import ProcessRef
from wire.convert import tiers_to_pb
from wire.errors import InvalidRequest
from wire.pb import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc, worker_pb2
from wire.pb import inference_pb2 as pb
from wire.pools import Addresses
from wire.rpc import PROXIES, TOKEN_METADATA, to_status

BAD_REDIS_URLS = (
    *(
        "",
        "nonsense",
        "redis://",
        "redis://127.0.0.1:99999",
        "redis://h:0",
        "redis://:@/x",
        "redis://:@/0",
        "redis://h/x",
    ),
    *("redis://[::1", "redis://a b", "unix://", "unix://socket", "http://h:1"),
)
RUN_DIR = "/tmp/baton-default-00000000"
GONE = ProcessRef(pid=2**22 + 1, started=1.0, boot="none")
SESSION = "session_2026-11-23_12-00-00_000000_1"
ASKING = [
    ["generate", "x"],
    ["status"],
    ["scale", "--decode", "1"],
    ["drain", "decode-0"],
    ["abort", "r"],
    ["requests"],
    ["why", "r"],
]
WAIT_S = 60.0
WATCH = [sys.executable, "-m", "cli", "status", "--watch"]
COMPLETE = pb.Complete(
    choices=[pb.Choice(index=0, finish_reason=pb.FINISH_REASON_STOP, stop_string="end")],
    usage=pb.Usage(prompt_tokens=20, completion_tokens=3, cached_tokens=tiers_to_pb({"host": 16})),
    seed=7,
    timeline=pb.Timeline(
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        spans=[pb.Span(name="decode.fetch", worker="decode-0", start_ms=1, duration_ms=2, counts={"blocks_host": 2})],
        total_ms=5,
    ),
)


@dataclass
class FakeServer(inference_pb2_grpc.InferenceServicer, cluster_pb2_grpc.ClusterServicer):
    """Answers what it is told to, and remembers what it was asked."""

    status: cluster_pb2.ClusterStatus = field(default_factory=cluster_pb2.ClusterStatus)
    error: InvalidRequest | None = None
    asked: list[Any] = field(default_factory=list)
    token: str = ""
    ended: list[cluster_pb2.EndedRequest] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:  # noqa: N802
        self.asked.append(request)
        if self.error is not None:
            context.abort_with_status(rpc_status.to_status(to_status(self.error)))
        for text in ("one ", "two"):
            chunk = pb.Chunk(index=0, token_ids=[len(text)], text=text)
            yield pb.GenerateResponse(request_id="r", chunk=chunk)
        yield pb.GenerateResponse(request_id="r", complete=COMPLETE)

    def GetStatus(self, request: cluster_pb2.GetStatusRequest, context: Any) -> cluster_pb2.ClusterStatus:  # noqa: N802
        self.token = dict(context.invocation_metadata()).get(TOKEN_METADATA, "")
        self.asked.append(request)
        return self.status

    def Scale(self, request: cluster_pb2.ScaleRequest, context: Any) -> cluster_pb2.ScaleResponse:  # noqa: N802
        self.asked.append(request)
        return cluster_pb2.ScaleResponse(prefill=2, decode=request.decode)

    def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:  # noqa: N802
        self.asked.append(request)
        return pb.AbortResponse()

    def ListRequests(self, request: Any, context: Any) -> cluster_pb2.ListRequestsResponse:  # noqa: N802
        self.asked.append(request)
        return cluster_pb2.ListRequestsResponse(requests=self.ended)

    def ExplainMisses(self, request: Any, context: Any) -> cluster_pb2.MissExplanation:  # noqa: N802
        self.asked.append(request)
        return cluster_pb2.MissExplanation(request=self.ended[-1], problems=self.problems)


@pytest.fixture
def server(run_folder: Path) -> Iterator[FakeServer]:
    """A server that the state of the default cluster points to."""
    fake = FakeServer()
    grpc_server = grpc.server(ThreadPoolExecutor(2))
    inference_pb2_grpc.add_InferenceServicer_to_server(fake, grpc_server)
    cluster_pb2_grpc.add_ClusterServicer_to_server(fake, grpc_server)
    address = f"127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
    grpc_server.start()
    _write_state(address, run_folder)
    yield fake
    grpc_server.stop(None).wait(5)


def _write_state(address: str, folder: Path) -> ClusterState:
    state = ClusterState(
        name="default",
        phase=ClusterPhase.RUNNING,
        command=GONE,
        run_dir=str(folder),
        token="secret",
        addresses=Addresses(address, address, address),
    )
    StateFile("default").write(state)
    return state


def _request(*arguments: str) -> pb.GenerateRequest:
    args = make_parser().parse_args(["generate", *arguments])
    return make_request(read_prompt(args), read_options(args))


def test_no_command_loads_torch_or_ray_to_begin_with() -> None:
    program = (
        "import sys, cli.__main__ as cli; cli.make_parser(); "
        "print({'torch', 'ray', 'transformers', 'redis'} & set(sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "set()\n"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"usage: baton {command}" in shown
    assert len(shown.splitlines()) > 5


@pytest.mark.parametrize("command", ASKING)
def test_without_a_cluster_it_says_how_to_start_one(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 1
    assert capsys.readouterr().err == "baton: no cluster named default is running: start one with `baton up`\n"


def test_down_without_a_cluster_has_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["down", "--name", "none"]) == 0
    assert capsys.readouterr().out == "no cluster named none is running\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--decode", "0"], "--decode must be between"),
        (["--config", "/none.toml"], "cannot read /none.toml"),
        (["--name", "A/B"], "name must be"),
        *((["--redis-url", url], "--redis-url must be") for url in BAD_REDIS_URLS),
        *((["--ray-address", address], "--ray-address must be") for address in ("", "local", "h:99999", "h:0", ":1")),
        (["--grpc-port", "4242", "--metrics-port", "4242"], "--metrics-port must be another port than --grpc-port"),
        (["--model", "/none"], "no folder, GGUF file, name of `baton pull` or name on the hub"),
        (["--arena-bytes", "much"], "--arena-bytes must be a size"),
    ],
)
def test_wrong_settings_are_exit_code_78(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", *arguments]) == 78
    error = capsys.readouterr().err
    assert error.startswith("baton: ")
    assert named in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("config", [None, "{", "[]"])
def test_a_folder_that_is_no_model_is_exit_code_78(
    config: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(config)
    assert main(["up", "--model", str(folder), "--redis-url", "off"]) == 78
    assert capsys.readouterr().err.startswith("baton: config.json is ")


def test_what_is_not_given_is_not_set() -> None:
    request = _request("hello")
    assert request.text == "hello"
    assert not request.sampling_params.ListFields(), "the model has its own defaults"
    zero = _request("hello", "--temperature", "0").sampling_params
    assert ({name.name for name, _ in zero.ListFields()}, zero.temperature) == ({"temperature"}, 0)


def test_what_is_given_is_set() -> None:
    request = _request("--token-ids", "1, 2,3", "--seed", "0", "--n", "2", "--stop", "a", "--stop", "b", "--ignore-eos")
    assert list(request.token_ids.ids) == [1, 2, 3]
    params = request.sampling_params
    assert params.HasField("seed")
    assert (params.n, list(params.stop), params.ignore_eos) == (2, ["a", "b"], True)


def test_generate_streams_text_and_then_tells_where_the_time_went(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hello"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "one two\n"
    assert "decode-0  fetch" in shown.err
    assert "2 blocks from host" in shown.err
    assert "20 prompt tokens (16 cached: 16 host), 3 generated, 5.0 ms" in shown.err


def test_a_chat_is_one_conversation(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\nand then?\n")))
    assert main(["chat", "--system", "be quick", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == "one two\none two\n"
    first, second = ([(one.role, one.content) for one in asked.messages.messages] for asked in server.asked)
    assert first == [("system", "be quick"), ("user", "hello")]
    assert second == [*first, ("assistant", "one two"), ("user", "and then?")]
    assert {name.name for name, _ in server.asked[0].sampling_params.ListFields()} == {"max_tokens"}
    assert server.asked[0].sampling_params.max_tokens == 9
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    assert main(["chat", "--temperature", "0.5"]) == 0
    assert server.asked[2].sampling_params.temperature == 0.5


@pytest.mark.parametrize("command", [["generate", "hello"], ["status"]])
@pytest.mark.parametrize("name", PROXIES)
def test_no_proxy_stands_before_this_machines_cluster(
    command: list[str], name: str, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert main(command) == 0


def test_a_chat_that_is_refused(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.error = InvalidRequest("messages", "no chat template")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    assert main(["chat"]) == 2
    assert capsys.readouterr().err == "baton: messages: no chat template\n"


@pytest.mark.parametrize(
    ("arguments", "port"),
    [([], 8000), (["--http-port", "0"], 0), (["--no-http"], None), (["--http-port", "off"], None)],
)
def test_the_port_of_http_is_a_flag(arguments: list[str], port: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[ClusterConfig] = []

    def start(config: ClusterConfig, _: object) -> SimpleNamespace:
        configs.append(config)
        return SimpleNamespace(run=lambda: None)

    monkeypatch.setattr("cli.up.Startup", start)
    assert main(["up", *arguments]) == 0
    assert [config.http_port for config in configs] == [port]


def test_host_names_are_a_flag(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    configs: list[ClusterConfig] = []

    def start(config: ClusterConfig, _: object) -> SimpleNamespace:
        configs.append(config)
        return SimpleNamespace(run=lambda: None)

    monkeypatch.setattr("cli.up.Startup", start)
    assert main(["up", "--host-names", "host.docker.internal", "llm.example.org"]) == 0
    assert [config.http.host_names for config in configs] == [("host.docker.internal", "llm.example.org")]
    assert main(["up", "--host-names", "llm.example.org:8000"]) == 78
    assert capsys.readouterr().err.startswith("baton: --host-names must be names without ports")


def test_generate_as_json_is_one_object(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    answer = json.loads(shown.out)
    first = {"text": "one two", "token_ids": [4, 3], "finish_reason": "stop"}
    assert {key: answer[key] for key in first} == first
    assert answer["choices"] == [{"index": 0, **first, "matched_stop": "end"}]
    assert answer["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 3,
        "cached_tokens": {"device": 0, "host": 16, "peers": 0, "redis": 0, "files": 0},
        "guessed_tokens": 0,
        "accepted_tokens": 0,
        "reasoning_tokens": 0,
    }
    assert answer["workers"] == {"prefill": "prefill-0", "decode": "decode-0"}
    assert answer["timeline"]["total_ms"] == 5
    assert answer["timeline"]["spans"][0]["counts"] == {"blocks_host": 2}
    assert answer["seed"] == 7


def test_what_the_server_refuses_is_one_line(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.error = InvalidRequest("n", "must be in [1, 16]")
    assert main(["generate", "x", "--n", "17"]) == 2
    assert capsys.readouterr().err == "baton: n: must be in [1, 16]\n"


def test_a_crashed_cluster_is_said_to_be_one(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write_state("127.0.0.1:1", run_folder)
    assert main(["status"]) == 1
    assert "the cluster default crashed: `baton down` cleans up, `baton up` starts anew" in capsys.readouterr().err


def test_a_joined_ray_that_is_gone_is_told_of_a_router_that_does_not_answer(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    living, state = ProcessRef.of(os.getpid()), _write_state("127.0.0.1:1", run_folder)
    StateFile("default").write(replace(state, ray_address="127.0.0.1:1", redis=living))
    assert main(["status"]) == 1
    crashed = "the cluster default crashed (no Ray cluster answers at 127.0.0.1:1: Connection refused)"
    assert f"{crashed}: `baton down` cleans up" in capsys.readouterr().err


def test_of_a_router_that_does_not_answer_the_logs_are_named(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (logs := run_dir.ray_logs(run_folder)).mkdir(parents=True)
    state = _write_state("127.0.0.1:1", run_folder)
    StateFile("default").write(replace(state, head=ProcessRef.of(os.getpid())))
    assert main(["status"]) == 1
    assert f"ask again in a moment, or see {logs}\n" in capsys.readouterr().err


def test_a_cluster_without_recorded_revisions_is_not_rolled(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["roll", "--threads", "1"]) == 1
    assert "started by a release that cannot roll: `baton down` and `baton up` do" in capsys.readouterr().err
    assert server.asked == []


@pytest.mark.parametrize("command", ASKING)
def test_a_crash_of_ray_is_told_though_the_router_still_answers(
    command: list[str], server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    state = StateFile("default").read()
    assert state is not None
    folder = run_dir.create("default")
    try:
        StateFile("default").write(replace(state, run_dir=str(folder), head=GONE))
        anew = "`baton down` cleans up, `baton up` starts anew"
        assert main(command) == 1
        assert capsys.readouterr() == (
            "",
            f"baton: the cluster default crashed (the process of its Ray has ended): {anew}\n",
        )
        run_dir.record_crash(folder, "Ray's raylet ended")
        assert main(command) == 1
        shown = capsys.readouterr()
        assert shown.err.startswith("baton: the cluster default crashed at 20")
        assert shown.err.endswith(f" (Ray's raylet ended): {anew}\n")
    finally:
        run_dir.remove(folder)
    assert server.asked == []


@pytest.mark.parametrize("command", [*ASKING, ["chat"]])
@pytest.mark.parametrize(("lost", "is_joined"), [(".", False), (f"r/{SESSION}", False), (".", True)])
def test_a_run_folder_that_was_removed_is_told_at_once(
    command: list[str],
    lost: str,
    is_joined: bool,
    server: FakeServer,
    run_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    state = StateFile("default").read()
    assert state is not None
    (run_folder / "r" / SESSION).mkdir(parents=True)
    StateFile("default").write(replace(state, head=None if is_joined else ProcessRef.of(os.getpid())))
    assert main(["status"]) == 0
    capsys.readouterr()
    shutil.rmtree(run_folder / lost)
    assert main(command) == 1
    told = capsys.readouterr().err
    named = run_folder / lost.replace(SESSION, "session_latest")
    assert told.startswith(f"baton: the cluster default cannot go on: {named} was removed")
    assert told.endswith(": `baton down` cleans up, `baton up` starts anew\n")
    assert len(server.asked) == 1, "the status of before"


def test_a_worker_of_ray_that_makes_the_link_anew_is_no_loss(
    server: FakeServer, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = StateFile("default").read()
    assert state is not None
    (session := run_folder / "r" / SESSION).mkdir(parents=True)
    StateFile("default").write(replace(state, head=ProcessRef.of(os.getpid())))
    assert not (session.parent / "session_latest").exists(), "Ray removes its link before it makes it again"
    assert main(["status"]) == 0
    assert f"logs in {session / 'logs'}\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", ASKING)
def test_a_broken_state_is_set_aside_by_down(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = StateFile("default").path
    path.write_text("null")
    for refused in (command, ["up", "--grpc-port", "0", "--redis-url", "off"]):
        assert main(refused) == 78
        problem = f"{path} is not the state of a cluster (state: must be an object, not null)"
        assert capsys.readouterr().err == f"baton: {problem}: `baton down` sets it aside\n"
    assert main(["down"]) == 1
    told = capsys.readouterr().err
    assert "It is set aside as default.json.broken; `bash deploy/nothing_left.sh default` shows" in told
    assert told.count("\n") == 1
    assert main(command) == 1
    assert "no cluster named default is running" in capsys.readouterr().err


def test_an_interrupted_down_says_how_to_go_on(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)

    state = _write_state("127.0.0.1:1", run_folder)
    monkeypatch.setattr(down, "shut_down", interrupt)
    assert main(["down"]) == 130
    told = "baton: interrupted, so some of default may be left: `baton down` goes on\n"
    assert capsys.readouterr().err == told
    assert StateFile("default").read() == state


def test_an_interrupted_import_is_an_interrupted_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupt)
    assert main(["status"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("command", ASKING)
def test_a_command_that_waits_is_interrupted_without_a_word(command: list[str], run_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        _write_state(f"127.0.0.1:{listener.getsockname()[1]}", run_folder)
        whole = [sys.executable, "-m", "cli", *command]
        with subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            connection, _ = listener.accept()
            with connection:
                process.send_signal(signal.SIGINT)
                assert process.communicate(timeout=WAIT_S) == (b"", b"")
            assert process.returncode == 130


def test_a_watch_without_a_terminal_prints_a_line_each_time_and_ends_at_an_interrupt(server: FakeServer) -> None:
    server.status.model, server.status.num_running = "evil\x1b[2J", 3
    with subprocess.Popen(WATCH, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=WAIT_S) == ("", "")
    assert process.returncode == 0
    assert len(server.asked) == 2
    for line in lines:
        assert re.fullmatch(r"\d\d:\d\d:\d\d evil\\x1b\[2J at ; requests 3 running, .*; hits no prompts yet\n", line)


def test_a_watch_draws_over_itself_on_a_terminal(server: FakeServer) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    server.status.model = "evil\x1b[2J" + "x" * 500
    ours, theirs = os.openpty()
    termios.tcsetwinsize(ours, (8, 60))
    with subprocess.Popen(WATCH, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        seen = b""
        while seen.count(b"\x1b[J") < 2:
            seen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    os.close(ours)
    first, second, rest = seen.split(b"\x1b[J")
    assert rest == b""
    for drawn in (first, second):
        assert drawn.startswith(b"\x1b[H")
        assert b"evil\\x1b[2Jxxx" in drawn
        lines = drawn.removeprefix(b"\x1b[H").split(b"\x1b[K\r\n")
        assert len(lines) <= 8
        assert max(map(len, lines)) == 60


def test_a_watch_goes_on_while_the_router_is_away_and_ends_with_the_cluster(server: FakeServer) -> None:
    with subprocess.Popen(WATCH, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        state = StateFile("default").read()
        assert state is not None
        living = replace(state, addresses=Addresses(*["127.0.0.1:1"] * 3), redis=ProcessRef.of(os.getpid()))
        StateFile("default").write(living)
        assert "the router went away or is not back yet" in process.stdout.readline()
        StateFile("default").write(state)
        assert "0 running" in process.stdout.readline()
        StateFile("default").remove()
        _, error = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert error == "baton: no cluster named default is running: start one with `baton up`\n"


def test_a_watch_goes_without_check_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    for other in ("--check", "--json"):
        assert main(["status", "--watch", other]) == 2
        assert capsys.readouterr() == ("", "baton: --watch: goes without --json and --check\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        ("down >/dev/full", 1, "No space left on device\n"),
        ("down >&-", 1, "baton: stdout: Bad file descriptor\n"),
        ("up --help >/dev/full", 1, "No space left on device\n"),
        ("down 2>&-", 0, ""),
        ("status 2>&-", 1, ""),
        ("status 2>/dev/full", 1, ""),
        ("down <&- >&- 2>&-", 1, ""),
        ("status >/dev/full", 1, "no cluster named default is running: start one with `baton up`\n"),
        ("generate - <&-", 1, "no cluster named default is running: start one with `baton up`\n"),
    ],
)
def test_output_that_cannot_be_written_is_told_in_one_line(command: str, code: int, told: str, unbuffered: str) -> None:
    done = subprocess.run(
        f"{sys.executable} -m cli {command}",
        shell=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr.endswith(told), done.stderr.count("\n")) == (code, True, bool(told))


def test_a_cluster_that_never_came_up_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    StateFile("default").write(
        ClusterState(name="default", phase=ClusterPhase.STARTING, command=GONE, run_dir=RUN_DIR, token="secret")
    )
    assert main(["status"]) == 1
    assert (
        capsys.readouterr().err
        == "baton: the cluster default has not come up: `baton down` cleans up, `baton up` starts anew\n"
    )


def test_a_request_is_aborted_by_its_id(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["abort", "acme/r-1"]) == 0
    assert [one.request_id for one in server.asked] == ["acme/r-1"]
    assert capsys.readouterr().out == "acme/r-1 is aborted\n"


def test_the_last_requests_and_one_of_them(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["requests"]) == 0
    assert capsys.readouterr().out == "no request has ended yet\n"
    failed = cluster_pb2.EndedRequest(
        request_id="acme/r-1",
        outcome="UNAVAILABLE",
        reason="UNAVAILABLE",
        message="gone\x1b[2J",
        prompt_tokens=24,
        attempts=2,
        timeline=pb.Timeline(
            spans=[pb.Span(name="decode.wait_pages", worker="decode-0\x07", duration_ms=400.0)],
            total_ms=412.0,
            prefill_reason="busy",
            counterfactuals=[
                pb.Counterfactual(change="decode.wait_pages", ttft_ms=12, total_ms=12),
                pb.Counterfactual(change="on_device", ttft_ms=405, total_ms=407.4),
            ],
            expected_ttft=pb.ExpectedTtft(p50_ms=30, p90_ms=60),
        ),
        causes=["400 ms: waited at decode-0 for free pages"],
    )
    server.ended = [failed]
    assert main(["requests", "--lines", "7"]) == 0
    [_, row] = capsys.readouterr().out.splitlines()
    assert row.split()[1:8] == ["acme/r-1", "UNAVAILABLE", "24", "0", "-", "412.0", "400"]
    assert main(["requests", "acme/r-1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "acme/r-1: UNAVAILABLE: gone\\x1b[2J",
        "24 prompt tokens (cached: none), 0 generated, 412.0 ms, attempts: 2",
        "prefill by decode: busy",
        "  400 ms: waited at decode-0 for free pages",
        "  with no wait at decode.wait_pages: 12 ms to the first token, 12 ms in all",
        "  with its prompt's blocks on the device: 405 ms to the first token, 407 ms in all",
        "  like requests: 30 ms to the first token, nine in ten within 60 ms",
        "",
        "at ms  took ms  worker     step",
        "  0.0    400.0  decode-0\\x07  wait_pages",
    ]
    assert [(one.limit, one.request_id) for one in server.asked] == [(20, ""), (7, ""), (1, "acme/r-1")]


def test_why_tells_the_cause_of_each_run_of_uncached_blocks(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    evicted = worker_pb2.MissRun(cause="evicted", how="to make room, by x\x07", age_s=90.0, first_token=32, blocks=2)
    differing = worker_pb2.MissRun(cause="differs", first_token=64, blocks=1)
    ended = cluster_pb2.EndedRequest(request_id="acme/r-1", prompt_tokens=80, misses=[evicted, differing])
    ended.cached_tokens.extend(tiers_to_pb({"host": 32}))
    server.ended = [ended]
    assert main(["why", "acme/r-1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "acme/r-1: 32 of 80 prompt tokens cached",
        "  2 blocks from token 32: evicted from the arena 90.0 s before the lookup: to make room, by x\\x07",
        "  1 block from token 64: its prompt differs from known ones within the block that begins at token 64"
        " (`baton why --prompt A --prompt B` names the token)",
    ]
    server.ended = [cluster_pb2.EndedRequest(request_id="r", prompt_tokens=80)]
    server.problems = ["files: tier files did not answer"]
    assert main(["why", "r"]) == 0
    out = capsys.readouterr().out
    assert "no uncached block has a cause" in out
    assert "problem: files: tier files did not answer, and may hold it" in out
    assert [one.request_id for one in server.asked] == ["acme/r-1", "r"]


def test_status_sums_the_causes_of_uncached_blocks(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.status = cluster_pb2.ClusterStatus(uncached_blocks={"evicted": 7, "never_seen": 12})
    assert main(["status"]) == 0
    assert "uncached  blocks in the last hour: 12 new, 7 evicted" in capsys.readouterr().out


def test_status_for_scripts(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.status = cluster_pb2.ClusterStatus(
        model="m",
        address="a:1",
        workers=[
            worker_pb2.WorkerStatus(
                worker_id="decode-0",
                role="decode",
                pid=5,
                state="ready",
                blocks=worker_pb2.BlockCounts(free=3, cached=1, total=4),
                computed_prompt_tokens=9,
            )
        ],
        tiers=[worker_pb2.TierStatus(tier="redis", state="up", counts={"hits": 2})],
    )
    assert main(["status", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["address"] == "a:1"
    assert status["pools"]["prefill"] == []
    (worker,) = status["pools"]["decode"]
    assert (worker["id"], worker["pid"], worker["state"], worker["computed_prompt_tokens"]) == (
        "decode-0",
        5,
        "ready",
        9,
    )
    assert worker["blocks"] == {"free": 3, "owned": 0, "published": 0, "cached": 1, "draining": 0, "total": 4}
    nothing = dict.fromkeys(
        ("misses", "errors", "corrupt", "forged", "written", "refused", "write_errors", "evicted"), 0
    )
    assert status["tiers"]["redis"] == {"state": "up", "hits": 2, **nothing}
    assert server.token == "secret"


def test_status_for_people(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.status = cluster_pb2.ClusterStatus(
        model="m",
        workers=[worker_pb2.WorkerStatus(worker_id=f"{role}-0", role=role) for role in ("decode", "prefill")],
        events=[cluster_pb2.ClusterEvent(age_s=3, text="worker decode-0 was lost")],
    )
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("prefill-0") < shown.index("decode-0")
    assert "3 s ago  worker decode-0 was lost" in shown


@pytest.mark.parametrize(("problems", "code"), [([], 0), (["decode-0: the books do not add up"], 1)])
def test_a_check_fails_with_its_problems(
    server: FakeServer, capsys: pytest.CaptureFixture[str], problems: list[str], code: int
) -> None:
    server.status = cluster_pb2.ClusterStatus(problems=problems)
    assert main(["status", "--check"]) == code
    shown = capsys.readouterr()
    assert server.asked[0].check
    assert all(problem in shown.out for problem in problems)
    assert ("all invariants hold" in shown.out) == (not problems)


def test_scale_leaves_a_pool_that_is_not_named(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "--decode", "3"]) == 0
    assert not server.asked[0].HasField("prefill")
    assert capsys.readouterr().out == "2 prefill and 3 decode workers\n"
