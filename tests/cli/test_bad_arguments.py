"""Arguments, files and stdin that are wrong: one line that names them, and the exit status for their kind."""

import argparse
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from cli import chat
from cli.__main__ import main, make_parser
from cli.generate import NO_TIMEOUT_S
from deploy.local.state import ClusterPhase, ClusterState
from deploy.processes.process import ProcessRef
from wire.rpc import MAX_MESSAGE_BYTES

TLS = ("--tls-cert", "/none", "--tls-key", "/none")
RUNNING, GONE = ClusterPhase.RUNNING, ProcessRef(pid=2**22 + 1, started=1.0, boot="none")
USAGE, CONFIGURATION, FAILED = 2, 78, 1
NO_UTF8 = "\udcff"
"""As Python hands on an argument of the byte ff."""
LONG = "9" * 5000
NOT_RUNNING = "no cluster named default is running"


def outcome(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Runs a command; returns its exit status and its only line on stderr."""
    with pytest.raises(SystemExit) as left:
        sys.exit(main(arguments))
    told = capsys.readouterr().err
    assert told.startswith("baton: ")
    assert told.count("\n") == 1
    assert told.endswith("\n")
    assert len(told) < 400
    return cast(int, left.value.code), told


def generate(*flags: str) -> list[str]:
    return ["generate", "x", *flags]


WRONG: list[tuple[list[str], int, str]] = [
    ([], USAGE, "COMMAND: see `baton --help`"),
    (["no\nne"], USAGE, "argument COMMAND: invalid choice"),
    (generate("y\nz"), USAGE, "unrecognized arguments: y?z: see `baton generate --help`"),
    (
        generate("--temprature", "0"),
        USAGE,
        "unrecognized arguments: --temprature 0 (did you mean --temperature?): see `baton generate --help`",
    ),
    (["up", "--prefil", "1"], USAGE, "(did you mean --prefill?): see `baton up --help`"),
    (
        ["up", "--port=80"],
        USAGE,
        "unrecognized arguments: --port=80 (did you mean --http-port?): see `baton up --help`",
    ),
    (["key", "list", "--nam", "a"], USAGE, "(did you mean --name?): see `baton key list --help`"),
    (["generate"], USAGE, "prompt: give either a text"),
    (generate("--token-ids", "1"), USAGE, "prompt: give either a text"),
    (["generate", NO_UTF8], USAGE, "argument prompt: must be UTF-8: see `baton generate --help`"),
    (["generate", "--token-ids", "1,x"], USAGE, "token_ids: must be whole numbers"),
    (["generate", "--token-ids", f"{1 << 32}"], USAGE, "token_ids: must be whole numbers"),
    (["generate", "--token-ids", LONG], USAGE, "token_ids: must be whole numbers"),
    (["generate", "--token-ids", NO_UTF8], USAGE, "argument --token-ids: must be UTF-8"),
    (generate("--stop", NO_UTF8), USAGE, "argument --stop: must be UTF-8"),
    (generate(*["--stop", "a"] * 9), USAGE, "stop: at most 8 strings"),
    (generate(*["--stop", "a"] * 4), FAILED, NOT_RUNNING),
    (
        generate("--seed", "1e3"),
        USAGE,
        "argument --seed: must be a whole number below 9223372036854775808, not '1e3'",
    ),
    (generate("--seed", LONG), USAGE, "argument --seed: must be a whole number"),
    (generate("--seed", f"{(1 << 63) - 1}"), FAILED, NOT_RUNNING),
    (generate("--top-k", f"{1 << 40}"), USAGE, "argument --top-k: must be a whole number below 2147483648"),
    (generate("--n", "+-1"), USAGE, "argument --n: must be a whole number"),
    (generate("--temperature", "nan"), USAGE, "argument --temperature: must be a number, not 'nan'"),
    (generate("--top-p", "much"), USAGE, "argument --top-p: must be a number, not 'much'"),
    *((generate("--timeout", bad), USAGE, "argument --timeout: must be a number") for bad in ("nan", "inf", "")),
    *((generate("--timeout", bad), USAGE, "argument --timeout: must be above 0") for bad in ("0", "-1", "1e9")),
    (generate("--timeout", f"{NO_TIMEOUT_S}"), FAILED, NOT_RUNNING),
    (generate("--name", "a\nb"), CONFIGURATION, r"name must be 1 to 16 of a-z, 0-9 and -"),
    (["status", "--name", NO_UTF8], CONFIGURATION, "name must be 1 to 16"),
    (["down", "--name", "../x"], CONFIGURATION, "name must be 1 to 16"),
    (["drain"], USAGE, "arguments are required: WORKER_OR_NODE: see `baton drain --help`"),
    (["requests", NO_UTF8], USAGE, "argument ID: must be UTF-8"),
    (["requests", "--lines", "0"], USAGE, "argument --lines: must be at least 1"),
    (["abort"], USAGE, "arguments are required: REQUEST_ID: see `baton abort --help`"),
    (["abort", NO_UTF8], USAGE, "argument REQUEST_ID: must be UTF-8"),
    (["drain", NO_UTF8], USAGE, "argument WORKER_OR_NODE: must be UTF-8"),
    (["scale"], USAGE, "scale: give --prefill N"),
    (["scale", "--decode", "1e3"], USAGE, "argument --decode: must be a whole number"),
    (["scale", "--decode", LONG], USAGE, "argument --decode: must be a whole number"),
    (["scale", "--decode", "0"], CONFIGURATION, "--decode must be between 1 and 64, not 0"),
    (["scale", "--decode", "65"], CONFIGURATION, "--decode must be between 1 and 64, not 65"),
    (["scale", "--prefill", "-1"], CONFIGURATION, "--prefill must be between 0 and 64, not -1"),
    (["bench"], FAILED, NOT_RUNNING),
    (["bench", "--rate", "0"], USAGE, "argument --rate: must be above 0, not 0"),
    (["bench", "--num-requests", "0"], USAGE, "argument --num-requests: must be at least 1, not 0"),
    (["bench", "--prefix-len", "-1"], USAGE, "argument --prefix-len: must be at least 0, not -1"),
    (["bench", "--slo", "ttft"], USAGE, "argument --slo: must be a number"),
    (["bench", "--slo", "e2e=1"], USAGE, "argument --slo: must be like ttft=1000,tpot=100"),
    (["bench", "--url", "localhost:8000"], USAGE, "url: must begin with http:// or https://"),
    (["bench", "--url", "http://[::1"], USAGE, "url: must be like http://127.0.0.1:8000/v1"),
    (["bench", "--url", "http://h:99999"], USAGE, "url: must be like"),
    (["bench", "--api-key", "a\r\nb", "--url", "http://h"], USAGE, "api-key: must be"),
    (["up", "--decode", "0"], CONFIGURATION, "--decode must be between 1 and 64, not 0"),
    (["up", "--decode", "65"], CONFIGURATION, "--decode must be between 1 and 64, not 65"),
    (["up", "--name", "A/B"], CONFIGURATION, "name must be"),
    (["up", "--name", ""], CONFIGURATION, "name must be"),
    (["up", "--model", ""], CONFIGURATION, "--model must be text without control characters, and not empty"),
    (["up", "--model", "a\0b"], CONFIGURATION, "--model must be text without control characters"),
    (["up", "--model", NO_UTF8], USAGE, "argument --model: must be UTF-8"),
    (["up", "--served-model-name", "n" * 257], CONFIGURATION, "--served-model-name must be of at most 256 characters"),
    (["up", "--model", "n" * 4097], CONFIGURATION, "--model must be of at most 4096 characters"),
    (
        ["up", "--model", "/none"],
        CONFIGURATION,
        "/none is no folder, GGUF file, name of `baton pull` or name on the hub",
    ),
    (
        ["up", "--model", "~nosuchuser/x"],
        CONFIGURATION,
        "~nosuchuser/x is no folder, GGUF file, name of `baton pull` or name on the hub",
    ),
    (["up", "--dtype", ""], USAGE, "argument --dtype: invalid choice: ''"),
    (["up", "--host", "0.0.0.0"], CONFIGURATION, "--host 0.0.0.0: without TLS, keys, prompts and answers can be"),
    (["up", "--host", "0.0.0.0", *TLS], CONFIGURATION, "0.0.0.0: without keys any machine there may use the model"),
    (["up", *TLS], CONFIGURATION, "/none, /none: not a certificate with its key"),
    (["up", *TLS[:2]], CONFIGURATION, "tls must be given with both certificate and key"),
    (["up", "--tls-client-ca", "/none"], CONFIGURATION, "tls must be given with both certificate and key"),
    (
        ["up", "--cors-origins", "https://a", "https://a/"],
        CONFIGURATION,
        "--cors-origins must be * or origins as browsers",
    ),
    (["up", "--host-names", "a.example:80"], CONFIGURATION, "--host-names must be names without ports"),
    (["up", "--host", "::"], CONFIGURATION, "--host must be an IPv4 address, not '::'"),
    (["up", "--insecure", "--host", "localhost"], CONFIGURATION, "--host must be an IPv4 address"),
    (["up", "--ray-address", ""], CONFIGURATION, "--ray-address must be text without control characters"),
    (["up", "--redis-url", ""], CONFIGURATION, "--redis-url must be text without control characters"),
    (["up", "--redis-url", "nonsense"], CONFIGURATION, "--redis-url must be own, off, or"),
    (["up", "--block-size", "1e3"], USAGE, "argument --block-size: must be a whole number"),
    (["up", "--metrics-port", LONG], USAGE, "argument --metrics-port: must be a whole number"),
    (["up", "--gpus", "nan"], USAGE, "argument --gpus: must be a number, not 'nan'"),
    (["up", "--arena-bytes", "much"], CONFIGURATION, "--arena-bytes must be a size like 512MiB"),
    (["up", "--pool-bytes", LONG], CONFIGURATION, "--pool-bytes must be a size like 512MiB"),
    (["up", "--config", "/none.toml"], CONFIGURATION, "cannot read /none.toml: No such file"),
    (["up", "--config", "~nosuchuser/x"], CONFIGURATION, "cannot read ~nosuchuser/x: No such file"),
    (["up", "--config", "/dev/zero"], CONFIGURATION, "/dev/zero must be a regular file"),
    (["up", "--config", ""], CONFIGURATION, ". must be a regular file"),
    (["up", "--config", f"/{NO_UTF8}"], CONFIGURATION, "--config must be a path without control characters"),
]


@pytest.mark.parametrize(("arguments", "status", "named"), WRONG)
def test_wrong_arguments(arguments: list[str], status: int, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    by_model = ["--grpc-port", "0", "--redis-url", "off"] if arguments[:2] == ["up", "--model"] else []
    told_status, told = outcome(arguments + by_model, capsys)
    assert named in told
    assert told_status == status


def flags_of_numbers() -> list[tuple[list[str], str]]:
    """Every flag that reads a number, with its command."""
    found: list[tuple[list[str], str]] = []

    def look(parser: argparse.ArgumentParser, words: list[str]) -> None:
        for action in vars(parser)["_actions"]:  # argparse lists them nowhere else
            if isinstance(action.choices, dict):
                for name, one in action.choices.items():
                    look(one, [*words, name])
            elif action.option_strings and action.type not in (None, str, Path):
                found.append((words, action.option_strings[-1]))

    look(make_parser(), [])
    return found


@pytest.mark.parametrize("number", ["\u0663", "1\u0663", "\uff11", "1_0", "0x1"])
def test_a_number_has_ascii_digits_at_every_flag(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = flags_of_numbers()
    assert len(flags) > 40
    taken = []
    for words, flag in flags:
        status, told = outcome([*words, f"{flag}={number}"], capsys)
        if status != USAGE or f"argument {flag}: " not in told:
            taken.append((words, flag, told))
    assert taken == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["up", "--pool-bytes", "\u0663GiB"],
        ["up", "--redis-url", "redis://h/\u0663"],
        ["up", "--ray-address", "h:\u0663"],
        ["up", "--http-port", "\u0663"],
        ["generate", "--token-ids", "\u0663"],
        ["size", "--memory", "\u0663GiB"],
        ["bench", "--slo", "ttft=\u0663"],
    ],
)
def test_numbers_within_texts_have_ascii_digits(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = outcome(arguments, capsys)
    assert status in (USAGE, CONFIGURATION)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"name = '\xff'", "is not UTF-8"),
        (b"name = ", "is not TOML: Invalid value (at end of document)"),
        pytest.param(b"x = " + b"[" * 3000, "is nested too deeply", id="nested"),
        pytest.param(b"[" + b".".join([b"a"] * 3000) + b"]", "a: unknown", id="tables in each other"),
        (b'"a\\nb" = 1', r"a\nb: unknown"),
        (b"[pools]\ndecode = '1'", "baton: pools.decode: must be a whole number, not '1'"),
        (b"[pools]\ndecode = 65", "baton: pools.decode must be between 1 and 64, not 65"),
        (b"[batch]\nmax_running = 0", "baton: batch.max_running must be positive"),
    ],
)
def test_wrong_files(content: bytes, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "baton.toml").write_bytes(content)
    status, told = outcome(["up", "--config", str(tmp_path / "baton.toml")], capsys)
    assert named in told
    assert status == CONFIGURATION


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_configuration_that_is_no_regular_file(
    make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "baton.toml")
    status, told = outcome(["up", "--config", str(tmp_path / "baton.toml")], capsys)
    assert "baton.toml must be a regular file" in told
    assert status == CONFIGURATION


@pytest.mark.parametrize(
    ("given", "status", "named"),
    [
        (b"from a pipe", FAILED, NOT_RUNNING),
        (b"\xff", USAGE, "prompt: stdin must be UTF-8"),
        pytest.param("é".encode() * (MAX_MESSAGE_BYTES // 2 + 1), USAGE, "prompt: longer than 4 MiB", id="too long"),
        pytest.param(b"a" * MAX_MESSAGE_BYTES, USAGE, "prompt: the request has", id="too long as a message"),
        pytest.param(b"a" * (MAX_MESSAGE_BYTES - 100), FAILED, NOT_RUNNING, id="just short enough"),
    ],
)
def test_stdin(
    given: bytes, status: int, named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(given))
    monkeypatch.setattr("sys.stdin", stdin)
    told_status, told = outcome(["generate", "-"], capsys)
    assert named in told
    assert told_status == status
    assert stdin.buffer.tell() <= MAX_MESSAGE_BYTES + 1


@pytest.mark.parametrize(
    ("given", "status", "named"),
    [
        (b"hello\n\xff\n", USAGE, "prompt: stdin must be UTF-8"),
        pytest.param(b"hello\n" + b"a" * 5_000_000, USAGE, "prompt: longer than 4 MiB", id="too long"),
    ],
)
def test_lines_of_a_chat(
    given: bytes, status: int, named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        chat,
        "find_cluster",
        lambda name: ClusterState(
            name=name, phase=RUNNING, command=GONE, run_dir="/", token="", model="m", ray_address="h:1"
        ),
    )
    monkeypatch.setattr(chat, "_answer", lambda _client, messages, _options: asked.append(messages[-1]["content"]))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
    told_status, told = outcome(["chat"], capsys)
    assert named in told
    assert told_status == status
    assert asked == ["hello"]


def test_a_stdin_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "x").open("w") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert outcome(["generate", "-"], capsys) == (USAGE, "baton: prompt: stdin cannot be read\n")
