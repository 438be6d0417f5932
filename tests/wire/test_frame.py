from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import WireError
from wire.frame import checksum_of, frame_len, seal, unseal
from wire.ids import BlockKey, NamespaceRoot
from wire.keys import BlockName, cover
from wire.layout import KVLayout

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=2, dtype="float16")
ROOT = NamespaceRoot(b"R" * 32)
FIRST, SECOND = cover(ROOT, [1, 2, 3, 4], 2)
PAYLOAD = bytes(range(LAYOUT.payload_bytes))


def sealed(name: BlockName = SECOND, layout: KVLayout = LAYOUT, payload: bytes = PAYLOAD) -> bytes:
    return seal(name, layout, memoryview(payload), checksum_of(memoryview(payload)))


def opened(frame: bytes, name: BlockName = SECOND, layout: KVLayout = LAYOUT) -> bytes:
    into = bytearray(layout.payload_bytes)
    assert unseal(frame, name, layout, memoryview(into)) == checksum_of(memoryview(into))
    return bytes(into)


def test_a_block_comes_out_as_it_went_in() -> None:
    assert opened(sealed()) == PAYLOAD
    assert len(sealed()) == frame_len(SECOND, LAYOUT)


def test_the_root_is_in_no_frame() -> None:
    assert bytes(ROOT) not in sealed(FIRST)
    assert bytes(ROOT) not in sealed(SECOND)


def test_a_flip_of_any_bit_is_seen() -> None:
    frame = sealed()
    for position in range(len(frame)):
        for bit in range(8):
            flipped = bytearray(frame)
            flipped[position] ^= 1 << bit
            with pytest.raises(WireError):
                opened(bytes(flipped))


def test_any_other_length_is_seen() -> None:
    frame = sealed()
    for other in (*(frame[:length] for length in range(len(frame))), frame + b"\x00", frame * 2):
        with pytest.raises(WireError):
            opened(other)


@given(st.binary(min_size=frame_len(SECOND, LAYOUT), max_size=frame_len(SECOND, LAYOUT)))
def test_random_bytes_are_no_frame(data: bytes) -> None:
    with pytest.raises(WireError):
        opened(data)


@pytest.mark.parametrize(
    "name",
    [
        FIRST,
        replace(SECOND, key=BlockKey(bytes(32))),
        replace(SECOND, parent=bytes(32)),
        replace(SECOND, tokens_digest=bytes(32)),
        replace(SECOND, root_digest=bytes(32)),
    ],
)
def test_a_good_frame_of_another_block_is_refused(name: BlockName) -> None:
    assert opened(sealed(name), name) == PAYLOAD
    with pytest.raises(WireError):
        opened(sealed(name))


@pytest.mark.parametrize("layout", [replace(LAYOUT, dtype="bfloat16"), replace(LAYOUT, num_layers=2, head_dim=1)])
def test_a_good_frame_of_another_layout_is_refused(layout: KVLayout) -> None:
    assert opened(sealed(layout=layout), layout=layout) == PAYLOAD
    with pytest.raises(WireError):
        opened(sealed(layout=layout))


def test_a_checksum_that_is_not_the_payloads_is_refused() -> None:
    with pytest.raises(WireError):
        opened(seal(SECOND, LAYOUT, memoryview(PAYLOAD), bytes(16)))
