"""The cold tier on a Redis or Valkey server."""

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, RedisError, ResponseError
from redis.retry import Retry

from kv_store.connection import receive_exactly
from kv_store.frame import FRONT_BYTES, HEAD_BYTES, namespace_of
from kv_store.tiers.cold_tier import FramedTier
from kv_store.tiers.contents import PAGE_BLOCKS, Selection, beyond, find
from wire.errors import ConfigError
from wire.ids import BlockKey
from wire.layout import KVLayout
from wire.tier import StoredBlock, Tier

PREFIX = b"baton:kv:"
_PROBE = b"baton:probe"
_PROBE_TTL_MS = 1000
_KEYS_PER_ROUND = 1024
_BYTES_IN_FLIGHT = 8 << 20
_READ_BYTES = 256 << 10
_MAX_LINE_BYTES = 512
_LITTLE_ROOM = 0.9
_GREETING_TIMEOUT_S = 2.0
_VALUE_TIMEOUT_S = 1.0
_CLOSE_TIMEOUT_S = 2.0
_PATIENCE_S = 0.5
"""Pause before the probe that decides: a server that waits for a busy core is not gone."""
_EXISTS = b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n"
_GET = b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n$1\r\n0\r\n$%d\r\n%b\r\n"
_NO, _YES = b":0\r\n", b":1\r\n"
T = TypeVar("T")

log = logging.getLogger(__name__)


