"""The engine with Triton's kernels, interpreted on a simulated GPU: tokens, order, and what a step costs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.checkpoint.hub import find_folder
from engine.core import EngineCore
from engine.model.decoder import Decoder
from engine.warm.warming import WarmStep
from kernels.products import ordered
from kernels.quantized import products
from kernels.quantized.device_layout import CodedWeight
from kernels.triton_backend import ExactBackend, TritonBackend
from kv_store.device_pool import DevicePool
from tests.engine.gguf.files import make_gguf
from tests.harness.checkpoints import choose_prompt, make_checkpoint
from tests.harness.engines import drive, make_core, request, rest_of
from tests.pairs import RUNS_ALL
from tests.simulated_gpu.device import SIM, commands
from tests.simulated_gpu.triton_kernels import triton_kernels
from wire.sampling import SamplingParams

LENGTHS = (1, 17)
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
KV_DTYPES = ["auto", "int8", "fp8", "int4"] if RUNS_ALL else ["auto"]
"""Half a minute each."""


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with triton_kernels():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama-gqa"))


def load(folder: Path, device: torch.device, dtype: str, kv_dtype: str) -> Decoder:
    return Decoder.load(folder, dtype, device, 16, TritonBackend(), kv_dtype)


def prompts(folder: Path) -> list[Sequence[int]]:
    return [choose_prompt(folder, length).prompt_ids for length in LENGTHS]


def tokens(core: EngineCore, folder: Path) -> list[list[int]]:
    return [run.outputs[0] for run in drive(core, [request(prompt, GREEDY) for prompt in prompts(folder)])]


def test_tokens_in_float32_are_transformers(folder: Path) -> None:
    commands().set_lazy(True)
    expected = [list(choose_prompt(folder, length).token_ids[: GREEDY.max_tokens]) for length in LENGTHS]
    assert tokens(make_core(load(folder, SIM, "float32", "auto")), folder) == expected


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_bfloat16_gives_the_same_tokens_on_any_schedule(tmp_path: Path, kv_dtype: str) -> None:
    """With one layer: the test in float32 has two."""
    folder, outputs = make_checkpoint("llama-gqa", tmp_path, num_hidden_layers=1), []
    for is_lazy in (False, True):
        commands().set_lazy(is_lazy)
        outputs.append(tokens(make_core(load(folder, SIM, "bfloat16", kv_dtype)), folder))
    assert outputs[0] == outputs[1]


def test_products_of_one_order_give_transformers_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, with two splits of a depth; another engine goes on with the same tokens from the second one on."""
    commands().set_lazy(True)
    monkeypatch.setattr(ordered, "MIN_SPLIT_DEPTH", 64)
    monkeypatch.setattr(ordered, "UNIT", 32)
    model = Decoder.load(folder, "float32", SIM, 16, ExactBackend())
    oracle = choose_prompt(folder, LENGTHS[-1])
    [run] = drive(make_core(model), [request(oracle.prompt_ids, GREEDY)])
    assert run.outputs[0] == list(oracle.token_ids[: GREEDY.max_tokens])
    down = model.weights.layers[1].feed_forward.matrices[-1]
    assert ordered.num_splits_of(down.data) == 2
    [resumed] = drive(make_core(model), [rest_of(replace(run, outputs={0: run.outputs[0][:2]}, ended=set()))])
    assert resumed.outputs == run.outputs


def test_graphs_of_all_sizes_write_one_tensor_of_logits(tmp_path: Path) -> None:
    """Each graph's logits are read before the next one runs."""
    model = load(make_checkpoint("llama-gqa", tmp_path, num_hidden_layers=1), SIM, "bfloat16", "auto")
    pool = DevicePool(model.layout, 1, SIM)
    pool.kv.data.zero_()
    found, read = [], []
    for num_rows in (9, 3):
        found.append(model.forward(WarmStep(num_rows, 0, 1, samples_all=True).batch(16), pool.kv))
        read.append(found[-1][0].cpu())
    assert model.num_programs == 2
    assert found[0].data_ptr() == found[1].data_ptr()
    assert torch.equal(*read)
    assert read[0].any()


def test_packed_weights_give_transformers_tokens_of_the_dequantized_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embedding and head are one packed table; the depth of one matrix of a layer is cut into two splits."""
    commands().set_lazy(True)
    monkeypatch.setattr(products, "MIN_SPLIT_DEPTH", 128)
    file = make_gguf(tmp_path, "Q4_1", "llama-tied", hidden_size=64, intermediate_size=256)
    model = load(find_folder(str(file)), SIM, "float32", "auto")
    assert isinstance(model.weights.embedding, CodedWeight)
    down = model.weights.layers[1].feed_forward.matrices[-1]
    assert isinstance(down, CodedWeight)
    assert model.weights.head is model.weights.embedding
    [part] = down.parts
    assert part.num_chunks == 2 * products.chunks_per_split(part)
    plain = tmp_path / "plain"
    expected = [list(choose_prompt(plain, length).token_ids[: GREEDY.max_tokens]) for length in LENGTHS]
    assert tokens(make_core(model), plain) == expected
