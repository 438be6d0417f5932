from dataclasses import replace

import msgpack
import pytest

from wire.errors import WireError
from wire.layout import KVLayout, Window

LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=5, block_size=16, dtype="bfloat16")


def test_sizes() -> None:
    assert LAYOUT.shape == (2, 2, 3, 16, 5)
    assert LAYOUT.payload_bytes == 2 * 2 * 3 * 16 * 5 * 2
    assert LAYOUT.block_bytes == 4096
    assert replace(LAYOUT, dtype="float32", head_dim=8).block_bytes == 8192
    assert KVLayout(1, 1, 64, 16, "bfloat16").block_bytes == KVLayout(1, 1, 64, 16, "bfloat16").payload_bytes == 4096


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_a_head_block_of_codes_ends_in_their_scales(quantization: str) -> None:
    layout = replace(LAYOUT, quantization=quantization, head_dim=128)
    assert (layout.data_bytes, layout.head_bytes) == (16 * 128, 16 * 128 + 16 * 2)
    assert layout.payload_bytes == 2 * 2 * 3 * layout.head_bytes
    assert KVLayout.decode(layout.encode()) == layout


def test_a_block_of_codes_is_hardly_more_than_half() -> None:
    full = KVLayout(32, 8, 128, 16, "bfloat16")
    codes = replace(full, quantization="int8")
    assert full.payload_bytes / codes.payload_bytes == full.block_bytes / codes.block_bytes == 256 / 130


@pytest.mark.parametrize(("block_size", "least"), [(16, 3.5), (64, 3.8)])
def test_a_block_of_int4_has_scales_of_channels_and_of_tokens(block_size: int, least: float) -> None:
    full = KVLayout(32, 8, 128, block_size, "bfloat16")
    codes = replace(full, quantization="int4")
    assert (codes.data_bytes, codes.key_bytes) == (block_size * 64, block_size * 64 + 2 * 128)
    assert codes.payload_bytes == 32 * 8 * (2 * codes.data_bytes + 2 * 128 + 2 * block_size)
    assert full.payload_bytes / codes.payload_bytes >= least
    assert full.block_bytes / codes.block_bytes >= least
    assert (full.has_open_blocks, codes.has_open_blocks) == (False, True)
    assert KVLayout.decode(codes.encode()) == codes


@pytest.mark.parametrize("head_dim", [5, 6])
def test_int4_takes_heads_of_whole_fours(head_dim: int) -> None:
    odd = replace(LAYOUT, head_dim=head_dim, quantization="int4")
    with pytest.raises(WireError):
        KVLayout.decode(odd.encode())


def test_it_is_the_same_after_the_wire() -> None:
    assert KVLayout.decode(LAYOUT.encode()) == LAYOUT


def test_every_field_shows_in_its_bytes() -> None:
    changed = [
        replace(LAYOUT, **{name: getattr(LAYOUT, name) + 1})
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size")
    ]
    changed += [replace(LAYOUT, dtype="float16"), replace(LAYOUT, quantization="int8"), replace(LAYOUT, window=64)]
    changed += [replace(LAYOUT, window=64, num_sinks=number) for number in (1, 4)]
    assert len({layout.encode() for layout in [LAYOUT, *changed]}) == 10


SEEN = replace(LAYOUT, window=50, num_sinks=20)
WINDOW = Window(SEEN)


def test_blocks_between_sinks_and_window_are_behind() -> None:
    assert [len(WINDOW.behind(position)) for position in (0, 49, 96, 97, 112, 113)] == [0, 0, 0, 1, 1, 2]
    assert WINDOW.behind(1000) == range(2, 951 // 16)
    assert Window(replace(SEEN, num_sinks=0)).behind(1000) == range(951 // 16)


def test_without_a_window_nothing_is_behind() -> None:
    full = Window(replace(SEEN, window=None, num_sinks=0))
    assert (full.behind(1000), full.most_needed) == (range(0), None)
    assert full.needed(63, 1000) == [*range(63)]
    assert (full.num_needed(33), full.max_len(7, 1 << 20)) == (3, 7 * 16)


def test_a_row_needs_sinks_and_window() -> None:
    assert WINDOW.needed(63, 1000) == [0, 1, *range(951 // 16, 63)]
    assert (WINDOW.most_needed, WINDOW.num_needed(33), WINDOW.max_len(7, 1 << 20)) == (7, 3, 1 << 20)


FIELDS = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 5, "block_size": 16, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "float8"},
        {"dtype": 7},
        {"dtype": ["float32"]},
        {"num_layers": 0},
        {"num_layers": -1},
        {"head_dim": "64"},
        {"head_dim": 1.5},
        {"block_size": True},
        {"quantization": None},
        {"quantization": "int5"},
        {"quantization": ["int8"]},
        {"num_sinks": 4},
        {"num_sinks": 64, "window": 64},
        {"num_sinks": -1, "window": 64},
        {"num_sinks": True, "window": 64},
        {"num_sinks": "4", "window": 64},
        {"color": "red"},
    ],
)
def test_what_is_no_layout_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(WireError):
        KVLayout.decode(msgpack.packb(sorted({**FIELDS, **wrong}.items())))


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x05", msgpack.packb([1, 2]), LAYOUT.encode()[:-1], LAYOUT.encode() * 2]
)
def test_bytes_that_are_no_layout_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        KVLayout.decode(data)
