import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from deploy.plan.config import ClusterConfig
from deploy.plan.machine import Machine, inspect_machine
from deploy.plan.model import DraftFacts, ModelFacts
from deploy.plan.sizing import (
    MAX_DEFAULT_CONTEXTS,
    UNUSABLE_OF_A_GPU,
    Sizes,
    num_more,
    require_room,
    share_gpu,
    size,
    without_arena,
)
from engine.model.programs import GRAPH_BYTES
from tests.harness.served import served_model
from wire.errors import ConfigError
from wire.layout import KVLayout
from wire.pools import PoolSizes
from wire.served_model import ServedModel

MIB, GIB = 1 << 20, 1 << 30
LAPTOP = Machine(memory_bytes=8 * GIB, shared_bytes=4 * GIB, num_cores=8)
GPU_NODE = Machine(memory_bytes=200 * GIB, shared_bytes=100 * GIB, num_cores=64, gpus=(140 * GIB,) * 2)
USABLE_BYTES = 140 * GIB - 140 * GIB // UNUSABLE_OF_A_GPU


GRAPHS_OF_LARGE = 25 * GRAPH_BYTES + 5 * 248 * 300 * 4
"""Of 8 to 128 rows, each over five lengths of tables, with 300 logits a row."""


def served(max_context_len: int, layout: KVLayout) -> ServedModel:
    return served_model(layout, max_context_len=max_context_len)


SMALL = ModelFacts(
    served=served(2048, KVLayout(1, 4, 64, 16, "float32")), device="cpu", weight_bytes=8 * MIB
)  # blocks of 32 KiB
WINDOWED = ModelFacts(
    served=served(2048, KVLayout(1, 4, 64, 16, "float32", "int4", window=64)), device="cpu", weight_bytes=8 * MIB
)
LARGE = ModelFacts(
    served=served(131072, KVLayout(32, 8, 128, 16, "float16")), device="cpu", weight_bytes=3 * GIB
)  # of 2 MiB


def config(**tables: Any) -> ClusterConfig:
    return ClusterConfig.load(None, tables)


def divide(config: ClusterConfig, model: ModelFacts, machine: Machine) -> Sizes:
    """Sizes where all workers are on one machine."""
    return size(config, model, machine, config.pools.prefill + config.pools.decode)


@pytest.mark.parametrize(
    ("machine", "model", "tables", "pool_blocks", "arena_slots", "threads", "gpus"),
    [
        pytest.param(LAPTOP, SMALL, {}, 8192, 8192, 4, 0.0, id="small: 64 contexts"),
        pytest.param(LAPTOP, LARGE, {"pools": {"prefill": 0}}, 256, 512, 8, 0.0, id="large: 512 MiB, 1 GiB"),
        pytest.param(replace(LAPTOP, shared_bytes=64 * MIB), SMALL, {}, 8192, 512, 4, 0.0, id="a quarter of /dev/shm"),
        pytest.param(replace(LAPTOP, memory_bytes=GIB), SMALL, {}, 2048, 8192, 4, 0.0, id="an eighth of memory"),
        pytest.param(LAPTOP, SMALL, {"pools": {"decode": 15}}, 2048, 8192, 1, 0.0, id="many workers"),
        pytest.param(LAPTOP, SMALL, {"worker": {"pool_bytes": "1MiB"}}, 32, 8192, 4, 0.0, id="pool as asked"),
        pytest.param(LAPTOP, SMALL, {"arena": {"size_bytes": "3GiB"}}, 8192, 98304, 4, 0.0, id="arena as asked"),
        pytest.param(LAPTOP, SMALL, {"worker": {"num_threads": 3}}, 8192, 8192, 3, 0.0, id="threads as asked"),
        pytest.param(GPU_NODE, LARGE, {}, 67636, 512, 32, 1.0, id="GPU: what weights, graphs and reserve leave"),
        pytest.param(GPU_NODE, LARGE, {"worker": {"num_gpus": 0.5}}, 32513, 512, 32, 0.5, id="half a GPU each"),
        pytest.param(GPU_NODE, SMALL, {"worker": {"num_gpus": 0}}, 8192, 8192, 32, 0.0, id="CPU though there are GPUs"),
    ],
)
def test_sizes(
    machine: Machine,
    model: ModelFacts,
    tables: dict[str, Any],
    pool_blocks: int,
    arena_slots: int,
    threads: int,
    gpus: float,
) -> None:
    sizes = divide(config(**tables), model, machine)
    assert (sizes.num_pool_blocks, sizes.num_arena_slots) == (pool_blocks, arena_slots)
    assert (sizes.num_threads, sizes.num_gpus) == (threads, gpus)


