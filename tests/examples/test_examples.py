"""The examples, and the programs of README.md and docs/library.md, run as they stand."""

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.harness.checkpoints import make_checkpoint
from wire.pb import inference_pb2 as pb
from wire.pb import inference_pb2_grpc as pb_grpc

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = make_checkpoint("llama-gqa", tmp_path)
    capsys.readouterr()
    run("in_process.py", str(checkpoint), monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert printed.startswith("The sun rises in the")
    assert "\nOnce upon a time" in printed
    assert len(printed) > len("The sun rises in the\nOnce upon a time\n") + 20


def printed_by_a_process(name: str, folder: Path) -> str:
    command = [sys.executable, str(EXAMPLES / name), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=EXAMPLES.parent, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_a_cache_of_transformers_is_restored_by_a_second_process(tmp_path: Path) -> None:
    first, second = (printed_by_a_process("prefix_store.py", tmp_path) for _ in range(2))
    assert first.startswith("0 of 53 tokens restored: ")
    assert len(first.partition(": ")[2].split()) == 32
    assert second == first.replace("0 of", "48 of", 1)


def test_blocks_of_the_engine_are_read_by_a_second_process(tmp_path: Path) -> None:
    first, second = (printed_by_a_process("engine_store.py", tmp_path) for _ in range(2))
    assert first == "0 blocks read, 3 written: ' parrot.'\n"
    assert second == "3 blocks read, 0 written: ' parrot.'\n"


class Parrot(pb_grpc.InferenceServicer):
    """Says the prompt back, word by word."""

    def Generate(  # noqa: N802 - named by the proto
        self, request: pb.GenerateRequest, context: Any
    ) -> Iterator[pb.GenerateResponse]:
        words = request.text.split()
        for word in words[: request.sampling_params.max_tokens or None]:
            yield pb.GenerateResponse(chunk=pb.Chunk(text=f"{word}!"))
        usage = pb.Usage(prompt_tokens=len(words), completion_tokens=2)
        timeline = pb.Timeline(total_ms=7.2)
        yield pb.GenerateResponse(complete=pb.Complete(choices=[pb.Choice()], usage=usage, timeline=timeline))


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    pb_grpc.add_InferenceServicer_to_server(Parrot(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(10)


def test_client(address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("client.py", "one two three", "--address", address, "--max-tokens", "2", monkeypatch=monkeypatch)
    assert capsys.readouterr().out == "one!two!\n3 tokens in, 2 out, 7 ms\n"


def programs_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / page).read_text(), re.DOTALL)


def test_programs_of_pages(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    [client], [engine, store, _] = programs_of("README.md"), programs_of("docs/library.md")
    assert "127.0.0.1:50051" in client
    exec(client.replace("127.0.0.1:50051", address))
    assert capsys.readouterr().out.startswith("The!old!farmer!walks!to!the!Pets:!Tom!")
    exec(engine)
    assert "41" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    exec(store)
    assert capsys.readouterr().out == "96\n"
