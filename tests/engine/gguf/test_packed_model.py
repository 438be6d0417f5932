"""A model with packed weights gives the logits, bit by bit, of the same file dequantized into a plain checkpoint."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.gguf import MAGIC
from engine.checkpoint.gguf.blocks import TYPES, StoredTensor, unpack
from engine.checkpoint.gguf.table import quantized
from engine.model.decoder import Decoder
from engine.model.weights import WeightLoader, count_bytes
from kernels.backend import Weight
from kernels.selection import select_backend
from kernels.torch_backend import TorchBackend
from kernels.triton_backend import TritonBackend
from tests.engine.gguf.files import drawn_blocks, write_table
from tests.harness.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.harness.model_alone import logits_of
from wire.errors import ModelError

QUANTIZED = [name for name, kind in TYPES.items() if kind.decode is not None]
MIXED = "Q4_K with Q6_K and F16"
CPU = torch.device("cpu")
PROMPTS = torch.randint(VOCAB_SIZE, (5, 40), generator=torch.Generator().manual_seed(2)).tolist()

FIRST = MAGIC.ljust(32)
"""Bytes before the tensors: a file is known by its content."""


def kind_of(tensor: str, file: str) -> str:
    """Chooses types as llama.cpp's mixtures do."""
    if file != MIXED:
        return file
    return "Q6_K" if "v_proj" in tensor or "embed" in tensor else "F16" if "down_proj" in tensor else "Q4_K"


@pytest.fixture(params=[*QUANTIZED, MIXED])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A converted folder with drawn blocks, and a checkpoint with what they mean in float32."""
    plain, converted = tmp_path / "plain", tmp_path / "converted"
    make_checkpoint("llama-gqa", plain, hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64)
    shutil.copytree(plain, converted)
    (converted / "model.safetensors").unlink()
    tensors, stored, data = load_file(plain / "model.safetensors"), {}, bytearray(FIRST)
    for seed, (name, tensor) in enumerate(tensors.items()):
        kind = TYPES[kind_of(name, request.param) if tensor.dim() == 2 else "F32"]
        rows = tensor.reshape(-1, tensor.shape[-1])
        raw = (
            drawn_blocks(kind.name, rows.shape[0], rows.shape[1], seed, 0.15)
            if tensor.dim() == 2
            else rows.float().numpy()
        )
        if kind.decode is not None:
            tensors[name] = torch.from_numpy(unpack(kind, raw).values()).reshape(tensor.shape)
        elif kind.name == "F16":
            tensors[name] = torch.from_numpy(raw.view(np.float16).astype(np.float32))
        stored[name] = StoredTensor(kind, tuple(tensor.shape), len(data))
        data += raw.tobytes()
    save_file({name: tensor.float() for name, tensor in tensors.items()}, plain / "model.safetensors")
    (tmp_path / "model.gguf").write_bytes(data)
    write_table(converted, tmp_path / "model.gguf", stored)
    return converted, plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_have_the_bits_of_the_dequantized_checkpoint(folders: tuple[Path, Path], dtype: str) -> None:
    packed, plain = (Decoder.load(folder, dtype, CPU, 16) for folder in folders)
    assert packed.weights.layers[0].qkv.weight.data.dtype is torch.uint8
    assert packed.weights.embedding.data.dtype is torch.uint8
    expected = logits_of(plain, PROMPTS, 6, 23)
    assert torch.equal(logits_of(packed, PROMPTS, 6, 23), expected)
    assert expected.std() > 0.01


def test_bytes_are_counted_as_they_are_packed(folders: tuple[Path, Path]) -> None:
    for folder in folders:
        checkpoint = Checkpoint(folder)
        for backend in (select_backend(CPU), TorchBackend(), TritonBackend()):
            sizes: dict[int, int] = {}

            def packed(_: str, pack: Callable[[], Weight], sizes: dict[int, int] = sizes) -> Weight:
                weight = pack()
                sizes[len(sizes)] = weight.data.nbytes
                return weight

            WeightLoader(checkpoint, torch.bfloat16, CPU, backend, packed).load()
            assert count_bytes(checkpoint, torch.bfloat16, backend) == sum(sizes.values())


@pytest.mark.parametrize("name", QUANTIZED)
def test_codes_with_their_scales_mean_what_the_blocks_do(name: str) -> None:
    stored = drawn_blocks(name, 7, 512, 3)
    stored[2] = 0
    assert np.array_equal(quantized(TYPES[name], stored).dequantize().numpy(), unpack(TYPES[name], stored).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_that_is_nan_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    make_checkpoint("llama-gqa", tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    raw = drawn_blocks("Q8_0", 64, 64, 0)
    raw[3, :2] = np.array([np.nan], np.float16).view(np.uint8)
    (tmp_path / "model.gguf").write_bytes(FIRST + raw.tobytes())
    write_table(tmp_path, tmp_path / "model.gguf", {name: StoredTensor(TYPES["Q8_0"], (64, 64), len(FIRST))})
    with pytest.raises(ModelError, match="has NaN or infinity as"):
        Checkpoint(tmp_path).read_codes(name, (64, 64), dtype, CPU)
