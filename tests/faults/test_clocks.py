"""Clocks that jump: nothing that runs out is told by the time of day, and no time of day travels between processes."""

import ast
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.rest import at_rest
from tests.harness.answer import ask
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.known_model import MODEL
from wire.pb import cluster_pb2, inference_pb2, worker_pb2

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "cli",
    "decode_worker",
    "deploy",
    "engine",
    "kernels",
    "kv_store",
    "prefill_worker",
    "router",
    "text",
    "wire",
    "worker",
)
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}


SHOWN = {Path("cli/doctor.py"), Path("router/observe/recent_requests.py"), Path("router/observe/traces.py")}
"""`baton doctor` compares clocks; the last requests and traces show when they were. Nothing is decided by these."""
OF_FILES = {Path("kv_store/tiers/folder.py")}
"""A file's last use is a time of day, as it outlives processes: its time to live is counted by it, and nothing else."""


def wall_clocks_in(path: Path) -> Iterator[str]:
    """Where a module reads the time of day, by whatever name it imported it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ".".join(ast.unparse(node).split(".")[-2:]) in WALL_CLOCKS:
            yield f"{path}:{node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.ImportFrom) and node.module == "time" and {"time", "time_ns"} & _names(node):
            yield f"{path}:{node.lineno}: {ast.unparse(node)}"


def _names(node: ast.ImportFrom) -> set[str]:
    return {alias.name for alias in node.names}


def test_leases_deadlines_and_waits_are_told_by_monotonic_clocks() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    files = [path for path in files if path.relative_to(ROOT) not in SHOWN | OF_FILES]
    assert len(files) > 100
    assert [found for path in files for found in wall_clocks_in(path)] == []


@pytest.mark.parametrize(
    "source", ["import time\ntime.time()", "from datetime import datetime\ndatetime.now()", "from time import time"]
)
def test_such_a_clock_would_be_found(source: str, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(source)
    assert len(list(wall_clocks_in(module))) == 1


@pytest.mark.parametrize("module", [cluster_pb2, inference_pb2, worker_pb2])
def test_what_travels_between_processes_has_no_time_of_day(module: Any) -> None:
    """Deadlines go as the time that is left, in gRPC's own header; spans count from a call's arrival."""
    for message in module.DESCRIPTOR.message_types_by_name.values():
        for field in message.fields:
            assert field.message_type is None or "Timestamp" not in field.message_type.name, field.full_name
            assert not field.name.endswith(("_at", "_at_s", "deadline", "timestamp")), field.full_name


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
async def test_a_jump_ends_no_request_and_no_hold(jump_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    time_of_day = time.time
    async with FaultyCluster.running(MODEL, 1, 1) as cluster:
        cluster.models["d0"].pause()
        reader = cluster.open(ask(range(100), 60), time_left_s=20.0)
        await reader.read_tokens(1)
        monkeypatch.setattr(time, "time", lambda: time_of_day() + jump_s)
        assert cluster.directory.records.status().num_holds == 1
        cluster.models["d0"].go_on()
        [choice] = await reader.read_all()
        assert choice.token_ids == MODEL.oracle(range(100), 60)
        await at_rest(cluster)
