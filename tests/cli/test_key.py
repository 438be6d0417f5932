import errno
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from cli.__main__ import main, make_parser
from cli.key import run_create
from deploy.local.key_file import KeyFile
from deploy.local.state import ClusterPhase, ClusterState, StateFile
from deploy.processes.process import ProcessRef
from tests.cli.test_cli import GONE, FakeServer
from wire.errors import Unauthenticated, Unavailable
from wire.pb import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc
from wire.pools import Addresses
from wire.rpc import TOKEN_METADATA, to_status
from wire.trust.key_ring import Allowance, KeyRing, Scope


class KeyServer(FakeServer):
    """Counts reloads of keys, and remembers what calls have shown."""

    num_reloads = 0
    failure = ""
    shown: tuple[Any, ...] = ()

    def ReloadKeys(self, request: cluster_pb2.ReloadKeysRequest, context: Any) -> cluster_pb2.ReloadKeysResponse:  # noqa: N802
        assert dict(context.invocation_metadata())[TOKEN_METADATA] == "secret"
        self.num_reloads += 1
        if self.failure:
            context.abort_with_status(rpc_status.to_status(to_status(Unavailable(self.failure))))
        return cluster_pb2.ReloadKeysResponse()

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        self.shown = tuple(value for name, value in context.invocation_metadata() if name == "authorization")
        return super().Generate(request, context)


@pytest.fixture
def server(run_folder: Path) -> Iterator[KeyServer]:
    fake, grpc_server = KeyServer(), grpc.server(ThreadPoolExecutor(2))
    cluster_pb2_grpc.add_ClusterServicer_to_server(fake, grpc_server)
    inference_pb2_grpc.add_InferenceServicer_to_server(fake, grpc_server)
    address = f"127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
    grpc_server.start()
    addresses = Addresses(address, address, address)
    me, running = ProcessRef.of(os.getpid()), ClusterPhase.RUNNING
    StateFile("default").write(
        ClusterState(
            name="default",
            phase=running,
            command=GONE,
            run_dir=str(run_folder),
            token="secret",
            addresses=addresses,
            redis=me,
        )
    )
    yield fake
    grpc_server.stop(None).wait(5)


def create(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["key", "create", *arguments]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def ring() -> KeyRing:
    return KeyRing(KeyFile.of("default").read())


def test_a_key_is_printed_once_and_kept_as_a_digest_for_its_user_alone(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--requests-per-minute", "60", "--tokens-per-minute", "9000", "--max-open-requests", "4"]
    text = create(capsys, "--tenant", "acme", *limits, "--arena-share", "0.5")
    path = KeyFile.of("default").path
    assert path.stat().st_mode & 0o777 == 0o600
    assert text.rpartition("-")[2] not in path.read_text()
    key = ring().admit([f"Bearer {text}"], Scope.GENERATE)
    assert (key.tenant, key.scopes, key.allowance) == ("acme", (Scope.GENERATE,), Allowance(60, 9000, 4, 0.5))


def test_a_cluster_without_keys_says_so(server: KeyServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "list", "--name", "nosuch"]) == main(["key", "list"]) == 0
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "nosuch has no keys, and no cluster of that name runs",
        "default has no keys, and calls need none",
    ]


