"""Requests that schemathesis draws from the gateway's own description: no server error, no answer off the schema."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.cluster.served_cluster import ServedCluster

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]
TIMEOUT_S = 800
MIN_CASES = 1000
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
)


def test_drawn_requests_are_answered_as_described(demo_cluster: ServedCluster, tmp_path: Path) -> None:
    program = Path(os.environ["BATON_CLIENTS_VENV"]) / "bin/schemathesis"
    address = demo_cluster.status()["http_address"]
    command = [str(program), "run", f"http://{address}/openapi.json", "--phases", "coverage,fuzzing"]
    options = ["--max-examples", "20", "--seed", "1", "--continue-on-failure", "--suppress-health-check", "all"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, *options, "--checks", ",".join(CHECKS)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout
    assert found[1] == found[2]
    assert int(found[1]) >= MIN_CASES