def test_graphs_leave_less_of_a_gpu_for_pages() -> None:
    """Launches of each graph, logits and attention of the largest step: a third of a GiB here."""
    wide = replace(LARGE, served=replace(LARGE.served, vocab_size=128_256), row_bytes=MIB)
    num_blocks = divide(config(), wide, GPU_NODE).num_pool_blocks
    assert num_blocks == (USABLE_BYTES - (3 + 2) * GIB - 25 * GRAPH_BYTES - 128 * 128_256 * 8 - 128 * MIB) // (2 * MIB)
    few = divide(config(batch={"max_running": 8}), wide, GPU_NODE).num_pool_blocks
    assert few == (USABLE_BYTES - (3 + 2) * GIB - 5 * GRAPH_BYTES - 8 * 128_256 * 8 - 8 * MIB) // (2 * MIB)


def test_graphs_of_chunks_leave_less_of_a_gpu_for_pages() -> None:
    """18 more graphs, memory of the most tokens of a step, and logits of eight chunks beside the rows."""
    wide = replace(LARGE, served=replace(LARGE.served, vocab_size=128_256), row_bytes=MIB, captured_tokens=4096)
    graphs = 43 * GRAPH_BYTES + 136 * 128_256 * 8 + (128 + 2048) * MIB
    assert divide(config(), wide, GPU_NODE).num_pool_blocks == (USABLE_BYTES - (3 + 2) * GIB - graphs) // (2 * MIB)
    few = divide(config(), replace(wide, captured_tokens=64), GPU_NODE).num_pool_blocks
    assert few == (USABLE_BYTES - (3 + 2) * GIB - 28 * GRAPH_BYTES - 136 * 128_256 * 8 - (128 + 64) * MIB) // (2 * MIB)


def test_the_arena_beside_a_gpu_is_a_quarter_of_memory_and_no_more_than_contexts_fill() -> None:
    on_gpu = replace(LARGE, device="cuda")
    assert divide(config(), on_gpu, GPU_NODE).num_arena_slots == 25 * GIB // (2 * MIB)
    assert divide(config(), replace(SMALL, device="cuda"), GPU_NODE).num_arena_slots == 8192
    assert divide(config(), LARGE, GPU_NODE).num_arena_slots == GIB // (2 * MIB)


@pytest.mark.parametrize(
    ("tables", "num_gpus", "share"),
    [
        pytest.param({}, 1, 0.5, id="prefill and decode"),
        pytest.param({"pools": {"decode": 2}}, 1, 0.3333, id="what Ray can count"),
        pytest.param({"pools": {"prefill": 0}}, 1, 1.0, id="alone"),
        pytest.param({"worker": {"num_gpus": 0.25}}, 1, 0.25, id="as asked"),
        pytest.param({"worker": {"decode": {"num_gpus": 0.75}}}, 1, None, id="asked for one role"),
        pytest.param({}, 2, None, id="one each"),
        pytest.param({}, 0, None, id="no GPU"),
    ],
)
def test_the_only_gpu_is_divided_among_the_workers(tables: dict[str, Any], num_gpus: int, share: float | None) -> None:
    machine = replace(GPU_NODE, gpus=(140 * GIB,) * num_gpus)
    shared = share_gpu(config(**tables), machine)
    assert shared.worker.num_gpus == share
    if share is not None:
        sizes = divide(shared, replace(LARGE, device="cuda"), machine)
        assert sizes.num_gpus * (shared.pools.prefill + shared.pools.decode) <= 1


