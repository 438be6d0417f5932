"""Ready means warm: no launch after it wants a kernel that is not compiled, and none a graph that is not captured."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from engine.checkpoint.config import ModelConfig
from engine.model import decoder as module
from engine.model.decoder import Decoder
from engine.model.programs import GRAPH_BYTES, ProgramSize, captured_tokens, graph_bytes, program_sizes
from engine.warm.warming import StepBounds, WarmStep, Warmth, limits_of, warm
from kernels.backend import KVPages
from kernels.products.ordered import MAX_COUNTED_ROWS, MAX_SPLIT_ROWS
from kernels.tiles import KIND_TO_ROWS, PRODUCTS, WIDENED, read_table
from kernels.torch_backend import TorchBackend
from kv_store.device_pool import DevicePool
from tests.harness.assembled_worker import local_worker
from tests.harness.checkpoints import make_checkpoint
from tests.harness.node import Node
from tests.pairs import RUNS_ALL
from tests.simulated_gpu.device import SIM, SimulatedGpu, commands, leave_room, reset
from wire.errors import ConfigError
from wire.pools import Role
from worker.assembly import Tiers
from worker.service import COLD, Warm

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("launch_signatures.py")
LOADS = [
    ("llama-gqa", "auto", "full", 10),
    ("gguf:Q4_K", "int8", "full", 21),
    ("exact:llama-gqa", "auto", "full", 41),
    ("gemma2", "auto", "full", 10),
    ("qwen3", "int4", "full", 10),
    ("gemma3", "fp8", "full", 10),
    ("qwen3", "auto", "sinks=20+44", 10),
    ("llama-gqa", "auto", "h2o=128", 10),
    ("gguf:Q8_0", "auto", "full", 21),
    ("mixtral", "auto", "full", 14),
]
"""An architecture, a dtype of KV, a policy, and a bound on the kernels of its set."""
LOAD_S = 900 if RUNS_ALL else 40
"""benchmarks/late_launches.py draws an hour."""
LIMITS = StepBounds(16, 32, 64)
NUM_BLOCKS = 64


@pytest.mark.parametrize(("arch", "kv_dtype", "policy", "most"), LOADS if RUNS_ALL else LOADS[:3])
def test_a_drawn_load_launches_nothing_outside_of_the_warmed_set(
    arch: str, kv_dtype: str, policy: str, most: int
) -> None:
    """Triton's own binder specializes the launches, on 1 and on multiples of 16."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": "/dev/null"}
    command = [sys.executable, str(SCRIPT), arch, kv_dtype, policy, str(LOAD_S)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380, check=True)
    found: dict[str, Any] = json.loads(answer.stdout)
    assert found["outside"] == []
    ordinary = ["kernels.checksums.sum_pieces", "kernels.quantized.products.multiply"]
    assert found["independent"] == ordinary[: 1 + arch.startswith("gguf")]
    assert found["late_programs"] == 0
    assert found["seen"] <= found["warmed"] <= most
    assert found["passes"] > 2 * LOAD_S


def test_rows_of_warmed_steps_are_beyond_each_tile_of_products() -> None:
    kinds = [
        kind for roles in read_table().values() for role in (PRODUCTS, WIDENED) for kind in roles.get(role, {}).values()
    ]
    tiles = {one[0] for kind in kinds for one in kind.values()}
    rows = {step.num_rows for step in StepBounds(128, 2048, 64).steps}
    bounds = {*tiles, *KIND_TO_ROWS.values(), MAX_COUNTED_ROWS, MAX_SPLIT_ROWS}
    assert rows == {1, *(one + 1 for one in bounds), 2048}


def test_sizes_are_finite_and_the_largest_comes_first() -> None:
    sizes = program_sizes(128, 8192)
    assert sizes[0] == ProgramSize(128, 16384)
    assert len(sizes) == 25
    assert {one.num_rows for one in sizes} == {8, 16, 32, 64, 128}
    assert {one.num_blocks for one in sizes} == {64, 256, 1024, 4096, 16384}
    assert program_sizes(8, 4) == [ProgramSize(8, 64)]


