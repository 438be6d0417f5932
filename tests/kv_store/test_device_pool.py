from dataclasses import replace

import pytest
import torch

from kv_store.device_pool import DevicePool
from tests.kv_store.names import LAYOUT, names_of, payload_of
from tests.kv_store.pools import page_of
from wire.ids import PageId
from wire.layout import KVLayout

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_page_is_its_blocks_bytes_in_the_order_of_the_layout(device: str, dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    pool = DevicePool(layout, 3, torch.device(device))
    assert pool.kv.data.shape == (3, *layout.shape)
    assert pool.kv.data.stride(0) * layout.item_bits // 8 == layout.payload_bytes
    values = (
        torch.arange(layout.payload_bytes * 8 // layout.item_bits).to(pool.kv.data.dtype).to(device).view(layout.shape)
    )
    pool.kv.data[1] = values
    pool.follow(pool.fence())
    data = bytearray(layout.payload_bytes)
    pool.read_pages(PageId(1), memoryview(data))
    assert torch.equal(torch.frombuffer(data, dtype=pool.kv.data.dtype), values.flatten().cpu())
    pool.write_pages(PageId(2), memoryview(data))
    assert torch.equal(pool.kv.data[2], pool.kv.data[1])
    assert not pool.kv.data[0].any()
    assert torch.equal(pool.page_bytes(PageId(2)), pool.page_bytes(PageId(1)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("quantization", "dtype"), [("int8", torch.int8), ("fp8", torch.float8_e4m3fn)])
def test_a_page_of_codes_has_each_heads_scales_behind_them(device: str, quantization: str, dtype: torch.dtype) -> None:
    layout = replace(LAYOUT, dtype="bfloat16", quantization=quantization, num_kv_heads=3)
    pool = DevicePool(layout, 3, torch.device(device))
    assert pool.kv.data.dtype is dtype
    assert pool.kv.scales is not None
    pool.kv.data[1, 1, 0, 2, 3, 4], pool.kv.scales[1, 1, 0, 2, 3] = 3, 2
    [code, *scale] = pool.page_bytes(PageId(1)).nonzero().flatten().tolist()
    head = (2 * 3 + 2) * layout.head_bytes
    assert (code, scale) == (head + 3 * layout.head_dim + 4, [head + layout.data_bytes + 3 * 2 + 1])  # 2 is 0x4000
    assert not pool.kv.data[[0, 2]].float().any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_page_of_int4_has_a_heads_keys_and_then_its_values(device: str) -> None:
    layout = KVLayout(2, 3, 8, 16, "bfloat16", "int4")
    pool = DevicePool(layout, 3, torch.device(device))
    assert pool.kv.scales is not None
    assert pool.kv.int4 is not None
    pool.kv.data[1, 1, 0, 2, 5, 3], pool.kv.data[1, 1, 1, 2, 5, 3] = 0x21, 0x43
    pool.kv.int4.key_scales[1, 1, 2, 7], pool.kv.scales[1, 1, 2, 5] = 2, 2
    head = (1 * 3 + 2) * (layout.key_bytes + layout.head_bytes)
    code, key_scale = 5 * 4 + 3, 16 * 4 + 7 * 2 + 1  # 2 is 0x4000
    values, value_scale = head + layout.key_bytes, 16 * 4 + 5 * 2 + 1
    found = pool.page_bytes(PageId(1)).nonzero().flatten().tolist()
    assert found == [head + code, head + key_scale, values + code, values + value_scale]
    assert pool.page_bytes(PageId(1))[found].tolist() == [0x21, 0x40, 0x43, 0x40]
    assert not pool.page_bytes(PageId(0)).any()


def test_pages_are_open_from_their_allocation_until_they_are_full() -> None:
    pool = DevicePool(KVLayout(1, 1, 8, 16, "float32", "int4"), 6, torch.device("cpu"), num_open=3)
    assert pool.kv.int4 is not None
    pool.open([PageId(4), PageId(1), PageId(5)])
    assert (pool.num_open, pool.num_openable) == (3, 0)
    pool.close([PageId(1), PageId(2)])
    pool.open([PageId(0)])
    places = pool.kv.int4.page_to_open[[0, 4, 5]].tolist()
    assert sorted(places) == [0, 1, 2]
    pool.close([PageId(page) for page in range(6)])
    assert (pool.num_open, pool.num_openable) == (0, 3)


def test_without_int4_every_page_may_be_written() -> None:
    pool = DevicePool(LAYOUT, 6, torch.device("cpu"), num_open=1)
    pool.open([PageId(0), PageId(1)])
    assert (pool.num_open, pool.num_openable) == (0, 6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_waits_for_what_was_computed_before_the_fence(device: str) -> None:
    pool = DevicePool(replace(LAYOUT, num_layers=64, block_size=64), 2, torch.device(device))
    data = bytearray(pool.layout.payload_bytes)
    for value in range(1, 6):
        for _ in range(10):
            pool.kv.data[0].fill_(-1.0)
        pool.kv.data[0].fill_(value)
        pool.follow(pool.fence())
        pool.read_pages(PageId(0), memoryview(data))
        pool.wait()
        assert torch.frombuffer(data, dtype=torch.float32).eq(value).all()


def test_read_only_memory_can_be_written_to_a_page() -> None:
    pool = DevicePool(LAYOUT, 1, torch.device("cpu"))
    [name] = names_of(4)
    pool.write_pages(PageId(0), memoryview(payload_of(name)).toreadonly())
    assert page_of(pool, PageId(0)) == payload_of(name)


@pytest.mark.parametrize("num_bytes", [1, LAYOUT.payload_bytes - 1, LAYOUT.payload_bytes + 1])
def test_only_whole_blocks_are_copied(num_bytes: int) -> None:
    pool = DevicePool(LAYOUT, 1, torch.device("cpu"))
    for copy in (pool.write_pages, pool.read_pages):
        with pytest.raises(ValueError, match="bytes"):
            copy(PageId(0), memoryview(bytearray(num_bytes)))
