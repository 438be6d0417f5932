"""Names of real tokens, and payloads that follow from the names, so that any mix-up shows."""

import hashlib
from collections.abc import Sequence

from kv_store.frame import MAC_KEY_BYTES, checksum_of
from kv_store.node.messages import Block
from kv_store.tiers.cold_tier import ColdTier
from wire.block_names import BlockName, cover
from wire.ids import NamespaceRoot, SlotId
from wire.layout import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
ROOT = NamespaceRoot(b"R" * 32)
MAC_KEY = b"M" * MAC_KEY_BYTES


def names_of(num_tokens: int, first: int = 0) -> list[BlockName]:
    """Names of the blocks of `num_tokens` tokens, the tail included; `first` tells one sequence from another."""
    return cover(ROOT, range(first, first + num_tokens), LAYOUT.block_size)


def payload_of(name: BlockName) -> bytes:
    return hashlib.shake_256(name.key).digest(LAYOUT.payload_bytes)


def put_one(tier: ColdTier, name: BlockName) -> bool:
    payload = memoryview(payload_of(name))
    return tier.put(name, payload, checksum_of(payload))


def got_one(tier: ColdTier, name: BlockName) -> bool:
    """Whether a tier has a block. Its bytes and its checksum are the right ones."""
    into = memoryview(bytearray(LAYOUT.payload_bytes))
    checksums = list(tier.get([name], [into]))
    assert not checksums or (into == payload_of(name) and checksums == [checksum_of(into)])
    return bool(checksums)


def committed(slots: Sequence[SlotId | None], names: Sequence[BlockName]) -> list[Block]:
    """What a writer commits for the slots it got."""
    return [
        Block(slot, name, checksum_of(memoryview(payload_of(name))))
        for slot, name in zip(slots, names, strict=True)
        if slot is not None
    ]
