import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from deploy.plan import machine
from wire.errors import ConfigError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("group", "memory_bytes"),
    [
        pytest.param({}, 15 * GIB, id="no container"),
        pytest.param({"memory.max": "max", "memory.current": "7"}, 15 * GIB, id="a container without a limit"),
        pytest.param(
            {
                "memory.max": f"{10 * GIB}",
                "memory.current": f"{7 * GIB}",
                "memory.stat": f"anon 1\ninactive_file {GIB}",
            },
            int(3.5 * GIB),
            id="a container that holds files in memory, which can go",
        ),
        pytest.param(
            {"memory.max": f"{GIB}", "memory.current": f"{GIB}", "memory.stat": "inactive_file 0"}, 0, id="a full one"
        ),
    ],
)
def test_memory_is_of_machine_and_container_and_a_twentieth_stays_free(
    group: dict[str, str], memory_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in group.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=20 * GIB, available=16 * GIB))
    assert machine.inspect_machine().memory_bytes == memory_bytes


def test_a_gpu_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_options: Any) -> None:
        raise subprocess.TimeoutExpired(command, 20)

    monkeypatch.setattr(shutil, "which", lambda _name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ConfigError, match="nvidia-smi did not answer within 20 s"):
        machine.inspect_machine()
