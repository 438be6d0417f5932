"""The frame of a block in a cold tier: a front of 4 KiB that names and proves the block, then the payload.

front   = "BTKV" || length of the header (u32, little-endian) || header || zeros || checksum || salt || MAC
header  = msgpack of [version, key, parent, digest of the token ids, digest of the root, layout, codec]
frame   = front || payload

checksum  xxh3-128 of the payload's sums (kernels/cpu/checksums.py): finds accidents, and is the arena's, too
salt      16 random bytes, which make a key for this frame only: HMAC-SHA-256(MAC key, salt)
MAC       AES-256-GMAC under that key over all of the frame but itself: finds forgery. No key seals twice: nonce 0

The namespace root itself is never in a frame. All of a block's front but the three proofs is known, so a frame is
checked by comparing bytes: nothing of a stored value is parsed.
"""

import hmac
import secrets
import struct

import msgpack
import xxhash

from kernels.cpu.checksums import sum_pieces
from wire.block_names import FRAME_VERSION, BlockName
from wire.errors import ForgedFrame, WireError
from wire.layout import PAGE_ALIGNMENT, KVLayout

FRONT_BYTES = PAGE_ALIGNMENT
MAC_KEY_BYTES = 32
CHECKSUM_BYTES = 16
_SALT_BYTES = 16
_MAC_BYTES = 16
_KNOWN_BYTES = FRONT_BYTES - CHECKSUM_BYTES - _SALT_BYTES - _MAC_BYTES
_MAGIC = b"BTKV"
_CODEC = "raw"
_NONCE = bytes(12)
_OWNER = slice(114, 146)
"""The place of the root's digest, after key, parent and the token ids' digest of 34 bytes each."""
HEAD_BYTES = _OWNER.stop


def checksum_of(payload: memoryview) -> bytes:
    """Computes the checksum of a payload."""
    return checksum_of_sums(sum_pieces(payload))


def checksum_of_sums(sums: bytearray | memoryview) -> bytes:
    """Computes the checksum of a payload from its sums, which a device has computed or this host."""
    return xxhash.xxh3_128_digest(sums)


def namespace_of(head: bytes) -> bytes:
    """Returns the root's digest in the first HEAD_BYTES of a frame, unproven; empty if that is no frame."""
    return head[_OWNER] if len(head) == HEAD_BYTES and head.startswith(_MAGIC) else b""


def mac_key_of(secret: bytes) -> bytes:
    """Derives the MAC key of all frames from the server's secret, by HKDF-SHA-256 (RFC 5869)."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), MAC_KEY_BYTES, salt=None, info=b"baton frame mac").derive(secret)


class FrameSeal:
    """The maker and verifier of frames of one layout, under a MAC key. Thread-safe."""

    def __init__(self, layout: KVLayout, mac_key: bytes) -> None:
        self.frame_bytes = FRONT_BYTES + layout.payload_bytes
        self._layout = layout.encode()
        self._mac_key = mac_key

    def seal(self, name: BlockName, payload: memoryview, checksum: bytes) -> bytes:
        """Makes the front of a block's frame."""
        proven = self._known(name) + checksum + secrets.token_bytes(_SALT_BYTES)
        return proven + self._mac(proven, payload)

    def verify(self, name: BlockName, front: bytes | memoryview, payload: memoryview) -> bytes:
        """Verifies a front and a payload; returns the payload's checksum.

        Raises WireError if the front is not this block's, or the checksum does not match; ForgedFrame if only the MAC
        is wrong.
        """
        proven, mac = bytes(front[:-_MAC_BYTES]), front[-_MAC_BYTES:]
        if len(front) != FRONT_BYTES or proven[:_KNOWN_BYTES] != self._known(name):
            raise WireError("not the frame of this block")
        checksum = proven[_KNOWN_BYTES : _KNOWN_BYTES + CHECKSUM_BYTES]
        if checksum_of(payload) != checksum:
            raise WireError("a frame whose payload is not its checksum's")
        if not hmac.compare_digest(self._mac(proven, payload), mac):
            raise ForgedFrame("a frame with a right checksum and a wrong MAC")
        return checksum

    def _known(self, name: BlockName) -> bytes:
        owner = [name.key, name.parent, name.tokens_digest, name.root_digest]
        header = bytes(msgpack.packb([FRAME_VERSION, *owner, self._layout, _CODEC]))
        return (_MAGIC + struct.pack("<I", len(header)) + header).ljust(_KNOWN_BYTES, b"\0")

    def _mac(self, proven: bytes, payload: memoryview) -> bytes:
        key = hmac.digest(self._mac_key, proven[-_SALT_BYTES:], "sha256")
        # Here, since an engine without cold tiers needs no cryptography.
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import GCM

        mac = Cipher(AES(key), GCM(_NONCE)).encryptor()
        mac.authenticate_additional_data(proven)
        mac.authenticate_additional_data(payload)
        mac.finalize()
        return mac.tag