def test_chunks_have_sizes_beside_no_rows_a_few_and_as_many_as_there_can_be() -> None:
    sizes = program_sizes(100, 8192, 2000)
    assert sizes[:3] == [ProgramSize(128, 8192, 2048), ProgramSize(8, 8192, 2048), ProgramSize(0, 8192, 2048)]
    of_chunks = {(one.num_rows, one.chunk_tokens) for one in sizes if one.chunk_tokens}
    assert of_chunks == {(rows, 64 << power) for rows in (0, 8, 128) for power in range(6)}
    assert len(sizes) == 25 + 18
    assert program_sizes(8, 4, 20) == [ProgramSize(8, 4, 64), ProgramSize(0, 4, 64), ProgramSize(8, 64)]


@pytest.mark.parametrize(
    ("hidden", "mlp", "num_heads", "num_kv_heads", "head_dim", "most"),
    [
        pytest.param(576, 1536, 9, 3, 64, 32768, id="135M"),
        pytest.param(2048, 8192, 32, 8, 64, 2048, id="1B"),
        pytest.param(4096, 14336, 32, 8, 128, 512, id="8B"),
        pytest.param(16384, 53248, 128, 8, 128, 64, id="405B"),
    ],
)
def test_the_more_weights_a_layer_has_the_fewer_tokens_have_a_graph(
    hidden: int, mlp: int, num_heads: int, num_kv_heads: int, head_dim: int, most: int
) -> None:
    """A layer of 8B computes 512 tokens in a third of a millisecond, and is launched in half of one."""
    config = ModelConfig.parse(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 1000,
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_hidden_layers": 2,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-5,
        }
    )
    assert captured_tokens(config) == most


def test_graphs_share_all_but_their_launches() -> None:
    sizes = program_sizes(16, 256)
    assert sizes == [ProgramSize(*one) for one in ((16, 256), (16, 64), (8, 256), (8, 64))]
    assert graph_bytes(sizes, 1000, 50) == 16 * 1000 * 8 + 16 * 50 + 4 * GRAPH_BYTES
    with_chunks = program_sizes(16, 256, 128)
    assert graph_bytes(with_chunks, 1000, 50) == 24 * 1000 * 8 + 144 * 50 + 10 * GRAPH_BYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama-gqa"))


class FakeProgram:
    """A graph of a step, which runs it instead; torch's attention waits for the device, and is not captured."""

    captured: ClassVar[list[ProgramSize]] = []
    fault: ClassVar[Callable[[ProgramSize], None]] = staticmethod(lambda size: None)

    def __init__(self, forward: Any, angles: Any, size: ProgramSize, device: torch.device) -> None:
        FakeProgram.fault(size)
        FakeProgram.captured.append(size)

    def run(self, batch: Any) -> torch.Tensor:
        return torch.zeros(len(batch.sample_rows), 8, device=SIM)


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CapturedProgram", FakeProgram)
    monkeypatch.setattr(FakeProgram, "captured", [])
    monkeypatch.setattr(FakeProgram, "fault", lambda size: None)


def warm_one(folder: Path) -> tuple[Warmth, Decoder, DevicePool]:
    model = Decoder.load(folder, "float32", SIM, 16)
    pool = DevicePool(model.layout, NUM_BLOCKS, SIM)
    return warm(model, TorchBackend(), pool.kv, LIMITS), model, pool


def test_graphs_are_there_before_requests_and_later_ones_are_counted(folder: Path) -> None:
    warmth, model, pool = warm_one(folder)
    of_chunks = [ProgramSize(num_rows, 64, 64) for num_rows in (16, 8, 0)]
    assert FakeProgram.captured == [*of_chunks, ProgramSize(16, 64), ProgramSize(8, 64)]
    assert warmth.without_program == []
    for num_rows in (1, 8, 16):
        model.forward(WarmStep(num_rows, 0, 4, samples_all=True).batch(16), pool.kv)
        model.forward(WarmStep(num_rows, 40, 4, samples_all=False).batch(16), pool.kv)
    assert warmth.num_late == 0
    assert model.prepare(ProgramSize(17, 4), pool.kv)
    assert warmth.num_late == 1


