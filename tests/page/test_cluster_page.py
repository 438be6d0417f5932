"""The page of a real cluster that serves the demo model; makes the pictures in the folder of BATON_PAGE_SHOTS."""

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.served_cluster import ServedCluster
from tests.page.conftest import Look
from tests.page.test_page import require_clean

pytestmark = [pytest.mark.page, pytest.mark.timeout(300)]
FACTS = "Rooms: Ben 19, Anna 48, Clara 77, David 12, Emma 55. "
SIZES = ("--prefill", "2", "--decode", "2", "--grpc-port", "0")


def ask(url: str, question: int) -> str:
    """Asks over HTTP; returns the request's id in the router."""
    body = {"prompt": FACTS * (1 + question % 7) + f"Question {question}: which room has Clara?", "max_tokens": 40}
    headers = {"content-type": "application/json", "x-request-id": f"question-{question}"}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=60) as answer:
        told: dict[str, Any] = json.loads(answer.read())
    return str(told["id"])


def load_for_a_while(url: str) -> None:
    """Asks one question after another, while the page is looked at."""
    for question in range(24, 124):
        ask(url, question)


async def test_the_page_of_a_cluster(look: Look, tmp_path: Path) -> None:
    cluster = ServedCluster(f"u{os.getpid()}", tmp_path)
    try:
        cluster.do("up", *SIZES)
        url = f"http://{cluster.status()['http_address']}"
        command = [sys.executable, "-m", "cli", "key", "page", "--name", cluster.name]
        env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
        shown = await asyncio.to_thread(subprocess.run, command, env=env, capture_output=True, text=True, check=True)
        assert shown.stderr == f"{url}/ui\n"
        key = shown.stdout.strip()
        for start in range(0, 24, 6):
            await asyncio.gather(*(asyncio.to_thread(ask, url, start + place) for place in range(6)))
        shots = os.environ.get("BATON_PAGE_SHOTS", "")
        load = asyncio.create_task(asyncio.to_thread(load_for_a_while, url))
        seen = await look(f"{url}/ui", key, "question-23", shots=shots)
        await load
    finally:
        cluster.run("down")
    require_clean(seen)
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        assert f"{name}\tprefill" in seen["text"] or f"{name}\tdecode" in seen["text"]
    assert "decode.generate" in seen["one"]
    assert seen["first_data_s"] < 1.0
    assert cluster.left_behind() == []
