"""Worked examples of articles about KV caches, the wrong ones as they should be."""

from dataclasses import replace

import pytest
import torch

from cli.size.capacity import Fit, RequestKV, techniques
from cli.size.shape import ModelShape
from deploy.plan.sizing import GPU_RESERVE_BYTES
from kv_store.device_pool import DevicePool
from tests.cli.size.published_models import LLAMA_2_70B, LLAMA_3_8B, MIXTRAL_8X7B, QWEN3_06B
from wire.ids import PageId
from wire.layout import KVLayout

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MHA_7B = KVLayout(32, 32, 128, 16, "float16")
GQA_8B = KVLayout(32, 8, 128, 16, "float16")
GQA_70B = KVLayout(80, 8, 128, 16, "float16")
CARD_80 = 80 * 10**9


def kv(layout: KVLayout, num_tokens: int) -> RequestKV:
    return RequestKV(layout, num_tokens, 16)


def test_32_heads_take_half_a_mib_a_token_and_2_gib_at_4096() -> None:
    assert kv(MHA_7B, 4096).bytes_per_token == 512 * KIB
    assert kv(MHA_7B, 4096).num_bytes == 2 * GIB


def test_8_heads_take_128_kib_a_token_and_20_chats_of_4000_tokens_take_10_gib() -> None:
    one = kv(GQA_8B, 4000)
    assert (one.bytes_per_token, one.bytes_per_token_per_layer) == (128 * KIB, 4 * KIB)
    assert one.num_bytes == 500 * MIB
    assert Fit(10 * GIB + GPU_RESERVE_BYTES, 0, one).max_requests == 20


def test_kv_grows_as_its_tokens_do_and_by_no_more() -> None:
    """An article has 3.4 GB at 2K and 55 GB at 32K, "4x the parameters", "16x for 10x longer"."""
    short, long = kv(MHA_7B, 2048), kv(MHA_7B, 32768)
    assert (short.num_bytes, long.num_bytes) == (GIB, 16 * GIB)
    num_parameters = 6_738_415_616
    assert long.num_bytes / (2 * num_parameters) == pytest.approx(1.3, abs=0.03)


def test_32_to_8_heads_save_4x() -> None:
    """An article has 8x."""
    assert kv(MHA_7B, 4096).num_bytes == 4 * kv(GQA_8B, 4096).num_bytes


def test_a_request_of_llama_2_70b_takes_1_3_gb_and_its_weights_more_than_a_card() -> None:
    """An article has 10.7 GB a request, about 7 on a card of 80 GB, and 342 GB for a batch of 32."""
    shape = ModelShape.parse(LLAMA_2_70B)
    fit = Fit(CARD_80, shape.weight_bytes(), kv(GQA_70B, 4096))
    assert fit.kv.num_bytes / 1e9 == pytest.approx(1.34, abs=0.01)
    assert 32 * fit.kv.num_bytes / 1e9 == pytest.approx(43, abs=0.1)
    assert fit.weight_bytes / 1e9 == pytest.approx(138, abs=0.5)
    assert (fit.max_requests, fit.limited_by) == (0, "weights")
    unshared = kv(KVLayout(80, 64, 128, 16, "float16"), 4096)
    assert unshared.num_bytes / 1e9 == pytest.approx(10.7, abs=0.1)  # the article's: no head shared


def test_a_block_has_16_tokens() -> None:
    """An article has 16K."""
    assert (kv(GQA_8B, 1).num_blocks, kv(GQA_8B, 16).num_blocks, kv(GQA_8B, 17).num_blocks) == (1, 1, 2)


def test_memory_grows_linearly() -> None:
    """An article has "exponentially"."""
    assert [kv(GQA_8B, 1024 * n).num_bytes for n in (1, 2, 3, 4)] == [128 * MIB * n for n in (1, 2, 3, 4)]


@pytest.mark.parametrize(("gib", "fits"), [(15, False), (8, True), (7, True)])
def test_8_gib_hold_7_but_not_15_whether_fragmented_or_not(gib: int, fits: bool) -> None:
    """An article has 15 GB that do "not fit despite 8 GB free"; 7 GB are what fragments could refuse."""
    free = Fit(8 * GIB + GPU_RESERVE_BYTES, 0, kv(GQA_8B, gib * 8192))
    assert (free.max_requests > 0) == fits


