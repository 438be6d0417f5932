import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.baton_service import BatonService
from deploy.processes.process import record_own
from tests.cluster.served_cluster import wait_until

KILLED = """
import sys
import time
from benchmarks.baton_service import end_with_this_process
end_with_this_process(["touch", sys.argv[1]])
print("ready", flush=True)
time.sleep(60)
"""


def test_a_service_ends_with_a_process_that_is_killed_with_its_group(tmp_path: Path) -> None:
    mark = tmp_path / "down"
    command = [sys.executable, "-c", KILLED, str(mark)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert not mark.exists()
        os.killpg(process.pid, signal.SIGKILL)
    wait_until(mark.exists, "the command has run")


def test_the_service_of_a_node_is_found_by_the_beginning_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_own(tmp_path, "node-1a2b3c4d")
    service = BatonService("test", None, 1, 1)
    monkeypatch.setattr(service, "state", lambda: SimpleNamespace(run_dir=str(tmp_path)))
    assert service.actor_pid("node") == os.getpid()