def test_the_sums_of_a_stores_pages_are_compiled_before_what_is_compiled_counts_as_late(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sum_pages, num_launched, before_warm = SimulatedGpu.sum_pages, [0], list[int]()

    def counting(*args: Any) -> None:
        num_launched[0] += 1
        sum_pages(*args)

    def warm_up(kv: KVPages, draft_kv: KVPages | None) -> Warm:
        before_warm.append(num_launched[0])
        return COLD

    monkeypatch.setattr(SimulatedGpu, "sum_pages", counting)
    model = Decoder.load(folder, "float32", SIM, 16)
    node = Node(model.layout)
    tiers = Tiers(node.arena, node.directory)
    local_worker(model, tiers, "p0", Role.PREFILL, NUM_BLOCKS, warm_up=warm_up).close()
    assert before_warm == num_launched == [1]


def test_limits_follow_from_the_pool(folder: Path) -> None:
    model = Decoder.load(folder, "float32", SIM, 16)
    assert limits_of(model, DevicePool(model.layout, 8, SIM).kv, 4, 32) == StepBounds(4, 32, 8)


def test_a_size_without_memory_for_its_graph_is_served_without_and_not_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(size: ProgramSize) -> None:
        if size.num_rows == 16 and not size.chunk_tokens:
            raise torch.OutOfMemoryError("no memory for a graph")

    monkeypatch.setattr(FakeProgram, "fault", fault)
    warmth, model, pool = warm_one(folder)
    assert warmth.without_program == [ProgramSize(16, 64)]
    assert "steps of 16 rows and 64 blocks run without a graph: no memory for a graph" in caplog.text
    logits = model.forward(WarmStep(16, 0, 4, samples_all=True).batch(16), pool.kv)
    assert len(logits) == 16
    assert warmth.num_late == 0


def test_a_chunk_takes_the_least_graph_that_has_memory_and_room_or_runs_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(size: ProgramSize) -> None:
        if size.num_rows == 8 and size.chunk_tokens:
            raise torch.OutOfMemoryError("no memory for a graph")

    ran: list[ProgramSize] = []

    class Noting(FakeProgram):
        def __init__(self, forward: Any, angles: Any, size: ProgramSize, device: torch.device) -> None:
            super().__init__(forward, angles, size, device)
            self._size = size

        def run(self, batch: Any) -> torch.Tensor:
            ran.append(self._size)
            return super().run(batch)

    monkeypatch.setattr(FakeProgram, "fault", fault)
    monkeypatch.setattr(module, "CapturedProgram", Noting)
    warmth, model, pool = warm_one(folder)
    assert warmth.without_program == [ProgramSize(8, 64, 64)]
    assert "steps of 8 rows, 64 prompt tokens and 64 blocks run without a graph" in caplog.text
    for num_decodes, num_tokens in ((0, 64), (3, 20), (16, 64), (0, 65), (17, 2)):
        model.forward(WarmStep(num_decodes, num_tokens, 4, samples_all=False).batch(16), pool.kv)
    assert ran == [ProgramSize(0, 64, 64), ProgramSize(16, 64, 64), ProgramSize(16, 64, 64)]
    assert warmth.num_late == 0


def test_a_device_that_is_lost_at_a_graph_is_refused_with_its_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(size: ProgramSize) -> None:
        if size == ProgramSize(8, 64):
            commands().fail(SIM.index, "it fell off the bus")
            raise RuntimeError("it fell off the bus")

    monkeypatch.setattr(FakeProgram, "fault", fault)
    with pytest.raises(ConfigError, match=r"sim:0 failed at a graph of 8 rows and 64 blocks: .*bus"):
        warm_one(folder)
    reset()


def test_a_device_that_is_lost_at_a_step_is_refused_with_the_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, num_calls = Decoder.run, [0]

    def failing(*args: Any) -> torch.Tensor:
        num_calls[0] += 1
        if num_calls[0] == 2:
            commands().fail(SIM.index, "it fell off the bus")
        return run(*args)

    monkeypatch.setattr(Decoder, "run", failing)
    with pytest.raises(ConfigError, match=r"sim:0 failed at a step of .* rows and .* prompt tokens"):
        warm_one(folder)
    reset()


def test_a_step_without_memory_is_refused_with_the_setting_to_lower(folder: Path) -> None:
    model = Decoder.load(folder, "float32", SIM, 16)
    pool = DevicePool(model.layout, NUM_BLOCKS, SIM)
    model.angles_for(pool.kv)
    leave_room(SIM.index, 4096)
    with pytest.raises(ConfigError, match=r"a step of .* does not fit into the memory of sim:0: .*worker.pool_bytes"):
        warm(model, TorchBackend(), pool.kv, LIMITS)