@pytest.mark.parametrize(
    ("device_gib", "limited_by", "max_requests"), [(14, "weights", 0), (16, "activations", 0), (24, "kv", 7)]
)
def test_the_first_part_without_room_is_the_limit(device_gib: int, limited_by: str, max_requests: int) -> None:
    fit = Fit(device_gib * GIB, ModelShape.parse(LLAMA_3_8B).weight_bytes(), kv(GQA_8B, 8192))
    assert (fit.limited_by, fit.max_requests) == (limited_by, max_requests)


def test_a_block_takes_its_pages_bytes() -> None:
    tiny = kv(KVLayout(1, 1, 10, 16, "float16"), 32)
    assert (tiny.bytes_per_token, tiny.block_bytes, tiny.num_bytes) == (40, 640, 1280)
    assert RequestKV(GQA_8B, 16, 16).block_bytes == GQA_8B.payload_bytes


@pytest.mark.parametrize(
    ("dtype", "head_bytes"), [("float32", 512), ("float16", 256), ("int8", 130), ("fp8", 130), ("int4", 73)]
)
def test_another_kv_dtype_takes_the_bytes_of_its_pages(dtype: str, head_bytes: int) -> None:
    one = kv(GQA_8B, 4096).kept_in(dtype)
    assert one.bytes_per_token == 32 * 2 * 8 * head_bytes
    assert one.num_bytes == 4096 * one.bytes_per_token


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
def test_a_pool_takes_what_the_arithmetic_says(dtype: str) -> None:
    one = kv(KVLayout(2, 8, 128, 16, "bfloat16"), 160).kept_in(dtype)
    pool = DevicePool(one.layout, one.num_blocks, torch.device("cpu"))
    assert pool.page_bytes(PageId(0)).untyped_storage().nbytes() == one.num_bytes


@pytest.mark.parametrize(
    ("dtype", "head_dim", "least"), [("int8", 128, 1.95), ("int8", 64, 1.9), ("int4", 128, 3.5), ("int4", 64, 3.4)]
)
def test_quantized_blocks_fit_nearly_twice_and_four_times_as_often(dtype: str, head_dim: int, least: float) -> None:
    fit = Fit(40 * GIB, 0, kv(KVLayout(32, 8, head_dim, 16, "bfloat16"), 16))
    assert replace(fit, kv=fit.kv.kept_in(dtype)).max_requests / fit.max_requests >= least


def test_a_window_keeps_its_blocks_and_a_partly_passed_one() -> None:
    assert RequestKV(GQA_8B, 32768, 16, window=4096).num_blocks == 257
    assert RequestKV(GQA_8B, 1024, 16, window=4096).num_blocks == 64


def test_each_technique_changes_what_it_says() -> None:
    shape = ModelShape.parse(LLAMA_3_8B)
    fit = Fit(24 * GIB, shape.weight_bytes(), kv(GQA_8B, 8192))
    found = {one.name: (one.fit.request_bytes, one.fit.max_requests) for one in techniques(shape, fit)}
    assert found == {
        "KV in int8": (520 * MIB, 13),
        "KV in int4": (292 * MIB, 24),
        "only the last 4,096 tokens kept": (514 * MIB, 14),
        "KV dropped, snapkv=25%": (258 * MIB, 27),
        "first half of all prompts the same": (512 * MIB, 13),
        "weights in int8": (GIB, 13),
        "a KV head for each query head": (4 * GIB, 1),
        "a single KV head": (128 * MIB, 56),
    }


def test_a_technique_that_changes_nothing_is_left_out() -> None:
    shape = ModelShape.parse(MIXTRAL_8X7B | {"num_key_value_heads": 32})
    fit = Fit(24 * GIB, shape.weight_bytes(), RequestKV(shape.kv_layout(16), 1024, 8))
    names = [one.name for one in techniques(shape, fit)]
    kept = ["KV in int4", "KV dropped, snapkv=25%", "first half of all prompts the same"]
    assert names == [*kept, "weights in int8", "a single KV head"]


def test_a_small_model_has_room_for_its_whole_context() -> None:
    shape = ModelShape.parse(QWEN3_06B)
    fit = Fit(24 * GIB, shape.weight_bytes(), RequestKV(shape.kv_layout(16), 40960, 16))
    assert fit.kv.num_bytes == 40960 * 112 * KIB
    assert fit.max_requests == (24 * GIB - 2 * 596_049_920 - 2 * GIB) // (40960 * 112 * KIB) == 4
