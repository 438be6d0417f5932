import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from cli.__main__ import main
from deploy.local.state import ClusterPhase, ClusterState, StateFile
from deploy.processes.process import ProcessRef
from tests.cli.test_cli import GONE, FakeServer
from wire.pb import cluster_pb2, cluster_pb2_grpc
from wire.pb import inference_pb2 as pb
from wire.pools import Addresses
from wire.rpc import TOKEN_METADATA


class CacheServer(FakeServer):
    """Remembers what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, cluster_pb2.CacheRequest]] = []
        self.contents = cluster_pb2.CacheContents()
        self.compared: list[cluster_pb2.ComparePromptsRequest] = []
        self.comparison = cluster_pb2.PromptComparison()

    def ListCache(self, request: cluster_pb2.CacheRequest, context: Any) -> cluster_pb2.CacheContents:  # noqa: N802
        return self._answer("list", request, context)

    def ClearCache(self, request: cluster_pb2.CacheRequest, context: Any) -> cluster_pb2.CacheContents:  # noqa: N802
        return self._answer("clear", request, context)

    def ComparePrompts(  # noqa: N802
        self, request: cluster_pb2.ComparePromptsRequest, context: Any
    ) -> cluster_pb2.PromptComparison:
        self.compared.append(request)
        return self.comparison

    def _answer(self, what: str, request: cluster_pb2.CacheRequest, context: Any) -> cluster_pb2.CacheContents:
        assert dict(context.invocation_metadata())[TOKEN_METADATA] == "secret"
        self.asked.append((what, request))
        return self.contents


@pytest.fixture
def server(run_folder: Path) -> Iterator[CacheServer]:
    fake, grpc_server = CacheServer(), grpc.server(ThreadPoolExecutor(2))
    cluster_pb2_grpc.add_ClusterServicer_to_server(fake, grpc_server)
    address = f"127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
    grpc_server.start()
    me, addresses = ProcessRef.of(os.getpid()), Addresses(address, address, address)
    StateFile("default").write(
        ClusterState(
            name="default",
            phase=ClusterPhase.RUNNING,
            command=GONE,
            run_dir=str(run_folder),
            token="secret",
            addresses=addresses,
            redis=me,
        )
    )
    yield fake
    grpc_server.stop(None).wait(5)


ROWS = (
    cluster_pb2.CacheRow(
        tier="host", tenant="acme", model="m", blocks=3, bytes=3072, newest_s=4, oldest_s=90, share=0.25
    ),
    cluster_pb2.CacheRow(tier="host", tenant="de\x1b[31mfault", model="m", blocks=1, bytes=1024),
    cluster_pb2.CacheRow(tier="files", blocks=2, bytes=2048),
)


def test_a_table_has_each_tenant_its_part_and_its_share(
    server: CacheServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.contents = cluster_pb2.CacheContents(rows=ROWS)
    assert main(["cache", "ls"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == [
        "host",
        "-",
        "acme",
        "m",
        "3",
        "3",
        "KiB",
        "75",
        "%",
        "25",
        "%",
        "4",
        "s",
        "ago",
        "90",
        "s",
        "ago",
    ]
    assert lines[2][2] == "de\\x1b[31mfault"
    assert lines[3][:5] == ["files", "-", "-", "-", "2"]
    assert server.asked == [("list", cluster_pb2.CacheRequest())]


def test_nothing_held_is_told(server: CacheServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "ls", "--tenant", "acme", "--model", "m"]) == 0
    assert capsys.readouterr().out == "no block is held\n"
    assert server.asked == [("list", cluster_pb2.CacheRequest(tenant="acme", model="m"))]


def test_a_dry_run_lists_and_a_clear_clears(server: CacheServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "clear", "--everything", "--dry-run"]) == 0
    assert main(["cache", "clear", "--everything"]) == 0
    assert main(["cache", "clear", "--prompt", "once"]) == 0
    assert server.asked == [
        ("list", cluster_pb2.CacheRequest()),
        ("clear", cluster_pb2.CacheRequest(everything=True)),
        ("clear", cluster_pb2.CacheRequest(text="once")),
    ]


def test_problems_are_told_and_fail_the_command(server: CacheServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.contents = cluster_pb2.CacheContents(dropped_pages=5, prompt_blocks=7, problems=["redis: away"])
    assert main(["cache", "clear", "--tenant", "acme"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "the prompt has 7 blocks",
        "5 cached pages of workers dropped",
        "problem: redis: away, and may hold more",
    ]


@pytest.mark.parametrize("text", ["1 2 3", "[1, 2, 3]", "1,2\n3\n"])
def test_token_ids_are_read_from_a_file(text: str, server: CacheServer, tmp_path: Path) -> None:
    path = tmp_path / "ids"
    path.write_text(text)
    assert main(["cache", "ls", "--token-ids", str(path)]) == 0
    assert server.asked == [("list", cluster_pb2.CacheRequest(token_ids=pb.TokenIds(ids=[1, 2, 3])))]


@pytest.mark.parametrize("text", ["1 -2", "1.5", "a", "99999999999", "\u0661"])
def test_a_file_of_other_things_is_refused(
    text: str, server: CacheServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ids"
    path.write_text(text)
    assert main(["cache", "ls", "--token-ids", str(path)]) == 2
    assert "whole numbers" in capsys.readouterr().err
    assert server.asked == []


@pytest.mark.parametrize(
    "arguments", [["clear"], ["clear", "--everything", "--tenant", "a"], ["ls", "--prompt", "a", "--token-ids", "b"]]
)
def test_a_clear_wants_to_be_told_what(arguments: list[str], server: CacheServer) -> None:
    assert main(["cache", *arguments]) == 2
    assert server.asked == []


def test_a_file_that_is_not_there_is_told(server: CacheServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "ls", "--token-ids", "/nosuch"]) == 1
    assert "/nosuch" in capsys.readouterr().err


def test_two_prompts_are_compared(server: CacheServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.comparison = cluster_pb2.PromptComparison(
        first_tokens=20, second_tokens=30, shared_tokens=17, first_text="a Mon\x1bday", second_text="a Tue",
        block_size=16, shared_blocks=1, problems=["p0: away"],
        held=[cluster_pb2.CacheRow(tier="host", node_id="n1", places=[5, 0, 1, 2, 7])],
    )  # fmt: skip
    assert main(["why", "--prompt", "A", "--prompt", "B", "--tenant", "acme"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "the first 17 of 20 and 30 tokens are the same",
        "they differ from token 17 on:",
        "  A: ...'a Mon\\x1bday'...",
        "  B: ...'a Tue'...",
        "1 blocks of 16 tokens have one name in both",
        "  host of n1: blocks 0 to 2, 5, 7",
        "problem: p0: away, and may hold more",
    ]
    assert server.compared == [cluster_pb2.ComparePromptsRequest(tenant="acme", first="A", second="B")]


@pytest.mark.parametrize("arguments", [[], ["--prompt", "a"], ["r", "--prompt", "a", "--prompt", "b"]])
def test_why_wants_a_request_or_two_prompts(arguments: list[str], server: CacheServer) -> None:
    assert main(["why", *arguments]) == 2
    assert server.compared == []
