import shutil
import subprocess
from typing import Any

import pytest

from deploy.plan import machine
from wire.errors import ConfigError


def test_a_gpu_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_options: Any) -> None:
        raise subprocess.TimeoutExpired(command, 20)

    monkeypatch.setattr(shutil, "which", lambda _name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ConfigError, match="nvidia-smi did not answer within 20 s"):
        machine.inspect_machine()
