"""The library of prefixes: KV of tokens, stored by name in a list of tiers, without Ray, router or engine.

>>> store = PrefixStore([tiers.files("cache", max_bytes=1 << 30)], model=b"weights", layout=layout, secret=secret)
>>> store.put(tokens, kv)
>>> prefix = store.get_closest(tokens + more)

A block's name depends on all tokens up to its end, under a root of secret, tenant, model and layout. If any of these
differs, names differ: two such stores can share a folder or a server and find nothing of each other, which is a miss
and no error.
"""

import secrets
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
from types import TracebackType

import torch

from kv_store.device_pool import view_pages
from kv_store.frame import mac_key_of
from kv_store.node.messages import MAX_TTL_S
from kv_store.prefix.tier_list import TierList
from kv_store.tiers.cold_tiers import open_tiers
from wire.block_names import BlockName, cover, namespace_root
from wire.errors import ConfigError, InvalidRequest, Unsupported
from wire.ids import DEFAULT_TENANT, AttemptId
from wire.layout import KVLayout
from wire.tier import ColdSettings, FarStatus

MIN_SECRET_BYTES = 32


@dataclass(frozen=True)
class StoredPrefix:
    """The stored KV of the first tokens of a sequence, in whole blocks.

    kv: `[num_layers, 2, num_kv_heads, num_tokens, head_dim]` of the layout's dtype, on the CPU, the caller's own; the
    2 is key and value. num_tokens: 0 if nothing was found.
    """

    num_tokens: int
    kv: torch.Tensor


@dataclass(frozen=True)
class Pin:
    """A claim on the blocks of the first `num_tokens` tokens of a sequence."""

    pin_id: AttemptId
    num_tokens: int


