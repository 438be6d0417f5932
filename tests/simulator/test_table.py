"""The page of faults by step of a hand-off is what the simulator does now."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.pairs import RUNS_ALL
from tests.seeds import PACKAGES, digest_of
from tests.simulator.plan import Kind
from tests.simulator.table import HEAD, NTHS, SPLIT, STEPS, cell
from tests.simulator.world import simulate

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "hand-off-faults.md").read_text()
CELLS = [(kind, step) for kind in Kind for step in STEPS]
NUM_DRAWN = 12
DRAWN = CELLS if RUNS_ALL else random.Random(digest_of(PACKAGES)).sample(CELLS, NUM_DRAWN)
REMAKE = "python tests/simulate.py --table > docs/hand-off-faults.md"


def rows() -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("|")]


def test_the_page_has_every_fault_and_every_step() -> None:
    heads, _, *faults = rows()
    assert PAGE.startswith(HEAD), REMAKE
    assert heads == ["fault", *STEPS.values()], REMAKE
    assert [fault for fault, *_ in faults] == [kind.value for kind in Kind], REMAKE


@pytest.mark.parametrize("seed", NTHS)
def test_a_cluster_of_the_page_splits_prefixes_and_evicts_blocks(seed: int) -> None:
    run = simulate(replace(SPLIT, seed=seed))
    assert run.num["jumps"]
    assert run.num["evictions"]


@pytest.mark.parametrize(("kind", "step"), DRAWN)
def test_a_cell_is_what_clients_see(kind: Kind, step: str) -> None:
    place = [*STEPS].index(step)
    told = {fault: cells[place] for fault, *cells in rows()[2:]}
    assert told[kind.value] == cell(kind, step), REMAKE
