import hmac
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kv_store.frame import FRONT_BYTES, FrameSeal, checksum_of, mac_key_of
from wire.block_names import BlockName, cover, namespace_root
from wire.errors import ForgedFrame, WireError
from wire.ids import BlockKey, NamespaceRoot
from wire.layout import KVLayout

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=2, dtype="float16")
ROOT = NamespaceRoot(b"R" * 32)
FIRST, SECOND = cover(ROOT, [1, 2, 3, 4], 2)
PAYLOAD = bytes(range(LAYOUT.payload_bytes))
KEY = b"k" * 32
NUM_FRAME = FRONT_BYTES + len(PAYLOAD)
MAC_AT = FRONT_BYTES - 16
SALT_AT = FRONT_BYTES - 32


def sealed(name: BlockName = SECOND, layout: KVLayout = LAYOUT, payload: bytes = PAYLOAD, key: bytes = KEY) -> bytes:
    view = memoryview(payload)
    return FrameSeal(layout, key).seal(name, view, checksum_of(view)) + payload


def opened(frame: bytes, name: BlockName = SECOND, layout: KVLayout = LAYOUT, key: bytes = KEY) -> bytes:
    payload = memoryview(frame[FRONT_BYTES:])
    assert FrameSeal(layout, key).verify(name, frame[:FRONT_BYTES], payload) == checksum_of(payload)
    return bytes(payload)


def test_a_block_comes_out_as_it_went_in() -> None:
    assert opened(sealed()) == PAYLOAD
    assert len(sealed()) == FrameSeal(LAYOUT, KEY).frame_bytes == NUM_FRAME


def test_neither_the_root_nor_a_key_is_in_a_frame() -> None:
    for frame in (sealed(FIRST), sealed(SECOND)):
        assert bytes(ROOT) not in frame
        assert KEY not in frame


def test_no_two_frames_have_one_salt_or_mac() -> None:
    frames = [sealed() for _ in range(100)]
    assert len({frame[SALT_AT:MAC_AT] for frame in frames}) == 100
    assert len({frame[MAC_AT:FRONT_BYTES] for frame in frames}) == 100
    assert len({frame[:SALT_AT] + frame[FRONT_BYTES:] for frame in frames}) == 1


def test_a_flip_of_any_bit_is_seen() -> None:
    frame = sealed()
    for position in range(len(frame)):
        for bit in range(8):
            flipped = bytearray(frame)
            flipped[position] ^= 1 << bit
            with pytest.raises(WireError) as raised:
                opened(bytes(flipped))
            assert isinstance(raised.value, ForgedFrame) == (SALT_AT <= position < FRONT_BYTES)


def test_any_other_length_is_seen() -> None:
    frame = sealed()
    for length in (*range(0, FRONT_BYTES, 7), *range(FRONT_BYTES - 99, FRONT_BYTES), FRONT_BYTES + 1):
        with pytest.raises(WireError):
            FrameSeal(LAYOUT, KEY).verify(SECOND, frame[:length], memoryview(PAYLOAD))


@settings(deadline=None)  # the first one imports what seals
@given(st.binary(min_size=1, max_size=99), st.integers(0, NUM_FRAME - 1))
def test_random_bytes_anywhere_make_it_no_frame(data: bytes, at: int) -> None:
    frame = sealed()
    changed = (frame[:at] + data + frame[at + len(data) :])[:NUM_FRAME]
    assume(changed != frame)
    with pytest.raises(WireError):
        opened(changed)


@given(st.binary(min_size=len(PAYLOAD), max_size=len(PAYLOAD)).filter(lambda payload: payload != PAYLOAD))
def test_a_payload_with_its_own_checksum_is_forged_without_the_key(payload: bytes) -> None:
    frame = bytearray(sealed())
    frame[SALT_AT - 16 : SALT_AT] = checksum_of(memoryview(payload))
    frame[FRONT_BYTES:] = payload
    with pytest.raises(ForgedFrame):
        opened(bytes(frame))


def test_a_front_cannot_be_moved_to_another_frame() -> None:
    other = bytes(reversed(PAYLOAD))
    one, two = sealed(), sealed(payload=other)
    for start in (SALT_AT, MAC_AT):
        with pytest.raises(ForgedFrame):
            opened(one[:start] + two[start:FRONT_BYTES] + PAYLOAD)


def test_a_frame_under_another_key_is_forged() -> None:
    assert opened(sealed(key=bytes(32)), key=bytes(32)) == PAYLOAD
    with pytest.raises(ForgedFrame):
        opened(sealed(key=bytes(32)))


def test_the_mac_key_follows_from_the_secret_and_is_none_of_its_roots() -> None:
    secret = b"s" * 32
    extracted = hmac.digest(bytes(32), secret, "sha256")
    assert mac_key_of(secret) == hmac.digest(extracted, b"baton frame mac\x01", "sha256"), "RFC 5869"
    assert mac_key_of(secret) != mac_key_of(b"t" * 32)
    assert mac_key_of(secret) not in (secret, namespace_root(secret, "", b"", b"", "", ""))


@pytest.mark.parametrize(
    "name",
    [
        FIRST,
        SECOND._replace(key=BlockKey(bytes(32))),
        SECOND._replace(parent=bytes(32)),
        SECOND._replace(tokens_digest=bytes(32)),
        SECOND._replace(root_digest=bytes(32)),
    ],
)
def test_a_good_frame_of_another_block_is_refused(name: BlockName) -> None:
    assert opened(sealed(name), name) == PAYLOAD
    with pytest.raises(WireError):
        opened(sealed(name))


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"num_layers": 2, "head_dim": 1}, {"quantization": "int8"}])
def test_a_good_frame_of_another_layout_is_refused(change: dict[str, Any]) -> None:
    layout = replace(LAYOUT, **change)
    assert layout.payload_bytes == LAYOUT.payload_bytes
    assert opened(sealed(layout=layout), layout=layout) == PAYLOAD
    with pytest.raises(WireError):
        opened(sealed(layout=layout))


def test_a_checksum_that_is_not_the_payloads_is_refused() -> None:
    front = FrameSeal(LAYOUT, KEY).seal(SECOND, memoryview(PAYLOAD), bytes(16))
    with pytest.raises(WireError) as raised:
        opened(front + PAYLOAD)
    assert not isinstance(raised.value, ForgedFrame)