class PrefixStore:
    """Prefixes of one tenant, model and layout in tiers, nearest first. Thread-safe.

    Calls block while tiers answer, each within its timeout. A failed tier is a miss; so is a block that fails its
    checksum or MAC, which is deleted. Sequences with the same beginning share its blocks. A partly filled last block is
    not stored.
    """

    def __init__(
        self,
        tiers: Sequence[ColdSettings],
        *,
        model: bytes,
        layout: KVLayout,
        secret: bytes,
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        """Opens the tiers, which are made by `baton.tiers` or are a cluster's settings.

        model: a digest, unique to the weights and to the program that computes the KV. layout: a block's layout; put
        and get_closest need a layout without quantization. secret: at least 32 bytes, from which names and MACs are
        made: whatever has it can read and forge blocks. tenant: separates the names of callers.

        Raises ConfigError for no tier, a short secret, or a tier that cannot be opened.
        """
        if not tiers:
            raise ConfigError("tiers: a store needs one")
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(f"secret: at least {MIN_SECRET_BYTES} bytes, as of secrets.token_bytes")
        self.layout = layout
        self.root = namespace_root(secret, tenant, model, layout.encode(), adapter="", policy="")
        self.tiers = TierList(open_tiers(tiers, layout, mac_key_of(secret)))

    def put(self, tokens: Sequence[int], kv: torch.Tensor) -> int:
        """Stores the full blocks that a tier lacks; returns how many tokens from the front are now stored in some tier.

        kv: `[num_layers, 2, num_kv_heads, len(tokens), head_dim]` of the layout's dtype, on any device; not changed.
        Raises InvalidRequest for another shape or dtype, or ids beyond u32; Unsupported for a quantized layout.
        """
        self._require_plain()
        self._require_fit(tokens, kv)
        size = self.layout.block_size

        def payload_of(place: int) -> memoryview:
            block = kv[:, :, :, place * size : (place + 1) * size].detach().cpu().contiguous()
            return block.flatten().view(torch.uint8).numpy().data

        return size * _front(self.tiers.write(self._names(tokens), payload_of))

    def get_closest(self, tokens: Sequence[int]) -> StoredPrefix:
        """Reads the KV of the longest stored front of tokens; copies the blocks to nearer tiers.

        A model must run at least one token to continue: pass all tokens but the last. Raises InvalidRequest for ids
        beyond u32; Unsupported for a quantized layout.
        """
        self._require_plain()
        names = self._names(tokens)
        names = names[: _front(self.tiers.exists(names))]
        pages = torch.empty(len(names), self.layout.payload_bytes, dtype=torch.uint8)
        num_read = sum(1 for _ in self.tiers.read(names, [page.numpy().data for page in pages]))
        blocks = view_pages(pages[:num_read], self.layout).data
        kv = blocks.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        return StoredPrefix(kv.shape[3], kv)

    def contains(self, tokens: Sequence[int]) -> bool:
        """Returns whether all full blocks of tokens, and at least one, are stored. Their bytes are not read.

        Raises InvalidRequest for ids that no u32 holds.
        """
        names = self._names(tokens)
        return bool(names) and all(self.tiers.exists(names))

    def evict(self, tokens: Sequence[int], from_token: int = 0) -> None:
        """Deletes the full blocks of tokens from every tier, also pinned blocks; longer sequences lose their front.

        from_token: blocks that begin before it stay, such as a system prompt that other sequences share.
        Raises InvalidRequest for ids that no u32 holds.
        """
        self.tiers.delete([name.key for name in self._names(tokens)[self.layout.num_blocks(from_token) :]])

    def pin(self, tokens: Sequence[int], ttl_s: float = MAX_TTL_S) -> Pin:
        """Keeps the stored front of tokens in host memory until `unpin`, or for `ttl_s` seconds, at most an hour.

        Reads blocks from farther tiers for that; Redis and files still evict their copies. The pin has fewer tokens if
        fewer are stored, or if pins fill the memory. Raises Unsupported without a tier of host memory; InvalidRequest
        for ids that no u32 holds, or another ttl_s.
        """
        if not 0 < ttl_s <= MAX_TTL_S:
            raise InvalidRequest("ttl_s", f"above 0, and at most {MAX_TTL_S:.0f} seconds")
        host, names = self.tiers.host, self._names(tokens)
        pin_id, num_held = AttemptId(secrets.token_hex(8)), 0
        payload = memoryview(bytearray(self.layout.payload_bytes))
        with closing(self.tiers.read(names, [payload] * len(names))) as blocks:
            for _ in blocks:
                if not host.hold(pin_id, names[num_held], payload, ttl_s):
                    break
                num_held += 1
        return Pin(pin_id, num_held * self.layout.block_size)

    def unpin(self, pin: Pin) -> None:
        """Ends a pin. A second call does nothing."""
        self.tiers.host.release(pin.pin_id)

    def status(self) -> list[FarStatus]:
        """Returns each tier's state, and its counts since this store was opened, in order."""
        return self.tiers.status()

    def close(self) -> None:
        """Closes the tiers, after the last call; waits within bounds for a file system. Frees host memory."""
        self.tiers.close()

    def __enter__(self) -> "PrefixStore":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _names(self, tokens: Sequence[int]) -> list[BlockName]:
        num_full = len(tokens) - len(tokens) % self.layout.block_size
        try:
            return cover(self.root, tokens[:num_full], self.layout.block_size)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest("tokens", "they are whole numbers from 0 to 4294967295") from error

    def _require_plain(self) -> None:
        if self.layout.is_quantized:
            raise Unsupported(f"a tensor of KV in {self.layout.quantization}: an engine's blocks can be stored in it")

    def _require_fit(self, tokens: Sequence[int], kv: torch.Tensor) -> None:
        num_layers, two, num_heads, _, head_dim = self.layout.shape
        wanted, dtype = (num_layers, two, num_heads, len(tokens), head_dim), str(kv.dtype).removeprefix("torch.")
        if tuple(kv.shape) != wanted:
            raise InvalidRequest("kv", f"its shape is {[*kv.shape]}, and {[*wanted]} in this layout")
        if dtype != self.layout.dtype:
            raise InvalidRequest("kv", f"it is {dtype}, and {self.layout.dtype} in this layout")


def _front(is_here: Sequence[bool]) -> int:
    """Counts the blocks before the first missing block."""
    return sum(1 for _ in takewhile(bool, is_here))
