"""Blocks between nodes: the block port of a directory and arena, and its reader."""

import hmac
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace

import pytest

from deploy.plan.authority import Authority
from kv_store.frame import checksum_of
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.peers import block_reader, block_server
from kv_store.peers.block_reader import BlockReader, LocalBlocks
from kv_store.peers.block_server import BlockServer
from tests.harness.fake_clock import FakeClock
from tests.kv_store.names import LAYOUT, committed, names_of, payload_of
from wire.block_names import BlockName
from wire.ids import BlockKey
from wire.trust.identity import Identity

TOKEN = b"the cluster's token"
NUM_SLOTS = 16
AUTHORITY = Authority.make()
READER = AUTHORITY.issue("decode-0", "10.0.0.2")


@dataclass
class Node:
    """A node's arena, and its block port."""

    directory: Directory
    arena: Arena
    server: BlockServer
    address: str

    def publish(self, names: list[BlockName]) -> None:
        for block in committed(self.directory.reserve("writer", names, None).slots, names):
            self.arena.slot(block.slot)[: LAYOUT.payload_bytes] = payload_of(block.name)
            self.directory.commit("writer", [block], None)


def serve(directory: Directory, arena: Arena, port: int = 0, identity: Identity | None = None) -> Node:
    server = BlockServer(directory, arena, LAYOUT.payload_bytes, TOKEN, identity)
    return Node(directory, arena, server, server.start("127.0.0.1", port))


@pytest.fixture
def node() -> Iterator[Node]:
    node = serve(Directory(NUM_SLOTS), Arena.anonymous(LAYOUT.block_bytes, NUM_SLOTS))
    yield node
    node.server.stop()
    assert node.directory.records.status().num_leases == 0
    assert node.directory.records.check() == []


@pytest.fixture
def tls_node() -> Iterator[Node]:
    identity = AUTHORITY.issue("node-a", "127.0.0.1")
    node = serve(Directory(NUM_SLOTS), Arena.anonymous(LAYOUT.block_bytes, NUM_SLOTS), identity=identity)
    node.publish(names_of(20))
    yield node
    node.server.stop()
    assert node.directory.records.status().num_leases == 0


def reader_of(
    address: str,
    token: bytes = TOKEN,
    payload_bytes: int = LAYOUT.payload_bytes,
    timeout_s: float = 5.0,
    identity: Identity | None = None,
) -> BlockReader:
    return BlockReader(address, payload_bytes, token, timeout_s, FakeClock(), identity)


@pytest.fixture
def reader(node: Node) -> Iterator[BlockReader]:
    with closing(reader_of(node.address)) as reader:
        yield reader


def keys(names: list[BlockName]) -> list[BlockKey]:
    return [name.key for name in names]


def greeted(address: str, token: bytes) -> socket.socket:
    """A stranger's connection, after the proofs; it has read all that the server said."""
    host, port = address.split(":")
    connection = socket.create_connection((host, int(port)), 5.0)
    ours = b"n" * 16
    connection.sendall(ours)
    answer = b""
    while len(answer) < 48:
        answer += connection.recv(48 - len(answer))
    connection.sendall(hmac.digest(token, b"reader" + ours + answer[:16], "sha256"))
    return connection


def has_hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def read(reader: BlockReader | LocalBlocks, names: list[BlockName]) -> list[bytes]:
    """The payloads that the reader vouches for."""
    into = [memoryview(bytearray(LAYOUT.payload_bytes)) for _ in names]
    checksums = list(reader.get(names, into))
    assert checksums == [checksum_of(payload) for payload in into[: len(checksums)]]
    return [bytes(payload) for payload in into[: len(checksums)]]


def test_blocks_come_from_the_other_nodes_slots(node: Node, reader: BlockReader) -> None:
    names = names_of(20)
    node.publish(names)
    assert reader.exists(keys(names)) == [True] * 5
    assert read(reader, names) == [payload_of(name) for name in names]
    assert reader.status().errors == 0


def test_the_twin_reads_as_the_port_does(node: Node, reader: BlockReader) -> None:
    names = names_of(40)
    node.publish([*names[:3], *names[4:]])
    [spoilt] = [block for block in node.directory.state.blocks() if block.name == names[6]]
    node.arena.slot(spoilt.slot)[3] ^= 1
    for source in (reader, LocalBlocks(node.directory, node.arena, LAYOUT.payload_bytes)):
        assert source.exists(keys(names)) == [index != 3 for index in range(10)]
        assert [len(read(source, names[start:])) for start in (0, 3, 4, 7)] == [3, 0, 2, 3]
        assert (source.status().hits, source.status().misses, source.status().corrupt) == (8, 2, 1)


