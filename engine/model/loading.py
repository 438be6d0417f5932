"""Models of any architecture: the native decoder runs it, else transformers' modules, which are imported then alone."""

from pathlib import Path

import torch

from engine.checkpoint.checkpoint import is_native
from engine.model.batch import CausalModel
from engine.model.decoder import Decoder
from engine.model.weights import LoadWeights, load_private
from kernels.backend import Backend


def load_model(
    folder: Path,
    dtype: str | None,
    device: torch.device,
    block_size: int,
    backend: Backend | None = None,
    kv_dtype: str = "auto",
    kv_policy: str = "full",
    load_weights: LoadWeights = load_private,
) -> CausalModel:
    """Loads a checkpoint folder. Arguments and errors as of `Decoder.load`; modules have weights of their own."""
    if is_native(folder):
        return Decoder.load(folder, dtype, device, block_size, backend, kv_dtype, kv_policy, load_weights)
    from engine.model.modules_model import ModulesModel

    return ModulesModel.load(folder, dtype, device, block_size, backend, kv_dtype, kv_policy)
