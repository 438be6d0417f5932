"""The table of tiles: what a launch reads there."""

from itertools import product
from pathlib import Path

import pytest
import torch
import triton

from kernels import tiles
from kernels.attention.paged import MIN_SPLIT_LEN
from kernels.attention.prompts import tokens_of
from kernels.backend import AttentionVariant, KVPages, Scores, on_any_device
from kernels.triton_backend import ExactBackend, TritonBackend

PLAIN, CAPPED = AttentionVariant(1.0), AttentionVariant(1.0, scores=Scores(soft_cap=30.0))
SINKS, WINDOWED = AttentionVariant(1.0, scores=Scores(sinks=torch.zeros(4))), AttentionVariant(1.0, 64, 4)


def pages_of(dtype: torch.dtype) -> KVPages:
    data = torch.zeros(1, 2, 1, 16, 64).to(dtype)
    return KVPages(data, torch.zeros(1, 2, 1, 16, dtype=torch.bfloat16) if dtype.itemsize == 1 else None)


LAUNCHES = [
    (torch.bfloat16, torch.bfloat16, PLAIN, "plain"),
    (torch.float16, torch.float16, CAPPED, "sinks"),
    (torch.bfloat16, torch.bfloat16, SINKS, "sinks"),
    (torch.bfloat16, torch.bfloat16, WINDOWED, "sinks"),
    (torch.bfloat16, torch.int8, CAPPED, "int8"),
    (torch.bfloat16, torch.float8_e4m3fn, PLAIN, "fp8"),
    (torch.float32, torch.float32, CAPPED, "float32"),
    (torch.float32, torch.int8, PLAIN, "float32"),
]
DEVICES = {(8, 0): "sm_80", (8, 9): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100", (12, 0): "sm_80"}


@pytest.mark.parametrize(("dtype", "kept", "variant", "kind"), LAUNCHES)
def test_the_kind_of_a_launch(dtype: torch.dtype, kept: torch.dtype, variant: AttentionVariant, kind: str) -> None:
    assert tiles.kind_of(dtype, pages_of(kept), variant) == kind


@pytest.mark.parametrize(("head_dim", "wide"), [(32, 128), (64, 128), (128, 128), (192, 256), (512, 256)])
def test_heads_between_the_tables_sizes_have_the_next_larger_ones_row(head_dim: int, wide: int) -> None:
    found = tiles.find_tile("sm_90", "prompts", "plain", head_dim)
    assert found == tiles.Tile(*tiles.read_table()["sm_90"]["prompts"]["plain"][str(wide)])


@pytest.mark.parametrize(("capability", "architecture"), DEVICES.items())
def test_rows_of_nvidia_devices(capability: tuple[int, int], architecture: str) -> None:
    assert tiles.nearest_of(capability) == architecture


@pytest.mark.parametrize("architecture", sorted({*DEVICES.values(), "gfx942"}))
def test_each_launch_finds_a_tile_whose_sides_are_powers_of_two(architecture: str) -> None:
    kinds = {tiles.kind_of(dtype, pages_of(kept), variant) for dtype, kept, variant, _ in LAUNCHES} | {"int4"}
    roles: tuple[tiles.Role, ...] = ("decode", "prompts")
    found = [tiles.find_tile(architecture, *launch) for launch in product(roles, kinds, (64, 128, 192, 256))]
    products = product((*tiles.FEW_TO_MANY, "float32"), (4, 5, 6, 8))
    found += [tiles.find_product_tile(architecture, *one) for one in products]
    assert {side.bit_count() for tile in found for side in (tile.rows, tile.width, tile.num_warps)} == {1}


def test_tiles_divide_splits_so_that_a_rows_splits_follow_from_its_length_on_every_architecture() -> None:
    decode = [heads for roles in tiles.read_table().values() for heads in roles["decode"].values()]
    assert all(MIN_SPLIT_LEN % keys == 0 for heads in decode for _, keys, _, _ in heads.values())


@pytest.mark.parametrize(
    ("rows", "group_size", "block_size", "num_tokens"),
    [(64, 4, None, 16), (64, 4, 8, 8), (64, 4, 24, 8), (64, 3, None, 16), (64, 5, None, 8), (16, 24, None, 1)],
)
def test_the_tokens_of_a_tile(rows: int, group_size: int, block_size: int | None, num_tokens: int) -> None:
    assert tokens_of(tiles.Tile(rows, 64, 4, 2), group_size, block_size) == num_tokens


@pytest.mark.parametrize(
    ("num_rows", "kind"), [(1, "few"), (16, "few"), (17, "some"), (64, "some"), (65, "many"), (5000, "many")]
)
def test_a_product_has_the_first_tile_with_all_its_rows_else_the_largest(num_rows: int, kind: str) -> None:
    found = tiles.choose_product_tile(torch.device("cpu"), torch.bfloat16, 4, num_rows)
    assert found == tiles.find_product_tile("sm_90", kind, 4)


def test_a_device_is_named_by_its_own_architecture_not_by_that_of_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 and an A100 share no KV, and neither do two versions of Triton."""
    assert (torch.cuda.is_available() or tiles.device_name()) == "any"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = set[str]()
    for capability in DEVICES:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        names |= {tiles.device_name(), *(backend().version for backend in (TritonBackend, ExactBackend))}
        assert TritonBackend().version.endswith(f"-{tiles.device_name()}")
    assert len(names) == 3 * len(DEVICES)
    before = TritonBackend().version
    monkeypatch.setattr(tiles, "device_name", lambda: "any")
    assert TritonBackend().version == on_any_device(before) != before
    monkeypatch.setattr(triton, "__version__", "0.0")
    assert TritonBackend().version != before


@pytest.mark.parametrize(
    ("percents", "is_quick"), [({}, False), ({"1": [103], "64": [99]}, True), ({"1": [99], "64": [104]}, False)]
)
def test_products_of_one_order_are_the_default_where_a_device_has_timed_all_steps(
    percents: dict[str, list[int]], is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "device_name", lambda: "sm_90")
    table = tiles.read_table()
    del table["sm_90"][tiles.EXACT]
    if percents:
        table["sm_90"][tiles.EXACT] = {tiles.STEP_PERCENT: percents}
    monkeypatch.setattr(tiles, "_table", lambda: table)
    assert tiles.is_quick_in_order() is is_quick
    monkeypatch.setattr(tiles, "device_name", lambda: "any")
    assert not tiles.is_quick_in_order()


@pytest.mark.parametrize(
    ("num_rows", "kind"), [(1, "few"), (17, "some"), (64, "some"), (65, "more"), (129, "many"), (513, "most")]
)
def test_a_product_of_one_order_has_the_tile_of_its_rows(num_rows: int, kind: str) -> None:
    device = torch.device("cpu")
    assert tiles.choose_ordered_tile(device, torch.bfloat16, 1, num_rows) == tiles.find_ordered_tile("sm_90", kind, 1)
    assert tiles.choose_ordered_tile(device, torch.float32, 8, num_rows) == tiles.find_ordered_tile(
        "sm_90", "float32", 2
    )


def test_an_architecture_that_the_table_lacks_is_an_error() -> None:
    with pytest.raises(KeyError):
        tiles.find_tile("sm_70", "decode", "plain", 128)


def test_a_table_that_is_no_toml_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tiles.toml"
    path.write_text("[sm_90.decode\n")
    with pytest.raises(ValueError, match="line 1"):
        tiles.read_table(path)