def test_blocks_are_forgotten_on_the_other_node(node: Node, reader: BlockReader) -> None:
    names = names_of(20)
    node.publish(names)
    sources: list[BlockReader | LocalBlocks] = [reader, LocalBlocks(node.directory, node.arena, LAYOUT.payload_bytes)]
    for number, source in enumerate(sources):
        source.delete(keys(names[number : number + 1]))
        assert node.directory.records.exists(keys(names)) == [index > number for index in range(5)]
        assert read(source, names[2:]) == [payload_of(name) for name in names[2:]]
    assert reader.status().errors == 0


def test_reading_ends_at_the_first_hole_and_the_reader_goes_on(node: Node, reader: BlockReader) -> None:
    names = names_of(20)
    node.publish([*names[:2], *names[3:]])
    assert reader.exists(keys(names)) == [True, True, False, True, True]
    assert len(read(reader, names)) == 2
    assert len(read(reader, names[3:])) == 2
    assert reader.status().errors == 0


def test_a_reading_that_is_given_up_leaves_nothing_behind(node: Node, reader: BlockReader) -> None:
    names = names_of(40)
    node.publish(names)
    into = [memoryview(bytearray(LAYOUT.payload_bytes)) for _ in names]
    with closing(reader.get(names, into)) as reading:
        next(reading)
    assert read(reader, names[5:]) == [payload_of(name) for name in names[5:]]
    assert reader.status().errors == 0


def test_a_spoilt_block_is_not_vouched_for(node: Node, reader: BlockReader) -> None:
    names = names_of(20)
    node.publish(names)
    [spoilt] = [block for block in node.directory.state.blocks() if block.name == names[2]]
    node.arena.slot(spoilt.slot)[3] ^= 1
    assert len(read(reader, names)) == 2
    assert reader.status().corrupt == 1