def test_keys_are_listed_and_revoked(capsys: pytest.CaptureFixture[str]) -> None:
    first = create(capsys, "--tenant", "acme", "--scope", "metrics", "--scope", "operate")
    second = create(capsys, "--tenant", "beta")
    assert main(["key", "revoke", first.split("-")[1]]) == 0
    assert main(["key", "list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[1:] for line in listed[1:]] == [
        ["acme", "metrics", "operate", "revoked"],
        ["beta", "generate"],
    ]
    with pytest.raises(Unauthenticated):
        ring().admit([f"Bearer {first}"], Scope.METRICS)
    assert ring().admit([f"Bearer {second}"], Scope.GENERATE).tenant == "beta"
    assert main(["key", "revoke", second.split("-")[1]]) == 0
    with pytest.raises(Unauthenticated):
        ring().admit([], Scope.GENERATE)


def test_a_cluster_that_runs_goes_by_each_change(server: KeyServer, capsys: pytest.CaptureFixture[str]) -> None:
    text = create(capsys, "--tenant", "acme")
    assert server.num_reloads == 1
    assert main(["key", "revoke", text.split("-")[1]]) == 0
    assert server.num_reloads == 2


def test_a_change_says_whether_it_is_in_force(server: KeyServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "create", "--tenant", "acme"]) == 0
    told = capsys.readouterr()
    assert told.err == "in force\n"
    server.failure = "the controller does not answer"
    key_id = told.out.split("-")[1]
    assert main(["key", "revoke", key_id]) == 1
    told = capsys.readouterr()
    assert "written, and not in force yet: " in told.err
    assert "the controller does not answer" in told.err
    assert "the cluster goes by it as soon as it can" in told.err
    assert main(["key", "create", "--tenant", "acme"]) == 1
    told = capsys.readouterr()
    assert told.out.startswith("baton-")
    assert "written, and not in force yet" in told.err
    assert main(["key", "create", "--tenant", "acme", "--name", "nosuch"]) == 0
    assert capsys.readouterr().err == "in force from the next start: no cluster named nosuch runs\n"


class FullDisk(io.StringIO):
    """A standard output that takes nothing: as it is written, or only as it is flushed."""

    def __init__(self, method: str) -> None:
        super().__init__()
        setattr(self, method, self._refuse)

    def _refuse(self, *_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("method", ["write", "flush"])
def test_a_key_that_was_not_printed_is_not_made(
    server: KeyServer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", FullDisk(method))
        with pytest.raises(OSError, match="No space"):
            run_create(make_parser().parse_args(["key", "create", "--tenant", "acme"]))
    assert KeyFile.of("default").read().keys == ()
    assert server.num_reloads == 0


@pytest.mark.parametrize(("unbuffered", "told"), [("1", "the output"), ("", "stdout")])
def test_a_key_for_a_full_device_is_not_made(unbuffered: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    command = [sys.executable, "-m", "cli", "key", "create", "--tenant", "acme"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        f"no key was made: it could not be printed\nbaton: {told}: No space left on device\n",
    )
    assert KeyFile.of("default").read().keys == ()


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["create", "--tenant", "a/b"], 78, "a tenant must be 1 to 32 of a-z"),
        (["create", "--tenant", "a", "--arena-share", "2"], 78, "a share of the arena must be above 0"),
        (["create", "--tenant", "a", "--requests-per-minute", "0"], 78, "must be at least 1"),
        (["create"], 2, "--tenant"),
        (["create", "--tenant", "a", "--scope", "all"], 2, "invalid choice"),
        (["revoke", "00000000"], 2, "no key has it"),
        (["list", "--name", "A/B"], 78, "name must be"),
    ],
)
def test_wrong_words(arguments: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", *arguments]) == code
    assert told in capsys.readouterr().err
    assert not KeyFile.of("default").path.exists()


@pytest.mark.parametrize(("content", "mode"), [("{", 0o600), ('{"keys": [{}]}', 0o600), ('{"keys": []}', 0o644)])
def test_a_file_that_cannot_be_used(content: str, mode: int, capsys: pytest.CaptureFixture[str]) -> None:
    path: Path = KeyFile.of("default").path
    path.write_text(content)
    path.chmod(mode)
    for command in (["key", "list"], ["key", "create", "--tenant", "a"], ["up", "--redis-url", "off"]):
        assert main(command) == 78
        assert ".keys.json" in capsys.readouterr().err
    assert path.read_text() == content


def test_commands_show_the_key_of_their_environment(
    server: KeyServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x"]) == 0
    assert not server.shown
    monkeypatch.setenv("BATON_API_KEY", "baton-1")
    assert main(["generate", "x"]) == 0
    assert server.shown == ("Bearer baton-1",)
    monkeypatch.setenv("BATON_API_KEY", "a\nb")
    assert main(["generate", "x"]) == 2
    assert "api_key: must be of printable ASCII" in capsys.readouterr().err
