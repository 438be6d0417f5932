"""What a Redis server can do to us."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from kv_store.tiers.redis_tier import RedisTier
from tests.harness.fake_clock import FakeClock
from tests.harness.redis_process import RedisProcess
from tests.kv_store.names import LAYOUT, MAC_KEY, got_one, names_of, put_one
from wire.errors import ConfigError

pytestmark = pytest.mark.redis
[NAME] = names_of(4)
AMPLE_S = 10.0
Launch = Callable[..., RedisProcess]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    servers: list[RedisProcess] = []

    def start(*options: str, password: str = "") -> RedisProcess:
        server = RedisProcess(tmp_path, options, password)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.kill()


def tier_of(server: RedisProcess, clock: FakeClock | None = None, timeout_s: float = AMPLE_S) -> RedisTier:
    return RedisTier(server.url, LAYOUT, MAC_KEY, timeout_s, clock or FakeClock())


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + AMPLE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_killed_every_call_is_a_miss_until_it_answers_a_probe(launch: Launch) -> None:
    server, clock = launch(), FakeClock()
    tier = tier_of(server, clock)
    assert put_one(tier, NAME)
    server.kill()
    assert not got_one(tier, NAME)
    assert tier.exists([NAME.key, NAME.key]) == [False, False]
    assert not put_one(tier, NAME)
    wait_until(lambda: tier.status().state == "broken")
    assert not got_one(tier, NAME)
    assert (tier.status().errors, tier.status().misses) == (3, 2)
    clock.now += 2.0
    assert not got_one(tier, NAME)
    wait_until(lambda: tier.status().errors == 4)
    server.start()
    assert not got_one(tier, NAME)
    clock.now += 2.0
    assert not put_one(tier, NAME), "the probe is made beside the caller"
    wait_until(lambda: tier.status().state == "up")
    assert put_one(tier, NAME)
    assert got_one(tier, NAME)
    assert tier.status().errors == 4
    tier.close()


def test_started_late_it_is_used_from_then_on(tmp_path: Path, launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    tier = RedisTier(f"unix://{tmp_path}/redis.sock", LAYOUT, MAC_KEY, AMPLE_S, clock)
    assert "does not answer yet" in caplog.text
    launch()
    assert put_one(tier, NAME)
    assert got_one(tier, NAME)
    assert tier.status().errors == 0
    tier.close()


def test_stopped_it_costs_one_timeout_and_then_none(launch: Launch) -> None:
    server = launch()
    assert put_one(tier_of(server), NAME)
    tier = tier_of(server, timeout_s=0.5)
    server.stop()
    started = time.monotonic()
    for _ in range(50):
        assert not got_one(tier, NAME)
    elapsed = time.monotonic() - started
    wait_until(lambda: tier.status().state == "broken")
    server.go_on()
    assert tier.status().errors == 3
    assert 0.5 <= elapsed < 1.0, "two callers have waited"
    tier.close()


def test_while_it_is_stopped_its_probes_cost_callers_nothing(launch: Launch) -> None:
    server, clock = launch(), FakeClock()
    tier = tier_of(server, clock, timeout_s=0.3)
    assert put_one(tier, NAME)
    server.stop()
    assert not got_one(tier, NAME)
    wait_until(lambda: tier.status().state == "broken")
    started = time.monotonic()
    for _ in range(200):
        clock.now += 1.0
        assert not got_one(tier, NAME)
    elapsed = time.monotonic() - started
    server.go_on()
    assert elapsed < 0.3, "less than a single probe takes"

    def is_read_a_second_later() -> bool:
        clock.now += 1.0  # the last probe of the stopped server may still be under way, and put the next one off
        return got_one(tier, NAME)

    wait_until(is_read_a_second_later)
    tier.close()


def test_a_server_that_waits_for_a_core_is_not_gone(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Probes that followed one another at once would open the breaker within three timeouts, 0.3 s."""
    monkeypatch.setattr("kv_store.tiers.redis_tier._PATIENCE_S", 1.5, raising=False)
    server = launch()
    tier = tier_of(server, timeout_s=0.1)
    wait_until(lambda: put_one(tier, NAME))
    server.stop()
    assert not got_one(tier, NAME)
    time.sleep(0.3)
    server.go_on()
    wait_until(lambda: got_one(tier, NAME))
    assert "left alone" not in caplog.text
    tier.close()


def test_a_late_answer_is_never_taken_for_that_to_another_question(launch: Launch) -> None:
    server = launch()
    tier = tier_of(server, timeout_s=1.0)
    names = names_of(16)
    for name in names:
        assert put_one(tier, name)
    server.stop()
    assert not got_one(tier, names[0])
    server.go_on()
    wait_until(lambda: got_one(tier, names[1]))
    assert [got_one(tier, name) for name in names[2:]] == [True] * 2
    tier.close()


