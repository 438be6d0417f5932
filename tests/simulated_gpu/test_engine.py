"""The engine on a simulated GPU: the tokens of a CPU, and no race on the way."""

import gc
from itertools import count
from pathlib import Path

import pytest
import torch

from engine.engine import Engine, EngineCompletion
from engine.model.batch import Batch
from engine.model.decoder import Decoder
from engine.model.programs import CapturedProgram, ProgramSize
from kernels.backend import Angles
from kv_store import device_pool
from kv_store.device_pool import DevicePool
from kv_store.node import arena
from tests.harness.checkpoints import choose_prompt, make_checkpoint
from tests.harness.engines import make_core, prefill, resume
from tests.harness.node import Node
from tests.simulated_gpu import device
from tests.simulated_gpu.device import SIM
from wire.sampling import SamplingParams

LENGTHS = (1, 16, 17, 40)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=3)
PENALIZED = SamplingParams(temperature=0.8, seed=5, n=2, max_tokens=12, repetition_penalty=1.3, presence_penalty=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama-gqa"))


def generate(folder: Path, name: str, sampling: SamplingParams, kv_dtype: str = "auto") -> list[EngineCompletion]:
    engine = Engine.load(str(folder), dtype="float32", kv_dtype=kv_dtype, device=name, num_blocks=64)
    return engine.generate([choose_prompt(folder, length).prompt_ids for length in LENGTHS], sampling)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALIZED], ids=["greedy", "seeded", "penalized"])
def test_tokens_equal_a_cpus(folder: Path, sampling: SamplingParams) -> None:
    assert generate(folder, "sim", sampling) == generate(folder, "cpu", sampling)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int4"])
def test_tokens_of_quantized_kv_equal_a_cpus(folder: Path, kv_dtype: str) -> None:
    assert generate(folder, "sim", GREEDY, kv_dtype) == generate(folder, "cpu", GREEDY, kv_dtype)


@pytest.mark.parametrize("is_lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
def test_handed_over_from_device_to_device(
    folder: Path, kv_dtype: str, is_lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill on one device, decode on another, with a pinned arena between them."""
    assert hand_over(folder, kv_dtype, is_lazy, monkeypatch) == [
        one.choices[0].token_ids for one in generate(folder, "cpu", GREEDY, kv_dtype)
    ]


@pytest.mark.parametrize("is_lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("failing_pass", [1, 2], ids=["warm-up", "capture"])
def test_a_capture_that_fails_leaves_nothing_behind(failing_pass: int, is_lazy: bool) -> None:
    """What a failed pass has launched is over before the memory that it reads is another's."""
    gc.collect()
    passes, stream = count(1), torch.accelerator.current_stream(SIM)
    angles = Angles(*torch.ones(2, 4, 8, device=SIM))
    device.synchronize()
    device.commands().set_lazy(is_lazy)

    def forward(batch: Batch, _: Angles) -> torch.Tensor:
        logits = batch.block_tables.sum(1) + batch.positions
        if next(passes) == failing_pass:
            raise RuntimeError("out of memory")
        return logits

    num_used = device.commands().num_used(SIM.index)
    with pytest.raises(RuntimeError, match="out of memory"):
        CapturedProgram(forward, angles, ProgramSize(8, 64), SIM)
    assert torch.accelerator.current_stream(SIM) == stream
    for num_words in (4 * 8 + 8 * 66 // 2 + 1, 8 * 65):
        assert torch.zeros(num_words, dtype=torch.int64, device=SIM).sum() == 0
    gc.collect()
    device.synchronize()
    assert device.commands().num_used(SIM.index) == num_used
    assert next(passes) == failing_pass + 1


def test_graphs_warm_up_on_one_stream() -> None:
    """Torch keeps what a stream has used for it: 32 MiB of a product's workspace on an H200."""
    angles, streams = Angles(*torch.ones(2, 4, 8, device=SIM)), list[torch.Stream]()

    def forward(batch: Batch, _: Angles) -> torch.Tensor:
        streams.append(torch.accelerator.current_stream(SIM))
        return batch.positions + 1

    programs = [CapturedProgram(forward, angles, ProgramSize(num_rows, 64), SIM) for num_rows in (8, 16)]
    assert len(programs) == 2
    assert streams[0] == streams[2] != torch.accelerator.current_stream(SIM)


@pytest.mark.parametrize("is_lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("left_out", ["fence", "wait"])
def test_a_pool_that_does_not_wait_is_reported(
    folder: Path, left_out: str, is_lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publish or fetch waits for its copies where it takes their checksums."""
    if left_out == "fence":
        monkeypatch.setattr(DevicePool, "fence", lambda _: None)
    else:
        after = device_pool.checksums_after
        monkeypatch.setattr(device_pool, "checksums_after", lambda _, sums: after(torch.Event(SIM), sums))
    hand_over(folder, "auto", is_lazy, monkeypatch)
    assert device.races() != []


def hand_over(folder: Path, kv_dtype: str, is_lazy: bool, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    monkeypatch.setattr(arena, "GPU_CONTROLS", (Path("/dev/null"),))
    device.commands().set_lazy(is_lazy)
    prompts = [choose_prompt(folder, length).prompt_ids for length in LENGTHS]
    models = [Decoder.load(folder, "float32", torch.device("sim", index), 16, kv_dtype=kv_dtype) for index in range(2)]
    node = Node(models[0].layout)
    handed = prefill(make_core(models[0], node), prompts, GREEDY)
    return [run.outputs[0] for run in resume(make_core(models[1], node), handed)]
