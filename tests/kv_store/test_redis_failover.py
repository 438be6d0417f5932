"""A replica that takes over from a server that died, without the last of its writes."""

import socket
import time
from pathlib import Path

import pytest

from kv_store.redis_tier import RedisTier
from tests.kv_store.names import LAYOUT, names_of, payload_of
from tests.redis_process import RedisProcess
from wire.frame import checksum_of
from wire.keys import BlockName

pytestmark = pytest.mark.redis
AMPLE_S = 10.0
KEPT, LOST = names_of(16), names_of(16, first=1000)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def put(tier: RedisTier, name: BlockName) -> bool:
    payload = memoryview(payload_of(name))
    return tier.put(name, payload, checksum_of(payload))


def found(tier: RedisTier, names: list[BlockName]) -> list[bool]:
    """What is found is right."""
    answers = []
    for name in names:
        into = bytearray(LAYOUT.payload_bytes)
        answers.append(tier.get(name, memoryview(into)) is not None)
        assert not answers[-1] or into == payload_of(name)
    return answers


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
        before = RedisTier(primary.url, LAYOUT, AMPLE_S)
        assert all(put(before, name) for name in KEPT)
        replica.start()
        until_caught_up(replica, len(KEPT))
        with replica.client() as client:
            client.replicaof("NO", "ONE")
        assert all(put(before, name) for name in LOST), "acknowledged by one that is not asked any more"
        primary.kill()
        after = RedisTier(replica.url, LAYOUT, AMPLE_S)
        assert found(after, KEPT) == [True] * len(KEPT)
        assert found(after, LOST) == [False] * len(LOST)
        assert all(put(after, name) for name in LOST)
        assert found(after, LOST) == [True] * len(LOST)
        assert (after.status().errors, after.status().corrupt) == (0, 0)
        before.close()
        after.close()
    finally:
        primary.kill()
        replica.kill()
