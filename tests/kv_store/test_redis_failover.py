"""Servers that are there and of no use just then; a replica that takes over without the last of its writes."""

import re
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kv_store.tiers.redis_tier import RedisTier
from tests.harness.redis_process import RedisProcess
from tests.kv_store.names import LAYOUT, MAC_KEY, got_one, names_of, put_one
from wire.block_names import BlockName

pytestmark = pytest.mark.redis
AMPLE_S = 10.0
KEPT, LOST = names_of(16), names_of(16, first=1000)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def found(tier: RedisTier, names: list[BlockName]) -> list[bool]:
    return [got_one(tier, name) for name in names]


def server(folder: Path, *options: str) -> RedisProcess:
    folder.mkdir()
    return RedisProcess(folder, options)


def until_caught_up(replica: RedisProcess, num_keys: int) -> None:
    deadline = time.monotonic() + AMPLE_S
    with replica.client() as client:
        while client.dbsize() < num_keys:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_what_was_lost_on_the_way_is_a_miss_and_the_rest_is_right(tmp_path: Path) -> None:
    port = free_port()
    primary = server(tmp_path / "primary", "--port", str(port), "--repl-diskless-sync-delay", "0")
    replica = server(tmp_path / "replica", "--replicaof", f"127.0.0.1 {port}")
    try:
        primary.start()
        before = RedisTier(primary.url, LAYOUT, MAC_KEY, AMPLE_S)
        assert all(put_one(before, name) for name in KEPT)
        replica.start()
        until_caught_up(replica, len(KEPT))
        with replica.client() as client:
            client.replicaof("NO", "ONE")
        assert all(put_one(before, name) for name in LOST), "acknowledged by one that is not asked any more"
        primary.kill()
        after = RedisTier(replica.url, LAYOUT, MAC_KEY, AMPLE_S)
        assert found(after, KEPT) == [True] * len(KEPT)
        assert found(after, LOST) == [False] * len(LOST)
        assert all(put_one(after, name) for name in LOST)
        assert found(after, LOST) == [True] * len(LOST)
        assert (after.status().errors, after.status().corrupt) == (0, 0)
        before.close()
        after.close()
    finally:
        primary.kill()
        replica.kill()


class Refusal(socketserver.BaseRequestHandler):
    """The same error for every command."""

    error = b""

    def handle(self) -> None:
        while commands := self.request.recv(1 << 16):
            self.request.sendall(b"-%b\r\n" % self.error * len(re.findall(rb"\*\d+\r\n\$", commands)))


@contextmanager
def refusing(error: str) -> Iterator[str]:
    """The URL of a server that does."""
    handler = type("_Refusal", (Refusal,), {"error": error.encode()})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield f"redis://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        serving.join()


@pytest.mark.parametrize(
    "error",
    [
        "LOADING Redis is loading the dataset in memory",
        "MOVED 3999 127.0.0.1:6381",
        "CLUSTERDOWN The cluster is down",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "BUSY Redis is busy running a script.",
    ],
    ids=lambda error: error.split()[0],
)
def test_a_server_that_answers_with_errors_is_a_counted_miss(error: str) -> None:
    with refusing(error) as url:
        tier = RedisTier(url, LAYOUT, MAC_KEY, AMPLE_S)
        assert tier.exists([name.key for name in KEPT]) == [False] * len(KEPT)
        assert found(tier, KEPT) == [False] * len(KEPT)
        assert not put_one(tier, KEPT[0])
        tier.delete([KEPT[0].key])
        tier.close()
        assert tier.status().state == "broken"
        assert tier.status().errors >= 2