class RedisTier(FramedTier):
    """A ColdTier over `redis://`, `rediss://` or `unix://` URLs. A failed command closes its connection.

    Once the server is silent, or has failed three times in a row, no command is sent until a probe succeeds. A separate
    thread probes, so that callers do not wait: at once, then half a second later, and after the third failure every two
    seconds. After three refused writes in a row, as by a full server or a replica, a write is tried every two seconds.

    timeout_s: bounds the connect, and each wait for bytes of a reply. One caller may wait that long in vain, once; a
    block that takes longer is cheaper to compute. ttl_s: time to live since a block's last use; 0 for no end. Raises
    ConfigError for an invalid URL or refused credentials, not for an unreachable server.
    """

    def __init__(
        self,
        url: str,
        layout: KVLayout,
        mac_key: bytes,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        ttl_s: float = 0.0,
    ) -> None:
        super().__init__(Tier.REDIS, layout, mac_key, clock)
        self._ttl_ms = int(ttl_s * 1000)
        self._redis = _connect(url, timeout_s)
        self._is_silent = False
        self._probe: threading.Thread | None = None
        if (reason := greet(url, max(timeout_s, _GREETING_TIMEOUT_S), self._turned_away)) is not None:
            self._breaker.failed()
            log.warning("tier redis does not answer yet: %s", reason)

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        found: list[bool] = []
        for batch in _rounds(keys, _KEYS_PER_ROUND):
            found += self._ask(partial(self._exist, batch), [False] * len(batch))
        return found

    def key_pages(self) -> Iterator[Sequence[BlockKey]]:
        cursor: int | None = None
        while cursor != 0:
            look = partial(self._redis.scan, cursor or 0, match=PREFIX + b"*", count=PAGE_BLOCKS)
            cursor, found = self._answer(self._ask(look, None))
            yield [BlockKey(one.removeprefix(PREFIX)) for one in found]

    def describe(self, keys: Sequence[BlockKey]) -> list[StoredBlock]:
        return self._answer(self._ask(partial(self._describe, keys), None))

    def _describe(self, keys: Sequence[BlockKey]) -> list[StoredBlock]:
        """Describes the values of some keys; a value that is no string counts 0 bytes."""
        with self._redis.pipeline(transaction=False) as pipeline:
            for stored in (PREFIX + key for key in keys):
                pipeline.object("IDLETIME", stored).strlen(stored).getrange(stored, 0, HEAD_BYTES - 1)
            answers = iter(pipeline.execute(raise_on_error=False))
        told = zip(keys, zip(answers, answers, answers, strict=True), strict=True)
        return [
            StoredBlock(key, namespace_of(_or_else(head, b"")), _or_else(num_bytes, 0), _or_else(idle_s, 0))
            for key, (idle_s, num_bytes, head) in told
            if num_bytes != 0
        ]

    def _remove(self, keys: Sequence[BlockKey]) -> bool:
        batches = [[PREFIX + key for key in batch] for batch in _rounds(keys, _KEYS_PER_ROUND)]
        answers = [self._ask(partial(self._redis.unlink, *batch), None) for batch in batches]
        return None not in answers

    def close(self) -> None:
        if self._probe is not None:
            self._probe.join(_CLOSE_TIMEOUT_S)
        self._redis.close()

    def _exist(self, keys: Sequence[BlockKey]) -> list[bool]:
        front = _EXISTS % len(PREFIX + keys[0]) + PREFIX  # all are of one length
        commands = front + (b"\r\n" + front).join(keys) + b"\r\n"
        with closing(_Exchange(self._redis.connection_pool, commands, len(keys))) as exchange:
            answers = bytearray(len(_NO) * len(keys))
            exchange.fill(memoryview(answers))
            if answers.replace(_NO, b"").replace(_YES, b""):
                raise _error_of(exchange.finish_line(bytes(answers)))
            exchange.num_left = 0
            return self._note_found(keys, [digit == _YES[1] for digit in answers[1 :: len(_NO)]])

    def _read(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> Generator[bytes | memoryview, None, None]:
        payloads = iter(into)
        for batch in _rounds(keys, max(1, _BYTES_IN_FLIGHT // self._seal.frame_bytes)):
            if self._ttl_ms:
                self._ask(partial(self._prolong, batch), None)
            make = partial(_Replies, self._redis.connection_pool, batch, self._seal.frame_bytes)
            if (replies := self._ask(make, None)) is None:
                return
            with closing(replies):
                for _ in batch:
                    if (front := self._ask(partial(replies.receive, next(payloads)), None)) is None:
                        return
                    yield front

    def _prolong(self, keys: Sequence[BlockKey]) -> None:
        with self._redis.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.pexpire(PREFIX + key, self._ttl_ms)
            pipeline.execute()

    def sweep(self, shares: Mapping[bytes, float]) -> None:
        asked = partial(self._redis.info, "memory")
        memory: dict[str, int] = self._answer(self._ask(asked, None)) if shares else {}
        max_bytes = memory.get("maxmemory", 0)
        if not max_bytes or memory["used_memory"] < _LITTLE_ROOM * max_bytes:
            return
        stored = [one for page in find(self, Selection(namespaces=frozenset(shares))) for one in page]
        stored.sort(key=lambda one: -one.idle_s)
        for namespace, share in shares.items():
            victims = beyond([one for one in stored if one.namespace == namespace], share * max_bytes)
            self.clear([one.key for one in victims])
            self._count("evicted", len(victims))

    def _write(self, key: BlockKey, front: bytes, payload: memoryview) -> bool:
        return self._ask(lambda: self._set(key, b"".join((front, payload))), False)

    def _set(self, key: BlockKey, frame: bytes) -> bool:
        """Stores a value; returns False if the server refuses it."""
        try:
            self._redis.set(PREFIX + key, frame, px=self._ttl_ms or None)
        except ResponseError as error:
            self._turned_away(error)
            return False
        self._accepted()
        return True

    def _turned_away(self, error: ResponseError) -> None:
        if isinstance(error, OutOfMemoryError):
            self._refused("full", error, ": set its maxmemory-policy to allkeys-lru, or give it more memory")
        else:
            self._refused("read-only", error)

    def _ask(self, command: Callable[[], T], otherwise: T) -> T:
        """Sends a command unless the server is in doubt; returns its answer, or `otherwise`."""
        answer = otherwise if self._is_in_doubt else self._try(command, otherwise)
        if self._is_in_doubt and self._breaker.allows():
            self._start_probe()
        return answer

    @property
    def _is_in_doubt(self) -> bool:
        return self._is_silent or self._breaker.is_open

    def _start_probe(self) -> None:
        if self._probe is None or not self._probe.is_alive():
            self._probe = threading.Thread(target=self._ask_until_settled, name="redis-probe", daemon=True)
            self._probe.start()

    def _ask_until_settled(self) -> None:
        """Probes until the server answers, or the breaker is open."""
        self._try(partial(self._redis.exists, _PROBE), 0)
        while self._is_silent and not self._breaker.is_open:
            self._rest()
            self._try(partial(self._redis.exists, _PROBE), 0)

    def _rest(self) -> None:
        time.sleep(_PATIENCE_S)

    def _try(self, command: Callable[[], T], otherwise: T) -> T:
        """Sends a command; returns its answer, or counts an error and returns `otherwise`."""
        try:
            answer = command()
        except (RedisError, OSError) as error:
            self._failed(error)
            self._is_silent = not isinstance(error, ResponseError)
            return otherwise
        self._succeeded()
        self._is_silent = False
        return answer


class _Exchange:
    """Commands sent at once on their own connection; answers are received directly into payloads.

    num_left: answers that are not received whole yet; if any are left at the end, the connection is closed.
    """

    def __init__(self, pool: Any, commands: bytes, num_answers: int) -> None:
        self._pool = pool
        self.num_left = num_answers
        self._deadline = time.monotonic() + _VALUE_TIMEOUT_S
        self._connection = pool.get_connection()
        try:
            self._connection.send_packed_command([commands])
        except BaseException:
            self.close()
            raise

    def fill(self, into: memoryview) -> None:
        receive_exactly(self._receive_some, into)

    def finish_line(self, line: bytes) -> bytes:
        """Receives the rest of a line, at most 512 bytes."""
        more = memoryview(bytearray(_MAX_LINE_BYTES))
        while b"\r\n" not in line and len(line) < _MAX_LINE_BYTES:
            line += bytes(more[: self._receive_some(more)])
        return line

    def close(self) -> None:
        """Returns the connection to its pool; closes it if an answer is left on it."""
        if self.num_left:
            self._connection.disconnect()
        self._pool.release(self._connection)

    def _receive_some(self, into: memoryview) -> int:
        num_received: int = self._connection._sock.recv_into(into)  # its parser would copy what it receives
        if not num_received:
            raise ConnectionError("Redis has hung up")
        if time.monotonic() > self._deadline:
            raise TimeoutError("Redis sends too slowly")
        return num_received


class _Replies(_Exchange):
    """The values of some keys.

    Asks for one byte more than a frame, so that a value that is too long shows and is never read whole.
    """

    def __init__(self, pool: Any, keys: Sequence[BlockKey], frame_bytes: int) -> None:
        self._start = b"$%d\r\n" % frame_bytes
        self._head = memoryview(bytearray(len(self._start) + FRONT_BYTES))
        self._end = memoryview(bytearray(2))
        end = b"%d" % frame_bytes
        commands = [_GET % (len(PREFIX) + len(key), PREFIX + key, len(end), end) for key in keys]
        super().__init__(pool, b"".join(commands), len(keys))

    def receive(self, payload: memoryview) -> memoryview | bytes | None:
        """Fills the next value's payload and returns its front; None for a missing value, b"" for a malformed one.

        The front is valid until the next call. No call may follow None or b"".
        """
        num_received, self._deadline = 0, time.monotonic() + _VALUE_TIMEOUT_S
        while num_received < len(self._head):
            num_received += self._receive_some(self._head[num_received:])
            if bytes(self._head[:num_received])[: len(self._start)] != self._start[:num_received]:
                return self._other_reply(bytes(self._head[:num_received]))
        self.fill(payload)
        self.fill(self._end)
        self.num_left -= 1
        return self._head[len(self._start) :]

    def _other_reply(self, line: bytes) -> bytes | None:
        line = self.finish_line(line)
        if line.startswith((b"$0\r", b"$-1\r", b"_\r")):
            return None
        if line.startswith((b"$", b"-WRONGTYPE")):
            return b""
        raise _error_of(line)


def _or_else(answer: T | ResponseError | None, otherwise: T) -> T:
    """Returns an answer, or `otherwise` for a refusal: a server that evicts by frequency has no idle times."""
    return otherwise if answer is None or isinstance(answer, ResponseError) else answer


def _error_of(line: bytes) -> ResponseError:
    return ResponseError(line.partition(b"\r")[0].decode(errors="replace")[:_MAX_LINE_BYTES])


def greet(url: str, timeout_s: float, on_refusal: Callable[[ResponseError], None] = lambda _: None) -> str | None:
    """Tries each command on the server, so that a wrong password fails the start.

    Returns the reason if the server does not answer. Calls `on_refusal` if it refuses writes. Raises ConfigError for an
    invalid URL or refused credentials.
    """
    try:
        with _connect(url, timeout_s) as patient:
            _warn_of_policy(patient)
            patient.getrange(_PROBE, 0, 0)
            patient.exists(_PROBE)
            patient.unlink(_PROBE)
            patient.set(_PROBE, b"", px=_PROBE_TTL_MS)
    except (AuthenticationError, NoPermissionError) as error:
        raise ConfigError("redis.url: the server does not take these credentials") from error
    except TypeError as error:
        raise ConfigError("redis.url: it has an option that no connection takes") from error
    except OutOfMemoryError as error:
        on_refusal(error)
    except RedisError as error:
        return str(error)
    return None


def _rounds(keys: Sequence[BlockKey], size: int) -> list[Sequence[BlockKey]]:
    return [keys[start : start + size] for start in range(0, len(keys), size)]


def _warn_of_policy(server: Any) -> None:
    try:
        policy = server.config_get("maxmemory-policy").get("maxmemory-policy")
    except RedisError as error:
        log.info("the cold tier does not tell its eviction policy: %s", error)
        return
    if policy == "noeviction":
        log.warning("the cold tier never evicts (maxmemory-policy noeviction): once full, it refuses all blocks")


def _connect(url: str, timeout_s: float) -> Any:
    """Connects lazily; without the library's own retries, which would multiply the timeouts."""
    try:
        return redis.Redis.from_url(
            url,
            socket_connect_timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_read_size=_READ_BYTES,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise ConfigError("redis.url: it must begin with redis://, rediss:// or unix://") from error
