import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.baton_service import BatonService
from deploy.processes.process import record_own


def test_the_service_of_a_node_is_found_by_the_beginning_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_own(tmp_path, "node-1a2b3c4d")
    service = BatonService("test", None, 1, 1)
    monkeypatch.setattr(service, "state", lambda: SimpleNamespace(run_dir=str(tmp_path)))
    assert service.actor_pid("node") == os.getpid()
