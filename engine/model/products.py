"""Linear layers of transformers' modules as products of a backend."""

import math

import torch
from torch import Tensor, nn

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.modules.outline import Outline, matrix_of
from kernels.backend import Backend, Weight
from wire.errors import ModelError


class Product(nn.Module):
    """A linear layer with its matrix as a backend packs it, in place of a module of transformers.

    weight: empty, for code that asks a layer for its dtype.
    """

    def __init__(self, backend: Backend, weight: Weight, bias: Tensor | None) -> None:
        super().__init__()
        self.packed = weight
        self.weight = torch.empty(0, dtype=weight.dtype)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._backend = backend

    def forward(self, states: Tensor) -> Tensor:
        rows = states.reshape(-1, self.packed.depth).contiguous()
        return self._backend.linear(rows, self.packed, self.bias).view(*states.shape[:-1], self.packed.columns)


def pack_products(model: nn.Module, backend: Backend, device: torch.device) -> None:
    """Puts a `Product` in place of each linear layer, in place; frees its matrix before it packs the next."""
    for name, module in [*model.named_modules()]:
        if (matrix := matrix_of(module)) is not None:
            weight = backend.pack(matrix.detach().to(device))
            model.set_submodule(name, Product(backend, weight, module.bias))


def check_numbers(checkpoint: Checkpoint, outline: Outline) -> None:
    """Raises ModelError if weights have fewer numbers than the model of config.json; reads no content."""
    needed = sum(one.numel() for one in outline.model.parameters())
    if needed > (found := sum(math.prod(one.shape) for one in checkpoint.floats.values())):
        raise ModelError(f"the weights have {found} numbers, config.json makes a model of {needed}: some are missing")


def count_module_bytes(checkpoint: Checkpoint, dtype: torch.dtype, backend: Backend) -> int:
    """Counts the bytes of a model's tensors, matrices as a backend keeps them; reads no content."""
    model = Outline(checkpoint.values).model.to(dtype)
    pack_products(model, backend, torch.device("meta"))
    products = sum(one.packed.data.nbytes for one in model.modules() if isinstance(one, Product))
    return products + sum(one.nbytes for one in model.parameters())
