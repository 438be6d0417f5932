"""Names of KV blocks, from the tokens and the namespace of their KV. The only module that makes keys.

root   = HMAC-SHA-256(secret, tenant, fingerprint, layout, adapter, policy, version of frames)
key[i] = SHA-256(key[i-1] || tokens of block i as little-endian u32),  key[-1] = root
tail   = SHA-256(key[i] || "tail" || number of tokens || tokens)       a last block, partly filled
kept[i] = SHA-256(root, "kept", policy, key of the whole prompt, i)    a block of the tokens that a policy keeps; one
                                                                       filled behind these has a key[i] on the last one

KV computed after a drop is named only after kept blocks.

If the first n blocks are public, their chain begins with the public root and continues under the tenant's: key[n] =
SHA-256(root || key[n-1] || tokens of block n).

The root itself never leaves the server's processes: its first block has the root's digest as parent.
"""

import hashlib
import hmac
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgpack

from wire.ids import BlockKey, NamespaceRoot

FRAME_VERSION = 3
"""The version of a block's frame and checksum. Releases with other versions have other keys: neither reads, or deletes
as damaged, what the other has written."""


class BlockName(NamedTuple):
    """A block's key and its proofs: the parent's key, and digests of its token ids and of its root.

    A tail, a partly filled last block, is never indexed on a device or sent to Redis, and is evicted first.
    """

    key: BlockKey
    parent: bytes
    tokens_digest: bytes
    root_digest: bytes
    is_tail: bool = False


def namespace_root(
    secret: bytes, tenant: str, fingerprint: bytes, layout: bytes, adapter: str, policy: str
) -> NamespaceRoot:
    """Derives the root of all keys of one tenant, model, layout, adapter and policy. Fields are length-prefixed.

    layout: includes KV dtype and quantization. policy: empty for the full cache.
    """
    parts = [tenant, fingerprint, layout, adapter, policy, FRAME_VERSION]
    return NamespaceRoot(hmac.digest(secret, msgpack.packb(parts), "sha256"))


def digest_of(root: NamespaceRoot) -> bytes:
    """Returns the digest by which stores know a namespace."""
    return hashlib.sha256(root).digest()


def session_of(root: NamespaceRoot, session: str) -> bytes:
    """Returns the digest by which stores know a session; it differs between namespaces."""
    return hmac.digest(root, b"session" + session.encode(), "sha256")


@dataclass(frozen=True)
class PublicPart:
    """The blocks at a prompt's start that all tenants share, and the root of their names."""

    root: NamespaceRoot
    num_blocks: int


@dataclass(frozen=True)
class _Namespace:
    """A root, and the digest by which stores know it."""

    root: NamespaceRoot
    digest: bytes


class NameChain:
    """The names of a growing sequence of tokens, each full block hashed once.

    >>> chain = NameChain(root, block_size=16); chain.extend(prompt_ids); chain.cover(len(prompt_ids) - 1)

    front: names of blocks before the first token of `extend`; num_tokens counts their tokens.
    """

    def __init__(
        self,
        root: NamespaceRoot,
        block_size: int,
        public: PublicPart | None = None,
        front: Sequence[BlockName] = (),
    ) -> None:
        self._own = _Namespace(root, digest_of(root))
        self._public = _Namespace(public.root, digest_of(public.root)) if public else self._own
        self._num_public = public.num_blocks if public else 0
        self._block_size = block_size
        self._num_in_front = len(front) * block_size
        self._tokens = array("I")
        self._full = list(front)

    @property
    def num_tokens(self) -> int:
        return self._num_in_front + len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens; names every block they fill."""
        ids = array("I")
        ids.extend(tokens)  # whole or not at all; bytes are numbers, too, which an array of them would not say
        self._tokens.extend(ids)
        first, stop, size = len(self._full), self.num_tokens // self._block_size, 4 * self._block_size
        data = self._data(first * self._block_size, stop * self._block_size)
        for index in range(first, stop):
            block = data[(index - first) * size : (index - first + 1) * size]
            self._full.append(self._name(index, block, block))

    def full(self, num_tokens: int, from_token: int = 0) -> list[BlockName]:
        """Names the full blocks of the first `num_tokens` tokens, except full blocks of the first `from_token`."""
        return self._full[from_token // self._block_size : num_tokens // self._block_size]

    def tail(self, num_tokens: int) -> BlockName | None:
        """Names the tail of the first `num_tokens` tokens, if they have one."""
        index, num_in_tail = divmod(num_tokens, self._block_size)
        if num_in_tail == 0:
            return None
        data = self._data(index * self._block_size, num_tokens)
        covered = b"tail" + struct.pack("<I", num_in_tail) + data
        return self._name(index, covered, data)._replace(is_tail=True)

    def cover(self, num_tokens: int) -> list[BlockName]:
        """Names all blocks of the first `num_tokens` tokens, the tail included."""
        tail = self.tail(num_tokens)
        return self.full(num_tokens) if tail is None else [*self.full(num_tokens), tail]

    def kept(self, policy: str, num_prompt: int, num_blocks: int) -> "NameChain":
        """Begins a chain with the `num_blocks` blocks that a policy keeps of the first `num_prompt` tokens.

        All names are under the tenant's root, even after a public prompt.
        """
        prompt_key, digest = self.cover(num_prompt)[-1].key, hashlib.sha256(policy.encode()).digest()
        names: list[BlockName] = []
        for index in range(num_blocks):
            key = hashlib.sha256(self._own.root + msgpack.packb(["kept", policy, prompt_key, index])).digest()
            parent = names[-1].key if names else prompt_key
            names.append(BlockName(BlockKey(key), parent, digest, self._own.digest))
        return NameChain(self._own.root, self._block_size, front=names)

    def _data(self, start: int, end: int) -> bytes:
        return token_bytes(self._tokens[start - self._num_in_front : end - self._num_in_front])

    def _name(self, index: int, covered: bytes, data: bytes) -> BlockName:
        space = self._public if index < self._num_public else self._own
        before = self._full[index - 1].key if index else b""
        is_first = index in (0, self._num_public)
        key = BlockKey(hashlib.sha256((space.root if is_first else b"") + before + covered).digest())
        return BlockName(key, space.digest if is_first else before, hashlib.sha256(data).digest(), space.digest)


def cover(
    root: NamespaceRoot, tokens: Sequence[int], block_size: int, public: PublicPart | None = None
) -> list[BlockName]:
    """Names all blocks of `tokens`, the tail included."""
    chain = NameChain(root, block_size, public)
    chain.extend(tokens)
    return chain.cover(len(tokens))


def key_of_last(root: NamespaceRoot, tokens: Sequence[int], block_size: int, public: PublicPart) -> BlockKey:
    """Computes the key of the last full block of `tokens`, ten times as fast as `cover` names all blocks."""
    data, num_bytes, key = token_bytes(tokens), 4 * block_size, b""
    roots = {0: public.root if public.num_blocks else root, public.num_blocks: root}
    for index in range(len(tokens) // block_size):
        key = hashlib.sha256(roots.get(index, b"") + key + data[index * num_bytes : (index + 1) * num_bytes]).digest()
    return BlockKey(key)


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Packs token ids as little-endian u32. Raises OverflowError for ids out of range."""
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
