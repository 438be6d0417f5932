"""A directory among real processes and sockets: who is dead, who is merely silent, and who talks nonsense."""

import math
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from kv_store.node import directory_client
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.node.directory_client import DirectoryClient
from kv_store.node.directory_port import CALLS, GREETING, EpochChanged
from kv_store.node.directory_server import DirectoryServer
from kv_store.node.event_log import EventCursor
from kv_store.node.service import LENGTH, RefusedCall
from tests.kv_store.names import LAYOUT, committed, names_of, payload_of
from wire import ids
from wire.errors import ConfigError, StoreError
from wire.ids import PROTOCOL_VERSION, SlotId

NUM_SLOTS = 16
WAIT_S = 20.0


class Node:
    """An arena with its directory, served."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "socket")
        self.arena = Arena.create(str(folder / f"arena-{time.monotonic_ns()}"), LAYOUT.block_bytes, NUM_SLOTS)
        self.directory = Directory(NUM_SLOTS, arena_path=str(self.arena.path), block_bytes=LAYOUT.block_bytes)
        self.server = DirectoryServer(self.directory, self.path)
        self.server.start()

    def stop(self) -> None:
        self.server.stop()
        self.arena.close()
        self.arena.unlink()

    def holds(self, slot: int, payload: bytes) -> bool:
        return bytes(self.arena.slot(SlotId(slot))[: len(payload)]) == payload


class WriterProcess:
    """`writer_process`, told what to do line by line."""

    def __init__(self, path: str, first: int = 0, num_tokens: int = 8) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kv_store.writer_process", path, str(first), str(num_tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def tell(self, command: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command}\n".encode())
        assert select.select([self.process.stdout], [], [], WAIT_S)[0], "no answer"
        return self.process.stdout.readline().decode().strip()

    def slots(self) -> set[int]:
        return {int(slot) for slot in self.tell("reserve").split()}

    def kill(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait(timeout=WAIT_S)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    assert node.directory.records.check() == []
    node.stop()


@pytest.fixture
def start_writer(node: Node) -> Iterator[Callable[[int], WriterProcess]]:
    writers: list[WriterProcess] = []

    def start(first: int) -> WriterProcess:
        writers.append(WriterProcess(node.path, first))
        return writers[-1]

    yield start
    for writer in writers:
        writer.kill()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.005)


Start = Callable[[int], WriterProcess]


def test_the_slots_of_a_killed_writer_come_back(node: Node, start_writer: Start) -> None:
    writer, survivor = start_writer(0), start_writer(1000)
    assert len(writer.slots()) == len(survivor.slots()) == 2
    assert writer.tell("write") == "written"
    writer.process.kill()
    until(lambda: node.directory.records.status().counts.draining == 2)
    assert node.directory.records.exists([name.key for name in names_of(8)]) == [False, False]
    assert survivor.tell("commit") == "2"


def test_a_stopped_writer_keeps_its_slots_and_does_no_harm_when_it_wakes(node: Node, start_writer: Start) -> None:
    writer = start_writer(0)
    its_slots = writer.slots()
    os.kill(writer.process.pid, signal.SIGSTOP)
    with closing(DirectoryClient(node.path)) as client:
        names = [*names_of(8), *names_of(4 * NUM_SLOTS, first=1000)]
        mine = committed(client.reserve("me", names, None).slots, names)
        assert not its_slots & {block.slot for block in mine}
        assert node.directory.records.status().counts.draining == NUM_SLOTS
        for block in mine:
            node.arena.slot(block.slot)[: LAYOUT.payload_bytes] = payload_of(block.name)
        assert client.commit("me", mine, None) == len(mine)
        os.kill(writer.process.pid, signal.SIGCONT)
        assert writer.tell("write") == "written"
        assert all(node.holds(block.slot, payload_of(block.name)) for block in mine)
        assert writer.tell("commit") == "2"
    assert node.directory.records.status().counts.draining == 0
    assert node.directory.records.status().counts.free == len(its_slots)


def test_a_stopped_writer_that_is_killed_gives_its_slots_back(node: Node, start_writer: Start) -> None:
    writer = start_writer(0)
    writer.slots()
    os.kill(writer.process.pid, signal.SIGSTOP)
    writer.process.kill()
    until(lambda: node.directory.records.status().counts.draining == 0)


def test_a_writer_that_reconnects_goes_on_where_it_was(node: Node, start_writer: Start) -> None:
    writer = start_writer(0)
    slots = writer.slots()
    assert writer.tell("disconnect") == "disconnected"
    assert node.directory.records.status().counts.draining == len(slots)
    assert writer.tell("commit") == "2"
    assert node.directory.records.status().counts.cached == 2


def test_two_writers_of_one_name_in_two_processes_are_two(node: Node, start_writer: Start) -> None:
    one, other = start_writer(0), start_writer(1000)
    assert not one.slots() & other.slots()
    assert (one.tell("commit"), other.tell("commit")) == ("2", "2")


def test_several_clients_of_one_process_end_each_for_itself(node: Node) -> None:
    with closing(DirectoryClient(node.path)) as one, closing(DirectoryClient(node.path)) as other:
        one.reserve("one", names_of(8), None)
        other.reserve("other", names_of(8, first=1000), None)
        one.close()
        assert other.records.status().counts.draining == 4
        assert one.abandon("one") == 2
        assert other.abandon("other") == 2


class Line:
    """A connection by hand."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(path)

    def send(self, message: bytes) -> None:
        self.socket.sendall(message)

    def answer(self) -> object:
        """An answer to `hello`, or a refusal."""
        length = self.socket.recv(LENGTH.size, socket.MSG_WAITALL)
        return GREETING.decode_answer("hello", self.socket.recv(LENGTH.unpack(length)[0], socket.MSG_WAITALL))

    def skip_answer(self) -> None:
        length = self.socket.recv(LENGTH.size, socket.MSG_WAITALL)
        self.socket.recv(LENGTH.unpack(length)[0], socket.MSG_WAITALL)

    def read_to_end(self) -> bytes:
        """What comes before the other side hangs up."""
        received = b""
        try:
            while data := self.socket.recv(65536):
                received += data
        except ConnectionResetError:
            pass
        return received

    def close(self) -> None:
        self.socket.close()


