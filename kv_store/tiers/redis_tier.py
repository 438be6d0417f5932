"""The cold tier on a Redis or Valkey server."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, RedisError, ResponseError
from redis.retry import Retry

from kv_store.breaker import Breaker
from kv_store.tiers.cold_tier import FramedTier
from wire.errors import ConfigError
from wire.ids import BlockKey
from wire.layout import KVLayout

_PREFIX = b"baton:kv:"
_PROBE = b"baton:probe"
_PROBE_TTL_MS = 1000
_KEYS_PER_ROUND = 1024
_READ_BYTES = 256 << 10
_GREETING_TIMEOUT_S = 2.0
_CLOSE_TIMEOUT_S = 2.0
T = TypeVar("T")

log = logging.getLogger(__name__)


class RedisTier(FramedTier):
    """A ColdTier over `redis://`, `rediss://` or `unix://` URLs. A connection on which a command failed is closed.

    Once the server is silent, or has failed three times in a row, no command is sent until a probe has succeeded. A
    thread of its own probes, so that callers do not wait: at once until the third failure, then every two seconds.
    Once it has refused three writes in a row, as a full one or a replica does, one write every two seconds is tried.

    timeout_s: for a connection to be made, and for each reply to begin and go on. One caller may wait that long in
    vain, once; a block that takes longer is cheaper to compute.
    Raises ConfigError if the URL is none or the server refuses these credentials; one that is away is no error.
    """

    def __init__(
        self, url: str, layout: KVLayout, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(layout)
        self._redis = _connect(url, timeout_s)
        self._breaker = Breaker(clock)
        self._writes = Breaker(clock)
        self._refusal = ""
        self._is_silent = False
        self._probe: threading.Thread | None = None
        if (reason := greet(url, max(timeout_s, _GREETING_TIMEOUT_S), self._refused)) is not None:
            self._breaker.failed()
            log.warning("the cold tier does not answer yet: %s", reason)

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        found: list[bool] = []
        for batch in _rounds(keys):
            found += self._ask(partial(self._exist, batch), [False] * len(batch))
        return found

    def delete(self, keys: Sequence[BlockKey]) -> None:
        for batch in _rounds(keys):
            self._ask(partial(self._redis.unlink, *(_PREFIX + key for key in batch)), 0)

    def close(self) -> None:
        if self._probe is not None:
            self._probe.join(_CLOSE_TIMEOUT_S)
        self._redis.close()

    @property
    def _state(self) -> str:
        if self._breaker.is_open:
            return "broken"
        return self._refusal if self._writes.is_open else "up"

    def _exist(self, keys: Sequence[BlockKey]) -> list[bool]:
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(_PREFIX + key)
        return [bool(found) for found in pipeline.execute()]

    def _read(self, key: BlockKey, max_bytes: int) -> bytes:
        return self._ask(lambda: self._get_range(key, max_bytes), b"")

    def _write(self, key: BlockKey, frame: bytes) -> bool:
        return self._writes.allows() and self._ask(lambda: self._set(key, frame), False)

    def _set(self, key: BlockKey, frame: bytes) -> bool:
        """Stores a value; False if the server answers, but refuses it."""
        try:
            self._redis.set(_PREFIX + key, frame)
        except ResponseError as error:
            self._refused(error)
            return False
        with self._lock:
            was_refusing = self._writes.is_open
            self._writes.succeeded()
        if was_refusing:
            log.warning("Redis takes blocks again")
        return True

    def _refused(self, error: ResponseError) -> None:
        is_full = isinstance(error, OutOfMemoryError)
        with self._lock:
            was_refusing = self._writes.is_open
            self._writes.failed()
            self._refusal = "full" if is_full else "read-only"
            self._counted["refused"] += 1
        if self._writes.is_open and not was_refusing:
            advice = ": set its maxmemory-policy to allkeys-lru, or give it more memory" if is_full else ""
            log.warning("Redis refuses blocks (%s)%s", error, advice)

    def _get_range(self, key: BlockKey, max_bytes: int) -> bytes:
        try:
            return bytes(self._redis.getrange(_PREFIX + key, 0, max_bytes - 1))
        except ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            return b"a value of another type"

    def _ask(self, command: Callable[[], T], otherwise: T) -> T:
        """Sends a command, unless in doubt; returns its answer, or `otherwise`."""
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
        """Probes until the server speaks, or the breaker is open."""
        self._try(partial(self._redis.exists, _PROBE), 0)
        while self._is_silent and not self._breaker.is_open:
            self._try(partial(self._redis.exists, _PROBE), 0)

    def _try(self, command: Callable[[], T], otherwise: T) -> T:
        """Sends a command; returns its answer, or `otherwise` and counts an error."""
        try:
            answer = command()
        except RedisError as error:
            self._failed(error)
            return otherwise
        self._succeeded()
        return answer

    def _failed(self, error: RedisError) -> None:
        with self._lock:
            was_open = self._breaker.is_open
            self._breaker.failed()
            self._is_silent = not isinstance(error, ResponseError)
            self._counted["errors"] += 1
        if self._breaker.is_open and not was_open:
            log.warning("the cold tier is left alone for now: %s", error)

    def _succeeded(self) -> None:
        with self._lock:
            was_open = self._breaker.is_open
            self._breaker.succeeded()
            self._is_silent = False
        if was_open:
            log.warning("the cold tier answers again")


def greet(url: str, timeout_s: float, on_refusal: Callable[[ResponseError], None] = lambda _: None) -> str | None:
    """Tries the commands of later on the server, while a wrong password can still fail the start.

    Returns the reason if the server does not answer. Calls `on_refusal` for one that takes no blocks. Raises
    ConfigError for a URL that is none, or credentials that it refuses.
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


def _rounds(keys: Sequence[BlockKey]) -> list[Sequence[BlockKey]]:
    return [keys[start : start + _KEYS_PER_ROUND] for start in range(0, len(keys), _KEYS_PER_ROUND)]


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
