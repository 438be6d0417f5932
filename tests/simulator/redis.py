"""The Redis of the simulated cluster: RedisTier's own code over connections that may be down, slow or cut short."""

import asyncio
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import islice
from unittest.mock import patch

import redis.exceptions

from kv_store.frame import MAC_KEY_BYTES, FrameSeal
from kv_store.tiers import redis_tier
from kv_store.tiers.redis_tier import RedisTier
from tests.simulator.invariants import LAYOUT, Watch
from wire.block_names import BlockName
from wire.ids import BlockKey

MAC_KEY = bytes(MAC_KEY_BYTES)
TIMEOUT_S = 0.1
PROBE_S = 0.001
MAX_FAILURES = 4
"""Commands of a process that may fail in two seconds: three that open the breaker, and a probe."""
WINDOW_S = 2.0
_NUM_PREFIX = len(redis_tier.PREFIX)


class SimRedis:
    """The server. While it is down no connection to it works; while it is full it stores nothing.

    num_cut: so many of the next answers with values are cut short. written: the keys that it has ever stored.
    """

    def __init__(self, draw: random.Random, watch: Watch) -> None:
        self.draw = draw
        self.watch = watch
        self.frames: dict[BlockKey, bytes] = {}
        self.written: set[BlockKey] = set()
        self.down_until_s = self.full_until_s = self.slow_until_s = 0.0
        self.num_cut = 0
        self._loop = asyncio.get_running_loop()
        self._seal = FrameSeal(LAYOUT, MAC_KEY)

    @property
    def now_s(self) -> float:
        return self._loop.time()

    @property
    def is_slow(self) -> bool:
        return self.now_s < self.slow_until_s

    def put(self, name: BlockName, payload: memoryview, checksum: bytes) -> None:
        """Stores a block, whatever the state of the server."""
        self.store(name.key, self._seal.seal(name, payload, checksum) + payload)

    def store(self, key: BlockKey, frame: bytes) -> None:
        self.frames[key] = frame
        self.written.add(key)

    def replies(self, commands: bytes) -> bytes:
        """Answers EXISTS and GETRANGE; values are cut short if that was asked for."""
        replies = b"".join(self._reply(*command) for command in _commands_in(commands))
        if not self.num_cut or not replies.startswith(b"$"):
            return replies
        self.num_cut -= 1
        return replies[: self.draw.randrange(len(replies))]

    def _reply(self, name: bytes, key: bytes, *bounds: bytes) -> bytes:
        frame = self.frames.get(BlockKey(key[_NUM_PREFIX:]))
        if name == b"EXISTS":
            return b":%d\r\n" % (frame is not None)
        value = (frame or b"")[: int(bounds[1]) + 1]
        return b"$%d\r\n%b\r\n" % (len(value), value)


def _commands_in(data: bytes) -> Iterator[list[bytes]]:
    """Takes commands apart: arrays of strings, each with its length."""
    lines = iter(data.split(b"\r\n"))
    for head in lines:
        if head:
            yield [next(islice(lines, 1, None)) for _ in range(int(head[1:]))]


class SimClient:
    """A process's client, as far as RedisTier uses redis.Redis, and its only connection and socket."""

    def __init__(self, server: SimRedis, name: str, on_call: Callable[[], None]) -> None:
        self.connection_pool = self._sock = self
        self._server = server
        self._name = name
        self._on_call = on_call
        self._left = memoryview(b"")
        self._failed_s: list[float] = []

    def __enter__(self) -> "SimClient":
        return self

    def __exit__(self, *_: object) -> None:
        """Keeps nothing open."""

    def config_get(self, name: str) -> dict[str, str]:
        self._require_up()
        return {name: "allkeys-lru"}

    def getrange(self, key: bytes, start: int, end: int) -> bytes:
        self._require_up()
        return b""

    def exists(self, key: bytes) -> int:
        self._require_up()
        return int(key[_NUM_PREFIX:] in self._server.frames)

    def unlink(self, *keys: bytes) -> int:
        self._require_up()
        return sum(self._server.frames.pop(BlockKey(key[_NUM_PREFIX:]), None) is not None for key in keys)

    def set(self, key: bytes, value: bytes, px: int | None = None) -> None:
        self._require_up()
        if self._server.now_s < self._server.full_until_s:
            raise redis.exceptions.OutOfMemoryError("it is full")
        if px is None:
            self._server.store(BlockKey(key[_NUM_PREFIX:]), value)

    def get_connection(self) -> "SimClient":
        return self

    def release(self, connection: object) -> None:
        """Keeps the connection for the next command."""

    def disconnect(self) -> None:
        self._left = memoryview(b"")

    def send_packed_command(self, packed: Sequence[bytes]) -> None:
        self._on_call()
        self._require_up()
        self._left = memoryview(self._server.replies(b"".join(packed)))

    def recv_into(self, into: memoryview) -> int:
        """Receives some bytes; raises once there are no more."""
        if not self._left:
            raise ConnectionResetError("cut short")
        num_bytes = min(len(into), len(self._left))
        into[:num_bytes], self._left = self._left[:num_bytes], self._left[num_bytes:]
        return num_bytes

    def close(self) -> None:
        """Keeps nothing open."""

    def _require_up(self) -> None:
        """Raises what redis-py does while the server is down, and sees that it is then left alone."""
        now_s = self._server.now_s
        if now_s >= self._server.down_until_s:
            self._failed_s.clear()
            return
        self._failed_s = [*(at for at in self._failed_s if at > now_s - WINDOW_S), now_s]
        if len(self._failed_s) > MAX_FAILURES:
            self._server.watch.violated("promise", f"{self._name} does not leave a dead Redis alone")
        raise redis.exceptions.ConnectionError("it is down")


class SimRedisTier(RedisTier):
    """The real tier, whose probes run on the event loop."""

    def __init__(
        self,
        server: SimRedis,
        name: str,
        clock: Callable[[], float],
        on_call: Callable[[], None] = lambda: None,
        on_block: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_call` is called before each question for blocks, and each read; `on_block` after each block."""
        self._on_block = on_block
        self._is_probing = False
        with patch.object(redis_tier, "_connect", lambda *_: SimClient(server, name, on_call)):
            super().__init__(name, LAYOUT, MAC_KEY, TIMEOUT_S, clock)

    def get(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> Generator[bytes, None, None]:
        with closing(super().get(names, into)) as checksums:
            for checksum in checksums:
                self._on_block()
                yield checksum

    def _start_probe(self) -> None:
        if not self._is_probing:
            self._is_probing = True
            asyncio.get_running_loop().call_later(PROBE_S, self._run_probe)

    def _rest(self) -> None:
        """Takes no time: the loop has only virtual time."""

    def _run_probe(self) -> None:
        self._is_probing = False
        self._ask_until_settled()
