"""Tuning of the table of tiles, with times that a test makes up."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gpu_tiles import (
    SHAPES,
    SHAPES_OF_PRODUCTS,
    Row,
    Trial,
    candidates,
    choose_fastest,
    counting_spills,
    format_table,
    read_timed,
    rows_of,
    using,
    write_tuned,
)
from kernels.attention import decode, paged, prompts
from kernels.quantized import products
from kernels.tiles import TABLE, Tile, read_table

PRESENT, QUICK, SLOW = Tile(16, 64, 4, 2), Tile(16, 32, 4, 2), Tile(16, 128, 4, 2)


def test_the_fastest_tile_without_spills_is_chosen() -> None:
    trials = [Trial(PRESENT, 3.0), Trial(SLOW, 4.0), Trial(QUICK, 2.0), Trial(Tile(16, 64, 2, 3), 1.0, spilled=8)]
    assert choose_fastest(trials, PRESENT) == QUICK


def test_the_present_tile_stays_where_all_others_spill_or_do_not_start() -> None:
    assert choose_fastest([Trial(SLOW, 1.0, spilled=4), Trial(QUICK)], PRESENT) == PRESENT
    assert choose_fastest([Trial(PRESENT, 2.0), Trial(QUICK, 2.0)], PRESENT) == PRESENT


@pytest.mark.parametrize("role", ["decode", "prompts", "products"])
def test_a_tile_and_a_count_of_spills_reach_the_launches_of_a_row(role: str) -> None:
    row = Row(role, "few" if role == "products" else "plain", 128)
    with using(row, QUICK), counting_spills(row) as spills:
        modules = {"decode": decode, "prompts": prompts, "products": products}
        choose = "choose_product_tile" if role == "products" else "choose_tile"
        assert getattr(modules[role], choose)() == QUICK
        assert (products.multiply if role == "products" else paged.attend) is spills
    assert spills.most == 0


def test_products_are_tried_with_the_rows_that_they_have() -> None:
    assert {one.rows for one in candidates("products", Tile(64, 64, 4, 3))} == {64}
    assert len(candidates("products", Tile(64, 64, 4, 3))) == len(SHAPES_OF_PRODUCTS)


def test_a_table_is_written_as_it_is_read() -> None:
    assert format_table(read_table(), read_timed()) == TABLE.read_text()


def test_tuning_rewrites_the_rows_of_its_architecture_alone(tmp_path: Path) -> None:
    path = tmp_path / "tiles.toml"
    path.write_text(TABLE.read_text())
    before, tried = read_table(path), set[tuple[Row, Tile]]()
    chosen = Tile(128, 32, 4, 1)

    def try_tiles(row: Row, tiles: Sequence[Tile]) -> list[Trial]:
        tried.update((row, tile) for tile in tiles)
        if row.role == "decode":
            return [Trial(tile, math.inf) for tile in tiles]
        return [Trial(tile, 1.0 if tile == chosen else 2.0) for tile in tiles]

    write_tuned("sm_90", try_tiles, "a device", path, tmp_path / "listed")
    after, timed = read_table(path), read_timed(path)
    assert timed["sm_90.prompts.plain"].startswith("a device, 20")
    assert "sm_80.prompts.plain" not in timed
    for architecture in before.keys() - {"sm_90"}:
        assert after[architecture] == before[architecture]
    assert after["sm_90"]["decode"] == before["sm_90"]["decode"]
    for kind, heads in after["sm_90"]["prompts"].items():
        kept = before["sm_90"]["prompts"][kind]
        assert heads == (kept if kind == "float32" else {head_dim: [128, 32, 4, 1] for head_dim in heads})
    assert {tile for row, tile in tried if row == Row("prompts", "plain", 128)} >= set(SHAPES["prompts"])


def test_rows_are_listed_as_they_are_found_so_that_a_stopped_run_keeps_them(tmp_path: Path) -> None:
    path, listed = tmp_path / "tiles.toml", tmp_path / "listed"
    path.write_text(TABLE.read_text())
    rows = rows_of(read_table(path), "sm_90")
    are_usual = [row.size in (128, 4) for row in rows]
    assert are_usual == sorted(are_usual, reverse=True)
    faster = Tile(16, 64, 2, 3)

    def try_tiles(row: Row, tiles: Sequence[Tile]) -> list[Trial]:
        if row != rows[0]:
            raise KeyboardInterrupt
        return [Trial(tile, 1e-4 if tile == faster else 2e-4) for tile in tiles]

    with pytest.raises(KeyboardInterrupt):
        write_tuned("sm_90", try_tiles, "a device", path, listed)
    [line] = listed.read_text().splitlines()
    assert line.startswith("[sm_90.decode] plain = { 128 = [16, 64, 2, 3] }  # a device, 20")
    assert "; 100.0 us, before [16, 128, 4, 2] 200.0 us, of 2" in line
    assert read_table(path)["sm_90"]["decode"]["plain"]["128"] == [16, 64, 2, 3]
