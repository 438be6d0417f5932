"""Keys of a real cluster with TLS: made, shown, revoked, and kept by a router that comes back."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from deploy.plan.authority import Authority
from tests.cluster.served_cluster import ServedCluster, wait_until
from tests.harness.fork_server import ForkServer

pytestmark = pytest.mark.cluster
AUTHORITY = Authority.make()
PUBLIC = "The old farmer walks to the market with his dog, and the dog walks behind the farmer to the market."
BODY = '{"prompt": "hello", "max_tokens": 1}'


def test_keys_made_while_the_cluster_runs_hold_at_both_doors_and_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: ForkServer
) -> None:
    monkeypatch.delenv("BATON_API_KEY", raising=False)
    cluster, cached = ServedCluster(f"k{os.getpid()}", tmp_path, forks=forks), []

    def key(verb: str, *arguments: str) -> str:
        return cluster.do(f"key {verb}", *arguments).strip()

    door = AUTHORITY.issue("door", "127.0.0.1")
    for name, text in (("cert", door.certificate_pem), ("key", door.key_pem), ("ca", AUTHORITY.certificate_pem)):
        (tmp_path / name).write_text(text)
    tls = ("--tls-cert", str(tmp_path / "cert"), "--tls-key", str(tmp_path / "key"))
    config = tmp_path / "public.toml"
    config.write_text(f'[router]\npublic_prefixes = ["{PUBLIC}"]\n')
    cluster.do(
        "up", "--config", str(config), "--prefill", "0", "--decode", "1", "--grpc-port", "0", "--redis-url", "off", *tls
    )
    try:
        address = cluster.status()["http_address"]
        assert status_of(address, "") == "000", "the certificate is not trusted yet"
        monkeypatch.setenv("CURL_CA_BUNDLE", str(tmp_path / "ca"))
        assert status_of(address, "") == "200"
        text = key("create", "--tenant", "acme", "--max-open-requests", "2", "--arena-share", "0.5")
        refused = cluster.run("generate", "hello")
        assert (refused.returncode, "wants a key in BATON_API_KEY" in refused.stderr) == (1, True)
        assert [status_of(address, shown) for shown in ("", text[:-1], text)] == ["401", "401", "200"]
        monkeypatch.setenv("BATON_API_KEY", text)
        assert ServedCluster(cluster.name, tmp_path, forks=forks).do("generate", "hello", "--max-tokens", "1")
        monkeypatch.setenv("BATON_OTHER_API_KEY", key("create", "--tenant", "globex"))
        told = ServedCluster(cluster.name, tmp_path, forks=forks).do("doctor")
        assert "nor by a key of globex" in told
        assert "the ports' certificates are good until" in told
        for name in ("BATON_API_KEY", "BATON_OTHER_API_KEY"):
            monkeypatch.setenv("BATON_API_KEY", os.environ[name])
            told = ServedCluster(cluster.name, tmp_path, forks=forks).do(
                "generate", f"{PUBLIC} {name}", "--max-tokens", "1", "--json"
            )
            cached.append(sum(json.loads(told)["usage"]["cached_tokens"].values()))
        assert cached[0] == 0 < cached[1], "the second tenant finds the public part"
        monkeypatch.setenv("BATON_API_KEY", text)
        for actor in ("router", "gateway-0"):
            cluster.actor(actor).kill()
        wait_until(lambda: status_of(address, text) == "200", "router and gateway are back")
        assert status_of(address, "") == "401"
        key("revoke", text.split("-")[1])
        assert status_of(address, text) == "401"
        assert cluster.workers("decode"), "the operator has the cluster's token"
    finally:
        cluster.run("down")
    assert cluster.left_behind() == []


def status_of(address: str, text: str) -> str:
    shown = ["-H", f"Authorization: Bearer {text}"] if text else []
    command = ["curl", "--silent", "--max-time", "30", "-o", "/dev/null", "-w", "%{http_code}", *shown]
    command += ["-H", "Content-Type: application/json", "-d", BODY, f"https://{address}/v1/completions"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
