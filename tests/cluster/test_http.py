"""HTTP of a real cluster, with the demo model: curl's requests, and the death of the gateway."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.served_cluster import ServedCluster, wait_until

pytestmark = pytest.mark.cluster
QUESTION = "Rooms: Ben 19, Anna 48, Clara 77, David 12, Emma 55. Question: which room has Clara?"


def test_curl_is_answered_and_a_gateway_that_dies_comes_back(tmp_path: Path) -> None:
    cluster = ServedCluster(f"h{os.getpid()}", tmp_path)
    cluster.do("up", "--prefill", "1", "--decode", "1", "--grpc-port", "0", "--redis-url", "off")
    try:
        address = cluster.status()["http_address"]
        chat = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        answer = curl(address, "/v1/chat/completions", chat)
        assert json.loads(answer)["choices"][0]["message"]["content"].strip() == "77."
        stream = curl(address, "/v1/completions", {"prompt": QUESTION, "temperature": 0, "stream": True})
        *events, done = stream.removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        assert "".join(json.loads(one[6:])["choices"][0]["text"] for one in events).strip() == "77."
        tokens = json.loads(curl(address, "/tokenize", {"messages": chat["messages"]}))["tokens"]
        assert cluster.generate(tokens)["text"].strip() == "77."
        assert "baton_generation_tokens_total" in curl(address, "/metrics")

        cluster.actor("gateway").kill()
        wait_until(lambda: curl(address, "/ready", check=False) == "{}", "the gateway is back")
        assert json.loads(curl(address, "/v1/chat/completions", chat))["usage"]["prompt_tokens"]
        assert cluster.status()["http_address"] == address
    finally:
        cluster.run("down")
    assert cluster.left_behind() == []


def curl(address: str, path: str, body: Any = None, *, check: bool = True) -> str:
    data = ["-H", "Content-Type: application/json", "-d", json.dumps(body)] if body is not None else []
    command = ["curl", "--silent", "--show-error", "--max-time", "30", *data, f"http://{address}{path}"]
    return subprocess.run(command, capture_output=True, text=True, check=check).stdout
