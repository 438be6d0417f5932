"""Checkpoints of AWQ, GPTQ and MXFP4 with drawn codes, as their definitions say, beside the weights that they mean."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.harness.compressed_checkpoints import set_quantization

GROUP = 64
AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Drawn = tuple[dict[str, Tensor], Tensor]
"""The tensors of a matrix by what follows its name, and its weights [columns, depth]."""


def _pack(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Packs [rows, codes] in int32 [rows, words]; order: the code that lies at each place of a word."""
    in_word = 32 // bits
    words = torch.zeros(codes.shape[0], codes.shape[1] // in_word, dtype=torch.int64)
    for place, code in enumerate(order or range(in_word)):
        words |= codes[:, code::in_word].long() << bits * place
    return words.to(torch.int32)


def _integers(columns: int, depth: int, bits: int, groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Draws codes [depth, columns], zero points and scales [groups, columns], and their weights."""
    top, shape = 1 << bits, (int(groups.max()) + 1, columns)
    codes, zeros = torch.randint(top, (depth, columns)), torch.randint(1, top, shape)
    scales = ((torch.rand(shape) + 0.5) * 0.5 / top).to(dtype)
    return codes, zeros, scales, ((codes - zeros[groups]).to(dtype) * scales[groups]).T.contiguous()


def awq(group: int | None = GROUP, dtype: torch.dtype = torch.float16) -> Callable[[int, int], Drawn]:
    def draw(columns: int, depth: int) -> Drawn:
        codes, zeros, scales, weights = _integers(columns, depth, 4, torch.arange(depth) // (group or depth), dtype)
        tensors = {"qweight": _pack(codes, 4, AWQ_COLUMNS), "qzeros": _pack(zeros, 4, AWQ_COLUMNS), "scales": scales}
        return tensors, weights

    return draw


def gptq(bits: int, subtrahend: int, is_ordered: bool = False) -> Callable[[int, int], Drawn]:
    """subtrahend: what is taken from zero points before they are stored."""

    def draw(columns: int, depth: int) -> Drawn:
        groups = torch.arange(depth) // GROUP
        groups = groups[torch.randperm(depth)] if is_ordered else groups
        codes, zeros, scales, weights = _integers(columns, depth, bits, groups, torch.float16)
        tensors = {"qweight": _pack(codes.T, bits).T.contiguous(), "qzeros": _pack(zeros - subtrahend, bits)}
        return tensors | {"scales": scales, "g_idx": groups.int()}, weights

    return draw


def mxfp4(columns: int, depth: int) -> Drawn:
    codes = torch.randint(16, (columns, depth // 32, 32))
    exponents = torch.randint(121, 126, (columns, depth // 32))
    codes[3, 2], exponents[3, 2] = 0, 0  # as files have a group of zeros
    weights = torch.ldexp(E2M1[codes], exponents[..., None] - 127).flatten(1)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return {"weight_blocks": blocks.to(torch.uint8), "weight_scales": exponents.to(torch.uint8)}, weights


KINDS: dict[str, tuple[dict[str, Any], Callable[[int, int], Drawn]]] = {
    "AWQ": (AWQ, awq()),
    "AWQ of channels": (AWQ | {"group_size": -1, "version": "GEMM"}, awq(None)),
    "AWQ in bfloat16": (AWQ, awq(GROUP, torch.bfloat16)),
    "GPTQ of 4 bits": (GPTQ, gptq(4, 1)),
    "GPTQ of 8 bits": (GPTQ | {"bits": 8}, gptq(8, 1)),
    "GPTQ, version 2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(4, 0)),
    "GPTQ by activation": (GPTQ | {"desc_act": True}, gptq(4, 1, is_ordered=True)),
    "MXFP4": (MXFP4, mxfp4),
}


def quantize(folder: Path, into: Path, kind: str) -> None:
    """Draws the layers' matrices of a plain checkpoint anew; the plain folder gets what they mean."""
    quantization, draw = KINDS[kind]
    shutil.copytree(folder, into)
    plain, written = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for seed, (name, tensor) in enumerate(sorted(plain.items())):
        written[name] = tensor
        if "_proj.weight" in name:
            torch.manual_seed(seed)
            del written[name]
            tensors, plain[name] = draw(*tensor.shape)
            written |= {f"{name.removesuffix('weight')}{part}": one for part, one in tensors.items()}
    save_file(plain, folder / "model.safetensors")
    save_file(written, into / "model.safetensors")
    set_quantization(into, quantization)