def test_open_blocks_of_int4_take_no_room_from_the_contexts_that_a_pool_has_by_default() -> None:
    layout = WINDOWED.served.layout
    num_bytes = divide(config(), WINDOWED, LAPTOP).num_pool_blocks * layout.payload_bytes
    assert num_bytes == pytest.approx(MAX_DEFAULT_CONTEXTS * WINDOWED.context_bytes, abs=layout.payload_bytes)


def test_a_draft_has_a_page_for_each_page() -> None:
    """Its weights and pages are counted in a worker's memory, and on a GPU they leave less for the worker's own."""
    draft = DraftFacts("/d", 2 * GIB, LARGE.served.layout.block_bytes // 4)
    model = replace(LARGE, draft=draft)
    room_bytes = USABLE_BYTES - (3 + 2 + 2) * GIB - GRAPHS_OF_LARGE
    assert divide(config(), model, GPU_NODE).num_pool_blocks == room_bytes // (2 * MIB + MIB // 2)
    tables = {"worker": {"pool_bytes": "1GiB"}, "pools": {"prefill": 0}}
    assert divide(config(**tables), model, LAPTOP).num_pool_blocks == 512
    with pytest.raises(ConfigError, match=r"1 workers take 6\.5 GiB of memory each"):
        divide(config(**tables), model, replace(LAPTOP, memory_bytes=7 * GIB))


def test_weights_that_workers_share_are_counted_once() -> None:
    machine, pools = replace(LAPTOP, memory_bytes=8 * GIB), {"pools": {"prefill": 1, "decode": 4}}
    tables = {**pools, "worker": {"pool_bytes": "16MiB"}, "arena": {"size_bytes": "16MiB"}}
    with pytest.raises(ConfigError, match=r"5 workers take 3\.266 GiB of memory each"):
        divide(config(**tables), LARGE, machine)
    assert divide(config(**tables), replace(LARGE, is_mapped=True), machine).num_pool_blocks == 8
    assert num_more(config(**tables), replace(LARGE, is_mapped=True), machine) == 5 * GIB // (272 * MIB)
    with pytest.raises(ConfigError, match="272 MiB of memory each, and 0 B are left"):
        divide(config(**tables), replace(LARGE, is_mapped=True), replace(LAPTOP, memory_bytes=3 * GIB))


@pytest.mark.parametrize(
    ("machine", "model", "tables", "named"),
    [
        (
            replace(LAPTOP, memory_bytes=5 * GIB),
            LARGE,
            {},
            "2 workers take 3.562 GiB of memory each, and 4 GiB are left",
        ),
        (LAPTOP, SMALL, {"worker": {"pool_bytes": "5GiB"}}, "at most 1 fit; start fewer, or set worker.pool_bytes"),
        (LAPTOP, SMALL, {"pools": {"decode": 64}}, "65 workers take 279.8 MiB of memory each, and 7.75 GiB are left"),
        (replace(LAPTOP, memory_bytes=0), SMALL, {"arena": {"size_bytes": "1GiB"}}, "and 0 B are left for them"),
        (
            replace(LAPTOP, shared_bytes=GIB),
            SMALL,
            {"arena": {"size_bytes": "2GiB"}},
            "of /dev/shm are free: set arena.size_bytes; --shm-size gives a container more",
        ),
        (LAPTOP, LARGE, {"worker": {"pool_bytes": "1MiB"}, "pools": {"prefill": 0}}, "worker.pool_bytes: 1 MiB is too"),
        (replace(LAPTOP, shared_bytes=MIB // 2), SMALL, {}, "too little, it takes at least 256 KiB; --shm-size gives"),
        (LAPTOP, SMALL, {"worker": {"num_gpus": 1.0}}, "the workers take 2 GPUs, but there are 0"),
        (
            GPU_NODE,
            SMALL,
            {"pools": {"decode": 2}},
            "there are 2: start fewer workers, or give each a share, --gpus 0.5",
        ),
        (replace(GPU_NODE, gpus=(4 * GIB,) * 2), LARGE, {}, "worker.pool_bytes: 0 B is too little"),
        (
            LAPTOP,
            WINDOWED,
            {"worker": {"pool_bytes": "8MiB"}},
            "worker.pool_bytes: 8 MiB is too little, it takes at least 8.03",
        ),
    ],
)
def test_what_cannot_fit_is_refused(machine: Machine, model: ModelFacts, tables: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        divide(config(**tables), model, machine)


@pytest.mark.parametrize(
    ("before", "after", "used_mib", "machine", "problem"),
    [
        pytest.param((1, 1), (1, 2), [512, 512], LAPTOP, "", id="it fits"),
        pytest.param(
            (1, 1),
            (1, 64),
            [400, 512],
            LAPTOP,
            "63 more workers take 512 MiB of memory each, and 7.891 GiB are left for them: at most 15 fit",
            id="the largest one tells",
        ),
        pytest.param((1, 1), (1, 17), [512, 512], LAPTOP, "", id="just as many as fit"),
        pytest.param((1, 1), (1, 18), [512, 512], LAPTOP, "at most 16 fit", id="one too many"),
        pytest.param((1, 15), (2, 15), [512, 512], LAPTOP, "", id="others are still to come"),
        pytest.param((1, 17), (2, 17), [512, 512], LAPTOP, "at most 0 fit", id="others that take all the rest"),
        pytest.param((1, 1), (1, 40), [], LAPTOP, "39 more workers take 256 MiB", id="none to be measured"),
        pytest.param((1, 1), (2, 1), [512, 512], GPU_NODE, "the workers take 3 GPUs, but there are 2", id="GPUs"),
    ],
)
def test_pools_grow_as_far_as_they_fit(
    before: tuple[int, int], after: tuple[int, int], used_mib: list[int], machine: Machine, problem: str
) -> None:
    used_bytes = [mib * MIB for mib in used_mib]
    fits = pytest.raises(ConfigError, match=re.escape(problem)) if problem else nullcontext()
    with fits:
        num_gpus = sum(after) * len(machine.gpus) / 2
        require_room(PoolSizes(*before), PoolSizes(*after), used_bytes, num_gpus, machine)


def test_a_context_that_does_not_fit_is_said() -> None:
    assert divide(config(), SMALL, LAPTOP).notes == ()
    pool, arena = divide(config(pools={"prefill": 0}), LARGE, LAPTOP).notes
    assert "worker.pool_bytes has room for 4096 tokens, less than the model's context of 131072" in pool
    assert "arena.size_bytes has room for 8192 tokens" in arena


def test_the_shared_memory_of_a_container_that_makes_the_arena_small_is_said_with_its_option() -> None:
    container = replace(LAPTOP, shared_bytes=64 * MIB)
    [note] = divide(config(), SMALL, container).notes
    assert note == "the arena takes 16 MiB, a quarter of what /dev/shm has free; --shm-size gives a container more"
    assert divide(config(arena={"size_bytes": "64MiB"}), SMALL, container).notes == ()


def test_an_arena_beside_another_is_sized_by_what_is_free_and_refused_without_room() -> None:
    free = replace(LAPTOP, shared_bytes=64 * MIB)
    assert without_arena(config(), SMALL, free) == replace(free, memory_bytes=free.memory_bytes - 16 * MIB)
    given = config(arena={"size_bytes": "64MiB"})
    assert without_arena(given, SMALL, free) == replace(free, memory_bytes=free.memory_bytes - 64 * MIB)
    with pytest.raises(ConfigError, match="the arena takes 64 MiB, but only 63 MiB of /dev/shm are free"):
        without_arena(given, SMALL, replace(free, shared_bytes=63 * MIB))
    with pytest.raises(ConfigError, match=r"arena\.size_bytes: 0 B is too little"):
        without_arena(config(), SMALL, replace(free, shared_bytes=0))


def test_this_machine_has_something() -> None:
    machine = inspect_machine()
    assert machine.num_cores >= 1
    assert machine.memory_bytes > 0
    assert machine.shared_bytes > 0
