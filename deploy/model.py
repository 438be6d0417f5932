"""The model to be served, as far as it must be known before any worker has loaded it."""

from dataclasses import dataclass
from pathlib import Path

from deploy.config import ModelSettings
from deploy.sizing import ModelSize
from wire.errors import ConfigError
from wire.layout import KVLayout

DEMO_MODEL = "demo-model"


@dataclass(frozen=True)
class ModelFacts:
    """A checked model folder. `name` is what clients call it; `device` is cpu or cuda."""

    name: str
    folder: str
    device: str
    dtype: str
    max_context_len: int
    vocab_size: int
    fingerprint: bytes
    layout: KVLayout
    weight_bytes: int

    @property
    def size(self) -> ModelSize:
        return ModelSize(self.weight_bytes, self.layout.block_bytes, self.layout.block_size, self.max_context_len)


def inspect_model(settings: ModelSettings, device: str) -> ModelFacts:
    """Finds, checks and hashes a model; files that were hashed before and have not changed are not read again.

    Blocks for as long as a download or the hashing takes. Raises ModelError for a folder that cannot be served.
    """
    # torch takes a second to import, which the other commands need not wait for.
    import torch

    from engine.checkpoint.checkpoint import Checkpoint
    from engine.checkpoint.fingerprint import DigestCache, fingerprint
    from engine.checkpoint.hub import find_folder
    from engine.model.decoder import compute_dtype
    from kernels.backend import select_backend

    checkpoint = Checkpoint(find_folder(settings.path or _demo_model()))
    place = torch.device(device)
    asked = None if settings.dtype == "auto" else settings.dtype
    dtype = str(compute_dtype(asked, checkpoint.config, place)).removeprefix("torch.")
    layout = checkpoint.config.kv_layout(dtype, settings.block_size)
    return ModelFacts(
        name=_name(settings.path),
        folder=str(checkpoint.folder.resolve()),
        device=device,
        dtype=dtype,
        max_context_len=checkpoint.config.max_context_len,
        vocab_size=checkpoint.config.vocab_size,
        fingerprint=fingerprint(checkpoint.files, dtype, select_backend(place).version, DigestCache.of_user()),
        layout=layout,
        weight_bytes=sum(file.stat().st_size for file in checkpoint.files if file.suffix == ".safetensors"),
    )


def _demo_model() -> str:
    from demo_model import CHECKPOINT

    if not CHECKPOINT.is_dir():
        raise ConfigError("give a model: --model FOLDER, or --model OWNER/NAME of one on the hub")
    return str(CHECKPOINT)


def _name(path: str | None) -> str:
    """The folder's own name for a path, the whole of a name on the hub."""
    if path is None:
        return DEMO_MODEL
    folder = Path(path).expanduser()
    return folder.resolve().name if folder.exists() else path
