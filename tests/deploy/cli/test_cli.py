import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from baton.request import make_request
from deploy.cli.__main__ import COMMANDS, main, make_parser
from deploy.cli.generate import read_options, read_prompt
from deploy.local.state import ClusterPhase, ClusterState, StateFile
from deploy.processes.process import ProcessRef
from wire.convert import tiers_to_pb
from wire.errors import InvalidRequest
from wire.pb import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc, worker_pb2
from wire.pb import inference_pb2 as pb
from wire.rpc import TOKEN_METADATA
from wire.rpc_status import to_status

RUN_DIR = "/tmp/baton-default-00000000"
GONE = ProcessRef(pid=2**22 + 1, started=1.0, boot="none")
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


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A server that the state of the default cluster points to."""
    fake = FakeServer()
    grpc_server = grpc.server(ThreadPoolExecutor(2))
    inference_pb2_grpc.add_InferenceServicer_to_server(fake, grpc_server)
    cluster_pb2_grpc.add_ClusterServicer_to_server(fake, grpc_server)
    address = f"127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
    grpc_server.start()
    _write_state(address)
    yield fake
    grpc_server.stop(None).wait(5)


def _write_state(address: str) -> None:
    state = ClusterState(
        "default", ClusterPhase.RUNNING, GONE, RUN_DIR, "secret", address=address, operator_address=address
    )
    StateFile("default").write(state)


def _request(*arguments: str) -> pb.GenerateRequest:
    args = make_parser().parse_args(["generate", *arguments])
    return make_request(read_prompt(args), read_options(args))


def test_no_command_loads_torch_or_ray_to_begin_with() -> None:
    program = "import sys, deploy.cli.__main__; print({'torch', 'ray', 'transformers'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "set()\n"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"usage: baton {command}" in shown
    assert len(shown.splitlines()) > 5


@pytest.mark.parametrize("command", [["generate", "x"], ["status"], ["scale", "--decode", "1"], ["drain", "decode-0"]])
def test_without_a_cluster_it_says_how_to_start_one(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 1
    assert capsys.readouterr().err == "baton: no cluster named default is running: start one with `baton up`\n"


def test_down_without_a_cluster_has_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["down", "--name", "none"]) == 0
    assert capsys.readouterr().out == "no cluster named none is running\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--decode", "0"], "pools.decode must be between"),
        (["--config", "/none.toml"], "cannot read /none.toml"),
        (["--name", "A/B"], "name must be"),
        (["--redis-url", "nonsense"], "redis.url must be"),
        (["--model", "/none"], "neither a folder nor a name on the hub"),
        (["--arena-bytes", "much"], "is not a size"),
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


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate"], "give either a text"),
        (["generate", "x", "--token-ids", "1"], "give either a text"),
        (["generate", "--token-ids", "1,x"], "token_ids: must be whole numbers"),
        (["generate", "--token-ids", f"{1 << 32}"], "token_ids: must be whole numbers"),
        (["generate", "x", "--top-k", f"{1 << 40}"], "sampling: "),
        (["scale"], "give --prefill N"),
        (["scale", "--prefill", "-1"], "prefill: must not be negative"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


def test_what_is_not_given_is_not_set() -> None:
    request = _request("hello")
    assert request.text == "hello"
    assert {name.name for name, _ in request.sampling_params.ListFields()} == {"temperature"}
    assert request.sampling_params.temperature == 0


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
        "cached_tokens": {"device": 0, "host": 16, "redis": 0},
    }
    assert answer["workers"] == {"prefill": "prefill-0", "decode": "decode-0"}
    assert answer["timeline"]["total_ms"] == 5
    assert answer["timeline"]["spans"][0]["counts"] == {"blocks_host": 2}
    assert answer["seed"] == 7


def test_a_prompt_is_read_from_stdin(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.read", lambda: "from a pipe", raising=False)
    assert main(["generate", "-", "--json"]) == 0
    assert server.asked[0].text == "from a pipe"


def test_what_the_server_refuses_is_one_line(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.error = InvalidRequest("n", "must be in [1, 16]")
    assert main(["generate", "x", "--n", "17"]) == 1
    assert capsys.readouterr().err == "baton: n: must be in [1, 16]\n"


def test_a_crashed_cluster_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    _write_state("127.0.0.1:1")
    assert main(["status"]) == 1
    assert "the cluster default crashed: `baton down` cleans up, `baton up` starts anew" in capsys.readouterr().err


def test_a_cluster_that_never_came_up_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    StateFile("default").write(ClusterState("default", ClusterPhase.STARTING, GONE, RUN_DIR, "secret"))
    assert main(["status"]) == 1
    assert capsys.readouterr().err == "baton: the cluster default has not come up: clean up with `baton down`\n"


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
    assert status["tiers"]["redis"] == {"state": "up", "hits": 2, "misses": 0, "errors": 0, "corrupt": 0, "written": 0}
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