def test_many_keys_go_in_several_requests(node: Node, reader: BlockReader, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (block_reader, block_server):
        monkeypatch.setattr(module, "MAX_KEYS", 2)
    names = names_of(20)
    node.publish(names)
    assert reader.exists(keys(names)) == [True] * 5
    assert len(read(reader, names)) == 5


@pytest.mark.parametrize(
    ("token", "payload_bytes"), [(b"another token", LAYOUT.payload_bytes), (TOKEN, LAYOUT.payload_bytes + 1)]
)
def test_another_clusters_reader_gets_nothing(node: Node, token: bytes, payload_bytes: int) -> None:
    names = names_of(8)
    node.publish(names)
    with closing(reader_of(node.address, token, payload_bytes)) as reader:
        assert reader.exists(keys(names)) == [False, False]
        assert reader.status().errors == 1


def test_a_reader_without_proof_hears_no_block(node: Node) -> None:
    node.publish(names_of(8))
    with greeted(node.address, b"another token") as stranger:
        assert has_hung_up(stranger)
    with greeted(node.address, TOKEN) as stranger:
        assert stranger.recv(8) == LAYOUT.payload_bytes.to_bytes(8, "little")


@pytest.mark.parametrize("request_bytes", [b"\x09\1\0\0\0", b"\1\0\0\0\0", b"\2\xff\xff\xff\xff"])
def test_a_reader_that_talks_nonsense_is_hung_up_on(node: Node, reader: BlockReader, request_bytes: bytes) -> None:
    names = names_of(8)
    node.publish(names)
    with greeted(node.address, TOKEN) as stranger:
        assert len(stranger.recv(8)) == 8
        stranger.sendall(request_bytes)
        assert has_hung_up(stranger)
    assert reader.exists(keys(names)) == [True, True], "others are served"


def test_a_reader_finds_a_server_that_came_back(node: Node, reader: BlockReader) -> None:
    names = names_of(8)
    node.publish(names)
    assert len(read(reader, names)) == 2
    node.server.stop()
    again = serve(node.directory, node.arena, int(node.address.split(":")[1]))
    try:
        assert len(read(reader, names)) == 2
    finally:
        again.server.stop()


def test_a_silent_node_is_a_miss_and_then_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        with closing(reader_of(address, timeout_s=0.02)) as reader:
            for _ in range(5):
                assert reader.exists(keys(names_of(4))) == [False]
                assert read(reader, names_of(4)) == []
            assert reader.status().errors == 3


def test_a_node_that_sends_byte_by_byte_is_a_miss() -> None:
    """No wait for one byte is long, but all of them together are."""
    names, is_over = names_of(4), threading.Event()

    def trickle(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            ours, theirs = b"s" * 16, connection.recv(16)
            connection.sendall(ours + hmac.digest(TOKEN, b"server" + theirs + ours, "sha256"))
            connection.recv(32)
            connection.sendall(LAYOUT.payload_bytes.to_bytes(8, "little"))
            connection.recv(37)
            connection.sendall(b"\1" + bytes(16))
            while not is_over.wait(0.01):
                with suppress(OSError):
                    connection.send(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=trickle, args=[listener])
        server.start()
        with closing(reader_of("{}:{}".format(*listener.getsockname()), timeout_s=0.1)) as reader:
            assert read(reader, names) == []
            assert (reader.status().errors, reader.status().corrupt) == (1, 0), "it did not wait for the last byte"
        is_over.set()
        server.join()


def test_a_reader_that_takes_nothing_is_hung_up_on_and_holds_no_lease() -> None:
    payload_bytes, [name] = 1 << 20, names_of(4)
    directory, arena = Directory(1), Arena.anonymous(payload_bytes, 1)
    directory.commit("writer", committed(directory.reserve("writer", [name], None).slots, [name]), None)
    server = BlockServer(directory, arena, payload_bytes, TOKEN, stall_timeout_s=0.05)
    with greeted(server.start("127.0.0.1"), TOKEN) as stranger:
        assert len(stranger.recv(8)) == 8
        stranger.sendall(b"\2\x40\0\0\0" + name.key * 64)  # more than the sockets hold
        deadline = time.monotonic() + 10
        while server.num_readers:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert directory.records.status().num_leases == 0
    server.stop()


def test_more_connections_than_the_most_are_turned_away(
    node: Node, reader: BlockReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_server, "MAX_CONNECTIONS", 1)
    node.publish(names_of(4))
    assert reader.exists(keys(names_of(4))) == [True]
    with closing(reader_of(node.address)) as second:
        assert second.exists(keys(names_of(4))) == [False]
    assert reader.exists(keys(names_of(4))) == [True]


def test_blocks_come_over_tls_on_one_connection(tls_node: Node) -> None:
    names = names_of(20)
    with closing(reader_of(tls_node.address, identity=READER)) as reader:
        assert reader.exists(keys(names)) == [True] * 5
        for _ in range(3):
            assert read(reader, names) == [payload_of(name) for name in names]
        assert (reader.status().errors, tls_node.server.num_readers) == (0, 1)


STRANGERS = {
    "plain": None,
    "of another cluster": Authority.make().issue("decode-0", "10.0.0.2"),
    "of another cluster, with this one's authority": replace(
        Authority.make().issue("decode-0", "10.0.0.2"), authority_pem=READER.authority_pem
    ),
}


@pytest.mark.parametrize("identity", STRANGERS.values(), ids=STRANGERS)
def test_a_tls_port_tells_a_stranger_nothing(tls_node: Node, identity: Identity | None) -> None:
    with closing(reader_of(tls_node.address, identity=identity)) as reader:
        assert reader.exists(keys(names_of(20))) == [False] * 5
        assert reader.status().errors == 1
    with closing(reader_of(tls_node.address, identity=READER)) as reader:
        assert reader.exists(keys(names_of(20))) == [True] * 5


def test_a_certificate_without_the_token_opens_nothing(tls_node: Node) -> None:
    with closing(reader_of(tls_node.address, b"another token", identity=READER)) as reader:
        assert reader.exists(keys(names_of(20))) == [False] * 5
        assert reader.status().errors == 1


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_without_a_certificate_or_of_an_older_tls_is_hung_up_on(
    tls_node: Node, version: ssl.TLSVersion
) -> None:
    context = READER.client_context() if version is ssl.TLSVersion.TLSv1_2 else ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    host, port = tls_node.address.split(":")

    def say_something() -> None:
        with socket.create_connection((host, int(port)), 5.0) as plain, context.wrap_socket(plain) as stranger:
            stranger.sendall(bytes(16))
            stranger.recv(1)

    with pytest.raises((ssl.SSLError, ConnectionError)):
        say_something()


@pytest.mark.parametrize("identity", [AUTHORITY.issue("node-a", "127.0.0.2"), None], ids=["another host's", "none"])
def test_a_reader_speaks_to_no_server_that_is_not_the_addressed_node(identity: Identity | None) -> None:
    node = serve(Directory(NUM_SLOTS), Arena.anonymous(LAYOUT.block_bytes, NUM_SLOTS), identity=identity)
    node.publish(names_of(4))
    with closing(reader_of(node.address, identity=READER, timeout_s=1.0)) as reader:
        assert reader.exists(keys(names_of(4))) == [False]
        assert reader.status().errors == 1
    node.server.stop()


def test_a_client_that_never_ends_its_handshake_holds_up_no_other(tls_node: Node) -> None:
    host, port = tls_node.address.split(":")
    with (
        socket.create_connection((host, int(port)), 5.0),
        closing(reader_of(tls_node.address, identity=READER)) as reader,
    ):
        assert reader.exists(keys(names_of(4))) == [True]
        assert tls_node.server.num_readers == 2
