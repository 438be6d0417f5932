import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.served_cluster import ServedCluster, wait_until
from wire.trust.key_ring import page_key

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def _lines_of(folder: Path, request_id: str) -> list[dict[str, Any]]:
    """What all processes have logged of a request."""
    texts = [path.read_text() for path in folder.glob("worker-*.err")]
    return [json.loads(line) for text in texts for line in text.splitlines() if request_id in line]


def _scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        return str(response.read().decode())


def test_a_request_leaves_a_line_and_is_counted(cluster: ServedCluster) -> None:
    answer = cluster.generate([1, 2, 3], "--max-tokens", "4", "--ignore-eos")
    logs = Path(cluster.do("status").splitlines()[-1].removeprefix("logs in "))
    wait_until(lambda: bool(_lines_of(logs, answer["request_id"])), "the request's line")
    (line,) = _lines_of(logs, answer["request_id"])
    assert (line["process"], line["level"], line["message"]) == ("router", "INFO", "request ended")
    assert (line["outcome"], line["prompt_tokens"], line["output_tokens"]) == ("OK", 3, 4)
    assert line["decode_worker"] == answer["workers"]["decode"]
    text = _scrape(cluster.status()["metrics_address"])
    assert 'baton_requests_total{outcome="OK"}' in text


def test_logs_are_found_by_the_names_of_processes(on_ray: ServedCluster) -> None:
    """Ray names the files."""
    on_ray.generate([1, 2, 3], "--max-tokens", "1")
    worker_id = next(iter(on_ray.workers("decode")))
    shown = on_ray.do("logs", "router", "--lines", "1000")
    assert '"process": "router"' in shown
    assert f'"process": "{worker_id}"' not in shown
    assert {line.partition(" | ")[0] for line in on_ray.do("logs").splitlines()} >= {"controller", "router"}
    refused = on_ray.run("logs", "decode-99")
    assert refused.returncode == 1
    assert {worker_id, "router"} <= set(re.split("[ ,\n]+", refused.stderr))


def test_scripts_find_each_address_in_the_status(cluster: ServedCluster) -> None:
    printed = json.loads(cluster.do("status", "--json"))
    assert printed.keys() == {*cluster.status(), "routers"}
    addresses = cluster.state()["addresses"]
    assert (printed["http_address"], printed["operator_address"]) == (addresses["http"], addresses["operator"])


def test_every_worker_is_in_one_scrape(cluster: ServedCluster) -> None:
    address = cluster.status()["metrics_address"]
    expected = {
        f'baton_worker_up{{role="{role}",worker="{worker_id}"}} 1.0'
        for role in ("prefill", "decode")
        for worker_id in cluster.workers(role)
    }
    assert len(expected) == 2
    wait_until(lambda: expected <= set(_scrape(address).splitlines()), "all workers in the metrics")


def test_the_page_reads_the_operators_service_with_the_key_it_is_shown(cluster: ServedCluster) -> None:
    answer = cluster.generate([1, 2, 3], "--max-tokens", "4", "--ignore-eos")
    url = f"http://{cluster.status()['http_address']}/ui/requests/{answer['request_id']}"
    headers = {"authorization": f"Bearer {page_key(cluster.state()['token'])}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as response:
        [ended] = json.loads(response.read())["requests"]
    assert (ended["outcome"], ended["decode"]) == ("OK", answer["workers"]["decode"])
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url, timeout=10)
