"""The experts of gpt-oss, whose tensors have the matrices of all experts of a layer, as matrices of single experts.

| tensor of model.layers.N.mlp.experts | content, of S = gate_up_proj or down_proj [columns, depth]             |
|--------------------------------------|------------------------------------------------------------------------|
| S                                    | floats [experts, depth, columns]                                       |
| S_blocks                             | MXFP4: uint8 [experts, columns, depth / 32, 16], the low code first    |
| S_scales                             | of MXFP4: uint8 [experts, columns, depth / 32], exponents of 2 and 127 |
| S_bias                               | floats [experts, columns]                                              |

Columns of gate and up alternate. MXFP4: codes of 4 bits, E2M1, and a scale for each 32 (OCP Microscaling Formats 1.0).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checkpoint.config import ModelConfig
from engine.checkpoint.quantized.mxfp4 import GROUP, NAN, from_blocks
from engine.checkpoint.tensor_file import TensorFile
from kernels.quantized.codebook import Codebook
from kernels.quantized.matrix import Quantized
from wire.errors import ModelError

_MATRICES = {
    "gate_proj": ("gate_up_proj", slice(0, None, 2)),
    "up_proj": ("gate_up_proj", slice(1, None, 2)),
    "down_proj": ("down_proj", slice(None)),
}
"""The stacked tensor of each matrix, and its columns there."""


@dataclass(frozen=True)
class StackedEntry:
    """The place of an expert's matrix or bias in stacked tensors, whose names begin with `stem`."""

    shape: tuple[int, ...]
    stem: str
    expert: int
    columns: slice


class StackedExperts:
    """A reader of matrices and biases of single experts, under the names that other models have for them.

    stored: the names of the stacked tensors.
    """

    def __init__(self, tensor_to_file: Mapping[str, TensorFile]) -> None:
        self._files = tensor_to_file
        self.entries: dict[str, StackedEntry] = {}
        self.stored = set[str]()

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Reads a bias, or a matrix of floats, into host memory. Raises ModelError if a file was cut."""
        entry = self.entries[name]
        is_bias = len(entry.shape) == 1
        stored = self.item(entry, "_bias") if is_bias else self.item(entry, "").T
        return stored[entry.columns].to(dtype).contiguous()

    def add(self, stem: str, shape: tuple[int, int, int]) -> None:
        """Adds the matrices [experts, columns, depth] of a stem. Raises ModelError if a tensor is missing or unlike."""
        num_experts, columns, depth = shape
        stored: dict[str, tuple[int, ...]] = {f"{stem}_bias": (num_experts, columns)}
        if f"{stem}_blocks" in self._files:
            groups = num_experts, columns, -(-depth // GROUP)
            stored |= {f"{stem}_blocks": (*groups, GROUP // 2), f"{stem}_scales": groups}
        else:
            stored[stem] = num_experts, depth, columns
        for name, expected in stored.items():
            self._require(name, expected, not name.endswith(("_blocks", "_scales")))
        part, _, own_stem = stem.rpartition(".")
        for matrix, (of_stem, own) in _MATRICES.items():
            num_own = len(range(columns)[own])
            for expert in range(num_experts if of_stem == own_stem else 0):
                name = f"{part}.{expert}.{matrix}"
                self.entries[f"{name}.weight"] = StackedEntry((num_own, depth), stem, expert, own)
                self.entries[f"{name}.bias"] = StackedEntry((num_own,), stem, expert, own)

    def _require(self, name: str, shape: tuple[int, ...], has_floats: bool) -> None:
        if name not in self._files:
            raise ModelError(f"the weights lack the tensor {name}")
        entry = self._files[name].entries[name]
        if entry.shape != shape:
            raise ModelError(f"tensor {name} has shape {list(entry.shape)}, config.json makes it {list(shape)}")
        is_float = entry.dtype.is_floating_point and entry.dtype.itemsize > 1
        if is_float is not has_floats or not (is_float or entry.dtype is torch.uint8):
            raise ModelError(f"tensor {name} is {entry.dtype}, expected {'floats' if has_floats else 'torch.uint8'}")
        self.stored.add(name)

    def item(self, entry: StackedEntry, part: str) -> Tensor:
        """Reads the part of an expert in the stacked tensor with this suffix. Raises ModelError if a file was cut."""
        name = f"{entry.stem}{part}"
        return self._files[name].read_item(name, entry.expert)


class StackedCodes:
    """The matrices of stacked experts that are in MXFP4."""

    def __init__(self, stacked: StackedExperts) -> None:
        self._stacked = stacked

    def names(self, name: str) -> list[str]:
        """Implements `CodeReader.names`."""
        entry = self._stacked.entries.get(name)
        has_codes = entry is not None and len(entry.shape) == 2 and f"{entry.stem}_blocks" in self._stacked.stored
        return [name] if has_codes else []

    def read(self, name: str, shape: tuple[int, ...], device: torch.device) -> Quantized:
        """Implements `CodeReader.read`."""
        entry = self._stacked.entries[name]
        columns, depth = entry.shape
        if device.type == "meta":
            codes = torch.empty(columns, depth, dtype=torch.uint8, device=device)
            scales = torch.empty(columns, -(-depth // GROUP), dtype=torch.bfloat16, device=device)
        else:
            blocks, exponents = (self._stacked.item(entry, part)[entry.columns] for part in ("_blocks", "_scales"))
            if (exponents == NAN).any():
                raise ModelError(f"tensor {entry.stem}_scales has a scale of {NAN}, which is NaN")
            whole = from_blocks(blocks, exponents)
            codes, scales = whole.codes[:, :depth].contiguous(), whole.scales
        return Quantized(codes=codes, bits=4, group=GROUP, block=GROUP, scales=scales, codebook=Codebook.E2M1)


def single_experts(
    tensor_to_file: Mapping[str, TensorFile], config: ModelConfig
) -> dict[str, TensorFile | StackedExperts]:
    """Splits stacked tensors into tensors of single experts. Raises ModelError for a missing or unlike tensor."""
    mixture, stacked = config.mixture, StackedExperts(tensor_to_file)
    if mixture is None or not mixture.names.is_stacked:
        return dict(tensor_to_file)
    hidden, width = config.hidden_size, mixture.intermediate_size
    parts = [f"model.layers.{layer}.{mixture.names.part}.experts" for layer in range(config.num_layers)]
    for part in parts:
        stacked.add(f"{part}.gate_up_proj", (mixture.num_experts, 2 * width, hidden))
        stacked.add(f"{part}.down_proj", (mixture.num_experts, hidden, width))
    others = {name: file for name, file in tensor_to_file.items() if name not in stacked.stored}
    return {**others, **dict.fromkeys(stacked.entries, stacked)}