def test_flushed_it_has_nothing_and_that_is_no_error(launch: Launch) -> None:
    server = launch()
    tier = tier_of(server)
    put_one(tier, NAME)
    with server.client() as client:
        client.flushall()
    assert tier.exists([NAME.key]) == [False]
    assert not got_one(tier, NAME)
    assert (tier.status().misses, tier.status().errors) == (1, 0)
    tier.close()


@pytest.mark.parametrize("fill", [
    lambda client, key: client.rpush(key, "a", "list"),
    lambda client, key: client.hset(key, "a", "hash"),
    lambda client, key: client.zadd(key, {"a": 1.0}),
], ids=["list", "hash", "sorted set"])  # fmt: skip
def test_a_value_of_another_type_is_a_miss_and_gone(
    launch: Launch, fill: Callable[[redis.Redis, bytes], object]
) -> None:
    server = launch()
    tier = tier_of(server)
    with server.client() as client:
        fill(client, b"baton:kv:" + NAME.key)
        assert not got_one(tier, NAME)
        assert client.exists(b"baton:kv:" + NAME.key) == 0
    assert (tier.status().corrupt, tier.status().errors, tier.status().state) == (1, 0, "up")
    assert put_one(tier, NAME)
    assert got_one(tier, NAME)
    tier.close()


def test_a_huge_value_is_never_read_whole(launch: Launch) -> None:
    server = launch()
    tier = tier_of(server)
    with server.client() as client:
        client.setrange(b"baton:kv:" + NAME.key, 400 << 20, b"x")
        before = client.info("stats")["total_net_output_bytes"]
        assert not got_one(tier, NAME)
        assert client.info("stats")["total_net_output_bytes"] - before < 64 << 10
        assert client.exists(b"baton:kv:" + NAME.key) == 0
    assert tier.status().corrupt == 1
    tier.close()


