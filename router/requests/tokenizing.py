"""Tokenization of prompts: the threads, a cache of the pieces of chats, and public prefixes.

The shortest waiting prompt is first; long prompts have a separate thread. Pieces of recent chats, and declared public
prefixes, are not tokenized again.
"""

import asyncio
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import takewhile
from typing import Any, TypeVar

from router.config import RouterConfig
from text.chat import Chat, Rendered, Renderer
from text.template.turns import ChatTurn
from text.tokenizer_protocol import TextCodec
from wire.block_names import PublicPart
from wire.errors import ConfigError, InvalidRequest, Unsupported
from wire.ids import PUBLIC, NamespaceRoot

MAX_ADDED_CHARS = 1 << 20
_QUESTIONS = ("a", "1")
"""Two user turns: the common first tokens of both chats come from the system message alone."""


@dataclass(frozen=True)
class PublicPrefixes:
    """The token ids of public prefixes, in whole blocks, and the root of their block names."""

    root: NamespaceRoot
    token_ids: tuple[tuple[int, ...], ...] = ()

    @classmethod
    async def make(cls, config: RouterConfig, codec: TextCodec, renderer: Renderer) -> "PublicPrefixes":
        """Tokenizes each text both as a prompt's beginning and as a chat's system message. Raises ConfigError."""
        size, found = config.model.layout.block_size, []
        for number, text in enumerate(config.settings.public_prefixes):
            known = [tuple(codec.encode(text)), await _system_tokens(text, codec, renderer)]
            whole = [one[: len(one) // size * size] for one in known if len(one) >= size]
            if not whole:
                raise ConfigError(
                    f"router.public_prefixes[{number}] must have at least {size} tokens, the size of a block"
                )
            found += whole
        return cls(config.root_of(PUBLIC), tuple(found))

    def part_of(self, prompt_ids: Sequence[int], block_size: int) -> PublicPart | None:
        """Finds the longest public prefix that a prompt begins with."""
        begun = [len(one) for one in self.token_ids if tuple(prompt_ids[: len(one)]) == one]
        return PublicPart(self.root, max(begun) // block_size) if begun else None


NO_PREFIXES = PublicPrefixes(NamespaceRoot(b""))


async def _system_tokens(text: str, codec: TextCodec, renderer: Renderer) -> tuple[int, ...]:
    """Returns the first tokens of each chat with this system message; none if the template refuses it."""
    try:
        one, other = [await _chat_tokens(text, question, codec, renderer) for question in _QUESTIONS]
    except (InvalidRequest, Unsupported):
        return ()
    return tuple(token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


async def _chat_tokens(text: str, question: str, codec: TextCodec, renderer: Renderer) -> list[int]:
    chat = Chat((ChatTurn("system", text), ChatTurn("user", question)))
    rendered: Rendered = await chat.render(renderer, codec.special_tokens, MAX_ADDED_CHARS)
    return [token for piece in rendered.pieces(codec) for token in codec.encode_rendered(piece)]


T = TypeVar("T")
MAX_SHORT_LEN = 32 << 10
"""Most characters or tokens of a short prompt: some 15 ms of work, where a text of 4 MiB takes seconds."""
LONG_NICENESS = 10
"""Niceness of the thread for long prompts, like the engine's: it takes no time from the event loop."""
MAX_KNOWN_BYTES = 64 << 20
MAX_TENANT_BYTES = 16 << 20
ENTRY_BYTES = 256
"""Memory of a piece besides its tokens."""


class TokenizerThreads:
    """A thread for short prompts and a thread for long prompts. Belongs to the running event loop."""

    def __init__(self) -> None:
        self._short = TokenizerThread(0)
        self._long = TokenizerThread(LONG_NICENESS)

    async def run(self, length: int, work: Callable[[], T]) -> T:
        """Runs the work for a prompt of a given length, shortest first; cancellation takes it out of the queue."""
        thread = self._short if length <= MAX_SHORT_LEN else self._long
        result: T = await thread.run(length, work)
        return result

    def close(self) -> None:
        """Stops the threads; running work ends by itself."""
        self._short.close()
        self._long.close()


@dataclass(frozen=True, eq=False)
class _Waiter:
    length: int
    work: Callable[[], Any]
    result: asyncio.Future[Any]


class TokenizerThread:
    """A thread that works on one prompt at a time, the shortest waiting prompt first."""

    def __init__(self, niceness: int) -> None:
        self._thread = ThreadPoolExecutor(1, "tokenize", os.nice, (niceness,))
        self._loop = asyncio.get_running_loop()
        self._waiting: list[_Waiter] = []
        self._is_busy = False

    async def run(self, length: int, work: Callable[[], Any]) -> Any:
        waiter = _Waiter(length, work, self._loop.create_future())
        self._waiting.append(waiter)
        self._begin_next()
        try:
            return await waiter.result
        finally:
            if waiter in self._waiting:  # cancelled: drops its text at once
                self._waiting.remove(waiter)

    def close(self) -> None:
        self._waiting.clear()
        self._thread.shutdown(wait=False)

    def _begin_next(self) -> None:
        if self._waiting and not self._is_busy:
            waiter = min(self._waiting, key=lambda one: one.length)
            self._waiting.remove(waiter)
            self._is_busy = True
            self._loop.run_in_executor(self._thread, waiter.work).add_done_callback(partial(self._ended, waiter.result))

    def _ended(self, result: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
        self._is_busy = False
        error = done.exception()
        if not result.done():
            result.set_result(done.result()) if error is None else result.set_exception(error)
        self._begin_next()


class PieceCache:
    """An LRU cache of chat pieces' tokens, by digest, with bounds for each tenant and for all.

    Only the tenant that sent a piece can hit it, so that response times tell other tenants nothing. Thread-safe.
    max_bytes: at least max_tenant_bytes.
    """

    def __init__(self, max_bytes: int = MAX_KNOWN_BYTES, max_tenant_bytes: int = MAX_TENANT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._tenants: OrderedDict[NamespaceRoot, _Pieces] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return sum(pieces.num_bytes for pieces in self._tenants.values())

    def encode(self, root: NamespaceRoot, pieces: Iterable[str], codec: TextCodec) -> list[int]:
        """Joins the tokens of pieces; encodes pieces that the root's tenant has not sent lately."""
        token_ids: list[int] = []
        with self._lock:
            known = self._tenants.setdefault(root, _Pieces())
            self._tenants.move_to_end(root)
        for piece in pieces:
            digest = sha256(piece.encode(errors="surrogatepass")).digest()
            with self._lock:
                found = known.find(digest)
            if found is None:
                found = array("I", codec.encode_rendered(piece))
                with self._lock:
                    known.add(digest, found, self._max_tenant_bytes)
            token_ids += found
        with self._lock:
            self._drop_oldest()
        return token_ids

    def _drop_oldest(self) -> None:
        """Drops whole tenants until the rest is within the bound."""
        excess = self.num_bytes - self._max_bytes
        while excess > 0:
            _, dropped = self._tenants.popitem(last=False)
            excess -= dropped.num_bytes


class _Pieces:
    """The tokens of a tenant's latest pieces."""

    def __init__(self) -> None:
        self.num_bytes = ENTRY_BYTES
        self._tokens: OrderedDict[bytes, array[int]] = OrderedDict()

    def find(self, digest: bytes) -> "array[int] | None":
        if digest in self._tokens:
            self._tokens.move_to_end(digest)
        return self._tokens.get(digest)

    def add(self, digest: bytes, token_ids: "array[int]", max_bytes: int) -> None:
        """Adds a piece, unless it is there or exceeds the bound; drops the oldest pieces beyond the bound."""
        if digest in self._tokens or _num_bytes(token_ids) > max_bytes - ENTRY_BYTES:
            return
        self._tokens[digest] = token_ids
        self.num_bytes += _num_bytes(token_ids)
        while self.num_bytes > max_bytes:
            _, dropped = self._tokens.popitem(last=False)
            self.num_bytes -= _num_bytes(dropped)


def _num_bytes(token_ids: "array[int]") -> int:
    return ENTRY_BYTES + len(token_ids) * token_ids.itemsize