def hello(version: int = PROTOCOL_VERSION, connection: int = 1) -> bytes:
    return GREETING.encode_call("hello", (version, "client", connection))


HELLO = hello()
STATUS = CALLS.encode_call("status", ())
RESERVE = CALLS.encode_call("reserve", ("writer", names_of(8), None))


NONSENSE = [
    b"\x00\x00\x00\x00",
    b"GET / HTTP/1.1\r\n\r\n",
    LENGTH.pack(3) + b"\xc1\xc1\xc1",
    LENGTH.pack(1 << 31),
    CALLS.encode_answer(1),
    CALLS.encode_call("__init__", ()),
    CALLS.encode_call("writer_died", ("good",)),
    CALLS.encode_call("wait_for_events", (EventCursor(), -1.0)),
    CALLS.encode_call("wait_for_events", (EventCursor(), 1e9)),
    CALLS.encode_call("wait_for_events", (EventCursor(), math.nan)),
    CALLS.encode_call("_ask", ("status", [])),
    STATUS[:-1] + b"\xff",
]


@pytest.mark.parametrize("sent", [*NONSENSE, *(HELLO + nonsense for nonsense in NONSENSE)])
def test_nonsense_ends_its_own_connection_only(node: Node, sent: bytes) -> None:
    with closing(DirectoryClient(node.path)) as good, closing(Line(node.path)) as bad:
        good.reserve("good", names_of(4), None)
        bad.socket.sendall(sent)
        bad.read_to_end()
        assert good.records.status().counts.draining == 1


def test_another_version_is_told_so(node: Node) -> None:
    with closing(Line(node.path)) as line:
        line.send(hello(PROTOCOL_VERSION + 1))
        assert isinstance(line.answer(), RefusedCall)
        assert line.read_to_end() == b""


HELLO_OF_VERSION_4 = bytes.fromhex("0000001094a568656c6c6f04a6636c69656e7401")
"""As a client of the release that first spoke version 4 sends it."""


def test_a_client_of_the_release_before_is_served_by_a_directory_of_the_next(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ids, "PROTOCOL_VERSION", 5)
    with closing(Line(node.path)) as line:
        line.send(HELLO_OF_VERSION_4)
        assert line.answer() == node.directory.attach()