def test_full_it_drops_what_it_is_given_and_serves_what_it_has(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    server, clock = launch("--maxmemory-policy", "noeviction"), FakeClock()
    tier = tier_of(server, clock)
    assert "never evicts" in caplog.text
    assert put_one(tier, NAME)
    with server.client() as client:
        client.config_set("maxmemory", "1kb")
        for name in names_of(4 * 20, first=1000):
            assert not put_one(tier, name)
            assert got_one(tier, NAME)
            clock.now += 1.0
        status = tier.status()
        assert (status.state, status.errors, status.written) == ("full", 0, 1)
        assert 3 <= status.refused <= 3 + 20 / 2
        client.config_set("maxmemory", "0")
    clock.now += 2.0
    assert put_one(tier, NAME)
    assert tier.status().state == "up"
    told = [record.getMessage() for record in caplog.records if "tier redis refuses" in record.getMessage()]
    assert len(told) == 1
    assert "maxmemory-policy to allkeys-lru" in told[0]
    assert "takes blocks again" in caplog.text
    tier.close()


def test_full_at_the_start_it_is_no_error_and_that_is_told(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    server = launch("--maxmemory", "1kb", "--maxmemory-policy", "noeviction")
    tier = tier_of(server)
    assert "never evicts" in caplog.text
    assert "does not answer" not in caplog.text
    assert not any(put_one(tier, NAME) for _ in range(2))
    assert (tier.status().state, tier.status().refused) == ("full", 3)
    tier.close()


def test_read_only_it_drops_what_it_is_given_and_serves_what_it_has(launch: Launch) -> None:
    server, clock = launch(), FakeClock()
    tier = tier_of(server, clock)
    assert put_one(tier, NAME)
    with server.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        for _ in range(3):
            assert not put_one(tier, NAME)
            assert got_one(tier, NAME)
        assert tier.status().state == "read-only"
        client.execute_command("REPLICAOF", "NO", "ONE")
    clock.now += 2.0
    assert put_one(tier, NAME)
    assert tier.status().state == "up"
    tier.close()


def test_evicting_it_has_holes(launch: Launch) -> None:
    server = launch("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    tier = tier_of(server)
    names = names_of(4 * 4000)
    assert all(put_one(tier, name) for name in names)
    found = tier.exists([name.key for name in names])
    assert 0 < sum(found) < len(names)
    fetched = [got_one(tier, name) for name in names]
    assert any(fetched)
    assert all(there for there, came in zip(found, fetched, strict=True) if came)
    tier.close()


def test_a_wrong_password_is_told_at_the_start(launch: Launch) -> None:
    server = launch(password="right")
    assert put_one(tier_of(server), NAME)
    for url in (server.url.replace("right", "wrong"), server.url.replace(":right@", "")):
        with pytest.raises(ConfigError, match="credentials") as caught:
            RedisTier(url, LAYOUT, MAC_KEY, AMPLE_S)
        assert "wrong" not in caught.value.message


def test_a_user_without_the_right_to_write_is_told_at_the_start(launch: Launch) -> None:
    server = launch()
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@read")
    with pytest.raises(ConfigError, match="credentials"):
        RedisTier(server.url.replace("unix://", "unix://reader:secret@"), LAYOUT, MAC_KEY, AMPLE_S)


@pytest.mark.parametrize("num_keys", [1, 700])
def test_a_lookup_that_is_refused_later_is_a_miss_and_its_reason_is_told(
    launch: Launch, caplog: pytest.LogCaptureFixture, num_keys: int
) -> None:
    server = launch()
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "limited", "on", ">secret", "~*", "+@all")
        tier = RedisTier(server.url.replace("unix://", "unix://limited:secret@"), LAYOUT, MAC_KEY, AMPLE_S, FakeClock())
        assert put_one(tier, NAME)
        keys = [NAME.key, *(name.key for name in names_of(4 * (num_keys - 1), first=1000))]
        assert tier.exists(keys) == [True] + [False] * (num_keys - 1)
        client.execute_command("ACL", "SETUSER", "limited", "-exists")
        for _ in range(3):
            assert tier.exists(keys) == [False] * num_keys
        assert (tier.status().state, tier.status().errors) == ("broken", 3)
        assert "no permissions to run the 'exists' command" in caplog.text
    tier.close()


def test_a_password_that_is_revoked_later_is_a_miss(launch: Launch) -> None:
    server, clock = launch(), FakeClock()
    tier = tier_of(server, clock)
    put_one(tier, NAME)
    with server.client() as client:
        client.config_set("requirepass", "new")
        client.client_kill_filter(_type="normal")
    assert not got_one(tier, NAME)
    assert not put_one(tier, NAME)
    assert tier.exists([NAME.key]) == [False]
    wait_until(lambda: tier.status().state == "broken")
    tier.close()


@pytest.mark.parametrize("url", ["", "localhost:6379", "http://localhost", "redis://localhost:port"])
def test_a_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis\.url: it must begin with"):
        RedisTier(url, LAYOUT, MAC_KEY, AMPLE_S)


def test_over_tcp_too(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    server = launch()
    caplog.set_level(logging.INFO)
    with server.client() as client:
        client.config_set("bind", "127.0.0.1")
        client.config_set("port", "0")
        port = _free_port()
        client.config_set("port", str(port))
    tier = RedisTier(f"redis://127.0.0.1:{port}/3", LAYOUT, MAC_KEY, AMPLE_S)
    assert put_one(tier, NAME)
    assert got_one(tier, NAME)
    assert not got_one(tier_of(server), NAME)
    tier.close()


def test_a_reply_that_trickles_in_is_given_up(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait for one byte is long, but all of them together are."""
    monkeypatch.setattr("kv_store.tiers.redis_tier._VALUE_TIMEOUT_S", 0.05)
    server, is_slow, is_over = launch(), threading.Event(), threading.Event()

    def forward(source: socket.socket, target: socket.socket, may_trickle: threading.Event) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                size = 1 if may_trickle.is_set() else len(data)
                for at in range(0, len(data), size):
                    target.sendall(data[at : at + size])
                    is_over.wait(0.005 * may_trickle.is_set())

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, upstream = listener.accept()[0], socket.socket(socket.AF_UNIX)
                upstream.connect(server.url.removeprefix("unix://"))
                ends.extend((client, upstream))
                for parts in ((client, upstream, threading.Event()), (upstream, client, is_slow)):
                    threading.Thread(target=forward, args=parts, daemon=True).start()

    ends: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=[listener], daemon=True).start()
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        tier = RedisTier(url, LAYOUT, MAC_KEY, AMPLE_S)
        assert put_one(tier, NAME)
        assert got_one(tier, NAME)
        is_slow.set()
        assert not got_one(tier, NAME)
        assert tier.status().errors == 1
        is_over.set()
        tier.close()
        listener.shutdown(socket.SHUT_RDWR)
    for end in ends:
        end.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_what_it_answers_not_to_have_is_lost_and_what_it_does_not_answer_is_not(launch: Launch) -> None:
    server = launch()
    tier = tier_of(server)
    other = names_of(4, first=700)[0]
    assert put_one(tier, NAME)
    assert tier.exists([NAME.key, other.key]) == [True, False]
    assert tier.take_lost() == [other.key]
    server.kill()
    assert tier.exists([NAME.key, other.key]) == [False, False]
    assert tier.take_lost() == []
    tier.close()
