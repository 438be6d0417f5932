"""Quantized checkpoints that the package compressed-tensors writes, beside what it decompresses them into."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FLOAT = {"type": "float", "symmetric": True, "num_bits": 8}
INT = {"type": "int", "symmetric": True}
KINDS: dict[str, dict[str, Any]] = {
    "W4A16 of groups": {**INT, "num_bits": 4, "strategy": "group", "group_size": 32},
    "W4A16 of large groups": {**INT, "num_bits": 4, "strategy": "group", "group_size": 128},
    "W4A16 of channels": {**INT, "num_bits": 4, "strategy": "channel"},
    "W4A16 with zero points": {**INT, "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    "W4A16 of channels with zero points": {**INT, "num_bits": 4, "strategy": "channel", "symmetric": False},
    "W8A16 of groups": {**INT, "num_bits": 8, "strategy": "group", "group_size": 64},
    "W8A16 of channels": {**INT, "num_bits": 8, "strategy": "channel"},
    "W8A16 with zero points": {**INT, "num_bits": 8, "strategy": "group", "group_size": 64, "symmetric": False},
    "FP8 of tensors": {**FLOAT, "strategy": "tensor"},
    "FP8 of channels": {**FLOAT, "strategy": "channel"},
    "FP8 of blocks": {**FLOAT, "strategy": "block", "block_structure": [128, 128]},
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
"""The quantization_config of checkpoints as DeepSeek and Qwen publish them."""


def compress(folder: Path, into: Path, kind: str, dtype: torch.dtype, layout: str = "") -> None:
    """Quantizes the layers' matrices of a plain checkpoint; the plain folder gets what they are decompressed into.

    dtype: of scales, and of the other tensors. layout: another than the package's own for such weights.
    """
    # Imported here, for its import takes seconds.
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    is_int = KINDS[kind]["type"] == "int"
    layout = layout or ("pack-quantized" if is_int else "float-quantized")
    args = QuantizationArgs(**KINDS[kind])
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(layout)
    shutil.copytree(folder, into)
    plain: dict[str, Tensor] = {}
    written: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        plain[name] = written[name] = tensor.to(dtype)
        if "_proj.weight" in name:
            del written[name]
            scale, zero = scales(tensor, kind, args, dtype)
            state = {"weight": tensor.to(dtype), "weight_scale": scale, "weight_zero_point": zero}
            state = compressor.compress(state, scheme)
            plain[name] = compressor.decompress(state, scheme)["weight"].contiguous()
            written |= {f"{name.removesuffix('weight')}{part}": one.contiguous() for part, one in state.items()}
    status: Any = "compressed"
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=layout, quantization_status=status)
    save_file(plain, folder / "model.safetensors")
    save_file(written, into / "model.safetensors")
    set_quantization(into, config.model_dump(mode="json"))


def scales(tensor: Tensor, kind: str, args: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns scales and zero points as the package computes them from least and largest weights."""
    from compressed_tensors.quantization.utils import calculate_qparams

    columns, depth = tensor.shape
    match KINDS[kind]["strategy"]:
        case "tensor":
            parts = tensor.reshape(1, -1)
        case "channel":
            parts = tensor.reshape(columns, 1, depth)
        case "group":
            parts = tensor.reshape(columns, -1, KINDS[kind]["group_size"])
        case _:
            rows, width = KINDS[kind]["block_structure"]
            padded = torch.nn.functional.pad(tensor, (0, -depth % width, 0, -columns % rows))
            parts = padded.reshape(-1, rows, padded.shape[1] // width, width).transpose(1, 2).flatten(2)
    scale, zero = calculate_qparams(*parts.float().aminmax(dim=-1), args)
    return scale.to(dtype), zero.to(torch.int8)


def to_fp8_method(folder: Path) -> None:
    """Rewrites a checkpoint of FP8 blocks in the layout of the quant_method fp8."""
    tensors = load_file(folder / "model.safetensors")
    named = {name.replace("weight_scale", "weight_scale_inv"): one for name, one in tensors.items()}
    save_file(named, folder / "model.safetensors")
    set_quantization(folder, FP8)


def set_quantization(folder: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