def test_a_client_of_the_next_release_speaks_the_version_of_the_directory_before(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_client, "PROTOCOL_VERSION", PROTOCOL_VERSION + 2)
    with closing(DirectoryClient(node.path)) as client:
        assert client.attach() == node.directory.attach()
        assert client.records.status().counts.total == NUM_SLOTS
    monkeypatch.setattr(directory_client, "OLDEST_PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    with closing(DirectoryClient(node.path)) as stranger, pytest.raises(StoreError, match=r"speaks versions 4 to 4"):
        stranger.attach()


def test_what_was_sent_before_a_reconnect_is_not_done_after_it(node: Node) -> None:
    with closing(Line(node.path)) as old, closing(Line(node.path)) as new:
        old.send(HELLO)
        old.answer()
        new.send(hello(connection=2))
        new.answer()
        old.send(RESERVE)
        assert old.read_to_end() == b""
        assert node.directory.records.status().counts.draining == 0
        new.send(RESERVE)
        new.skip_answer()
        assert node.directory.records.status().counts.draining == 2


def test_a_message_may_come_byte_by_byte(node: Node) -> None:
    with closing(Line(node.path)) as line:
        for byte in HELLO:
            line.socket.sendall(bytes([byte]))
        assert line.answer() == node.directory.attach()


def test_a_message_cut_off_does_no_harm(node: Node) -> None:
    with closing(DirectoryClient(node.path)) as good:
        for length in range(len(HELLO)):
            with closing(Line(node.path)) as line:
                line.socket.sendall(HELLO[:length])
        assert good.records.check() == []


def test_a_restart_is_noticed_and_all_is_a_miss_until_one_attaches_anew(tmp_path: Path) -> None:
    first = Node(tmp_path)
    with closing(DirectoryClient(first.path)) as client:
        names = names_of(8)
        assert client.commit("writer", committed(client.reserve("writer", names, None).slots, names), None) == 2
        lease = client.lease("reader", [name.key for name in names], 5.0)
        first.stop()
        with pytest.raises(StoreError, match="does not answer"):
            client.records.status()
        second = Node(tmp_path)
        for _ in range(2):
            with pytest.raises(EpochChanged):
                client.release(lease.lease_id)
        assert client.records.exists([name.key for name in names]) == [False, False]
        assert (client.records.status().hits, client.records.check()) == (0, [])
        with pytest.raises(EpochChanged):
            client.lease("reader", [name.key for name in names], 5.0)
        assert client.attach().arena_path == str(second.arena.path)
        assert client.records.exists([name.key for name in names]) == [False, False]
        second.stop()


def test_a_directory_that_is_away_is_left_alone_after_three_errors(tmp_path: Path) -> None:
    client = DirectoryClient(str(tmp_path / "nobody"))
    for _ in range(3):
        with pytest.raises(StoreError, match="does not answer"):
            client.records.status()
    with pytest.raises(StoreError, match="left alone"):
        client.records.status()


def test_a_directory_that_is_silent_costs_a_bounded_time(tmp_path: Path) -> None:
    path = str(tmp_path / "silent")
    with closing(socket.socket(socket.AF_UNIX)) as silent:
        silent.bind(path)
        silent.listen()
        client = DirectoryClient(path, timeout_s=0.1)
        started = time.monotonic()
        for _ in range(20):
            with pytest.raises(StoreError):
                client.records.status()
        assert 0.3 <= time.monotonic() - started < 5.0


def test_callers_do_not_wait_for_one_another_for_ever(tmp_path: Path) -> None:
    path = str(tmp_path / "silent")
    failures: list[StoreError] = []

    def ask(client: DirectoryClient) -> None:
        try:
            client.records.status()
        except StoreError as error:
            failures.append(error)

    with closing(socket.socket(socket.AF_UNIX)) as silent:
        silent.bind(path)
        silent.listen()
        client = DirectoryClient(path, timeout_s=0.2)
        threads = [threading.Thread(target=ask, args=(client,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert len(failures) == 8


def test_threads_share_a_client(node: Node) -> None:
    wrong: list[int] = []

    def work(client: DirectoryClient, number: int) -> None:
        names = names_of(4, first=1000 * number)
        for _ in range(50):
            committed_now = committed(client.reserve(str(number), names, None).slots, names)
            if client.commit(str(number), committed_now, None) != len(committed_now):
                wrong.append(number)
            if client.records.exists([names[0].key]) != [True]:
                wrong.append(number)

    with closing(DirectoryClient(node.path, timeout_s=WAIT_S)) as client:
        threads = [threading.Thread(target=work, args=(client, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert wrong == []
    assert node.directory.records.status().counts.cached == 4


def test_the_socket_is_for_its_user_only_and_gone_at_the_end(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert stat.S_IMODE(os.stat(node.path).st_mode) == 0o600
    with pytest.raises(ConfigError, match="another directory"):
        DirectoryServer(Directory(1), node.path).start()
    node.stop()
    assert not os.path.exists(node.path)


def test_a_socket_without_a_server_is_replaced(tmp_path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as dead:
        dead.bind(str(tmp_path / "socket"))
    Node(tmp_path).stop()


def test_a_path_of_no_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for path in (tmp_path / "no" / "folder", tmp_path / ("x" * 200), tmp_path / "file"):
        with pytest.raises(ConfigError, match="cannot be made"):
            DirectoryServer(Directory(1), str(path)).start()
    assert (tmp_path / "file").read_text() == "precious"


def test_it_may_be_stopped_twice_or_before_it_was_started(tmp_path: Path) -> None:
    DirectoryServer(Directory(1), str(tmp_path / "socket")).stop()
    node = Node(tmp_path)
    node.stop()
    node.server.stop()


def test_a_wait_for_events_keeps_no_other_call_waiting(node: Node) -> None:
    with closing(DirectoryClient(node.path)) as client, ThreadPoolExecutor(1) as waiter:
        place = client.records.events(EventCursor()).cursor
        waiting = waiter.submit(client.records.wait_for_events, place, 8.0)
        until(lambda: bool(node.directory.records.signal.num_waiting))
        for _ in range(3):
            client.records.status()
        assert not waiting.done()
        names = names_of(4)
        client.commit("writer", committed(client.reserve("writer", names, None).slots, names), None)
        assert waiting.result(5.0)


def test_a_stop_ends_a_wait_for_events(node: Node) -> None:
    with closing(DirectoryClient(node.path)) as client, ThreadPoolExecutor(1) as waiter:
        place = client.records.events(EventCursor()).cursor
        waiting = waiter.submit(client.records.wait_for_events, place, 8.0)
        until(lambda: bool(node.directory.records.signal.num_waiting))
        node.server.stop()
        with pytest.raises(StoreError, match="does not answer"):
            waiting.result(5.0)
        assert not node.directory.records.signal.num_waiting
