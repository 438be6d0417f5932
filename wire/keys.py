"""Names of KV blocks: who computed what from which tokens. The only module that makes keys.

root   = HMAC-SHA-256(secret, tenant, fingerprint, layout, adapter)
key[i] = SHA-256(key[i-1] || tokens of block i as little-endian u32),  key[-1] = root
tail   = SHA-256(key[i] || "tail" || number of tokens || tokens)       a last block, partly filled
"""

import hashlib
import hmac
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

from wire.ids import BlockKey, NamespaceRoot


@dataclass(frozen=True)
class BlockName:
    """A block's key and what vouches for it: its parent's key and a digest of its own token ids."""

    key: BlockKey
    parent: bytes
    tokens_digest: bytes


def namespace_root(
    secret: bytes, tenant: str, fingerprint: bytes, layout: bytes, adapter: str
) -> NamespaceRoot:
    """The root under which all keys of one tenant, model, layout and adapter stand. Fields are length-prefixed."""
    return NamespaceRoot(hmac.digest(secret, msgpack.packb([tenant, fingerprint, layout, adapter]), "sha256"))


class KeyChain:
    """The keys of a growing sequence of tokens, each full block hashed once.

    >>> chain = KeyChain(root, block_size=16); chain.extend(tokens); chain.full, chain.tail()
    """

    def __init__(self, root: NamespaceRoot, block_size: int) -> None:
        self._root = root
        self._block_size = block_size
        self._pending: list[int] = []
        self.full: list[BlockName] = []

    @property
    def tip(self) -> bytes:
        """Key of the last full block, or the root."""
        return self.full[-1].key if self.full else self._root

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens; names every block they fill."""
        self._pending.extend(tokens)
        size = self._block_size
        num_full = len(self._pending) // size
        for start in range(0, num_full * size, size):
            self.full.append(_full_name(self.tip, self._pending[start : start + size]))
        del self._pending[: num_full * size]

    def tail(self) -> BlockName | None:
        """Name of the last block if it is partly filled, under a key that covers its length too."""
        return _tail_name(self.tip, self._pending) if self._pending else None


def chain(root: NamespaceRoot, tokens: Sequence[int], block_size: int) -> list[BlockName]:
    """Names of all full blocks of `tokens`."""
    keys = KeyChain(root, block_size)
    keys.extend(tokens)
    return keys.full


def cover(root: NamespaceRoot, tokens: Sequence[int], block_size: int) -> list[BlockName]:
    """Names of all blocks of `tokens`, a partly filled last one included."""
    keys = KeyChain(root, block_size)
    keys.extend(tokens)
    tail = keys.tail()
    return keys.full if tail is None else [*keys.full, tail]


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian u32. Raises OverflowError for ids outside of that."""
    ids = array("I", tokens)
    if ids.itemsize != 4 or struct.pack("=I", 1) != struct.pack("<I", 1):
        return struct.pack(f"<{len(tokens)}I", *tokens)
    return ids.tobytes()


def _full_name(parent: bytes, tokens: Sequence[int]) -> BlockName:
    data = token_bytes(tokens)
    return BlockName(BlockKey(hashlib.sha256(parent + data).digest()), parent, _digest(data))


def _tail_name(parent: bytes, tokens: Sequence[int]) -> BlockName:
    data = token_bytes(tokens)
    covered = parent + b"tail" + struct.pack("<I", len(tokens)) + data
    return BlockName(BlockKey(hashlib.sha256(covered).digest()), parent, _digest(data))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
