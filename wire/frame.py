"""A block as a value of the cold tier: a front that names the block, and the payload as it is in memory.

front   = "BTKV" || length of the header (u32, little-endian) || header
header  = msgpack of [version, key, parent, digest of the token ids, digest of the root, layout, codec, checksum]
frame   = front || payload

The checksum is the xxh3-128 of the payload. The namespace root itself is never in a frame. A block's front is known but
for its checksum, so a frame is checked by comparing bytes: nothing of a stored value is parsed.
"""

import struct

import msgpack
import xxhash

from wire.errors import WireError
from wire.keys import BlockName
from wire.layout import KVLayout

CHECKSUM_BYTES = 16
_MAGIC = b"BTKV"
_VERSION = 1
_CODEC = "raw"


def checksum_of(payload: memoryview) -> bytes:
    """Computes the xxh3-128 of a payload."""
    return xxhash.xxh3_128_digest(payload)


def frame_len(name: BlockName, layout: KVLayout) -> int:
    """Computes the length in bytes of a block's frame."""
    return len(_front(name, layout, bytes(CHECKSUM_BYTES))) + layout.payload_bytes


def seal(name: BlockName, layout: KVLayout, payload: memoryview, checksum: bytes) -> bytes:
    """Makes the frame of a block."""
    return b"".join((_front(name, layout, checksum), payload))


def unseal(frame: bytes, name: BlockName, layout: KVLayout, into: memoryview) -> bytes:
    """Copies the payload of a frame into `into`, `layout.payload_bytes` long, and returns its checksum.

    WireError if the frame is not that of this block, or its payload does not match the checksum; `into` is then
    undefined.
    """
    front_len = frame_len(name, layout) - layout.payload_bytes
    checksum = frame[front_len - CHECKSUM_BYTES : front_len]
    if len(frame) != front_len + layout.payload_bytes or frame[:front_len] != _front(name, layout, checksum):
        raise WireError("not the frame of this block")
    into[:] = memoryview(frame)[front_len:]
    if checksum_of(into) != checksum:
        raise WireError("a frame whose payload is not its checksum's")
    return checksum


def _front(name: BlockName, layout: KVLayout, checksum: bytes) -> bytes:
    owner = [name.key, name.parent, name.tokens_digest, name.root_digest]
    header = bytes(msgpack.packb([_VERSION, *owner, layout.encode(), _CODEC, checksum]))
    return _MAGIC + struct.pack("<I", len(header)) + header
