"""Figures of whole services, computed by hand; the checkpoint that both serve; a server that does not start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks import service_peers
from benchmarks.peer_process import EngineFailed
from benchmarks.service_peers import compare, make_served_model, tabulate, vllm_service
from cli.bench.latency import Record

SHELL = """#!/bin/sh
echo "no such model: $5" >&2
exit 1
"""


def record(*times_s: float) -> Record:
    return Record(0.0, 0.0, tuple((at_s, 1) for at_s in times_s), times_s[-1], prompt_len=8, cached_len=0)


ROUNDS = {
    "co-located": [[record(0.1, 0.2, 0.3)], [record(0.3, 0.5, 0.7)]],
    "vllm": [[record(0.2, 0.4, 0.6)], [record(0.2, 0.4, 0.6)]],
}


def test_ratios_to_the_peer_and_their_spread() -> None:
    ratios = compare({2.0: ROUNDS}, "vllm")
    assert ratios["2 requests/s: TTFT p50 ms, co-located / vllm"] == "1.00 (0.50 .. 1.50)"
    assert ratios["2 requests/s: ITL p50 ms, co-located / vllm"] == "0.75 (0.50 .. 1.00)"
    assert ratios["2 requests/s: tokens/s, co-located / vllm"] == "1.20 (0.86 .. 2.00)"


def test_table_has_a_column_a_service() -> None:
    table = tabulate({2.0: ROUNDS})
    assert table[0] == ["", "co-located", "vllm"]
    rows = {str(row[0]): row[1:] for row in table[1:]}
    assert rows["2 requests/s: TTFT p50 ms"] == pytest.approx([200, 200])
    assert rows["2 requests/s: ended / sent"] == ["2 / 2", "2 / 2"]


def test_a_checkpoint_without_a_tokenizer_gets_one_for_all_its_tokens(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"vocab_size": 300}))
    folder = make_served_model(source, tmp_path / "served")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.decode([*tokenizer.encode("A").ids, 299]) == "Aw299"
    assert [path.name for path in source.iterdir()] == ["config.json"]


def test_a_server_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(SHELL)
    python.chmod(0o755)
    monkeypatch.setattr(service_peers, "install_vllm", lambda venv: python)
    with (
        pytest.raises(EngineFailed, match="no such model: here"),
        vllm_service(tmp_path, Path("here"), 1, tmp_path, "float32"),
    ):
        pass


def test_help_is_printed_without_a_service() -> None:
    command = [sys.executable, service_peers.__file__, "--help"]
    assert "--rates" in subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
