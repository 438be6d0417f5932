"""The model to serve: the facts that a plan needs before any worker has loaded it."""

from dataclasses import dataclass
from pathlib import Path

from deploy.plan.config import ModelSettings
from router.config import ServedModel
from wire.errors import ConfigError

DEMO_MODEL = "demo-model"


@dataclass(frozen=True)
class ModelFacts:
    """A checked model folder. `device` is cpu or cuda, `kernels` the backend that all workers use there."""

    served: ServedModel
    device: str
    weight_bytes: int
    kernels: str = "auto"

    @property
    def context_bytes(self) -> int:
        """Bytes of the KV of one request that fills the context."""
        layout = self.served.layout
        return layout.num_blocks(self.served.max_context_len) * layout.block_bytes


def inspect_model(settings: ModelSettings, device: str, cpu_kernels: str = "auto") -> ModelFacts:
    """Finds, checks and hashes a model; reads no file again that has not changed since an earlier hashing.

    Blocks for as long as a download or the hashing takes. Raises ModelError for an unfit folder.
    """
    # torch takes a second to import, which the other commands need not wait for.
    import torch

    from engine.checkpoint.checkpoint import Checkpoint
    from engine.checkpoint.fingerprint import DigestCache, fingerprint
    from engine.checkpoint.hub import find_folder
    from engine.model.decoder import compute_dtype
    from engine.model.weights import check_weights
    from kernels.backend import select_backend
    from kernels.cpu.library import NoKernels

    checkpoint = Checkpoint(find_folder(settings.path or _demo_model()))
    check_weights(checkpoint)
    checkpoint.load_tokenizer()
    try:
        kernels = cpu_kernels if settings.weights == "auto" else f"{cpu_kernels}-{settings.weights}"
        backend = select_backend(torch.device(device), kernels)
    except NoKernels as error:
        raise ConfigError(f"worker.cpu_kernels or model.weights: {error}") from error
    asked = None if settings.dtype == "auto" else settings.dtype
    dtype = str(compute_dtype(asked, checkpoint.config, backend)).removeprefix("torch.")
    name, *aliases = settings.served_names or (_name(settings.path),)
    served = ServedModel(
        name=name,
        folder=str(checkpoint.folder.resolve()),
        dtype=dtype,
        max_context_len=checkpoint.config.max_context_len,
        vocab_size=checkpoint.config.vocab_size,
        fingerprint_hex=fingerprint(checkpoint.files, dtype, backend.version, DigestCache.of_user()).hex(),
        layout_hex=checkpoint.config.kv_layout(dtype, settings.block_size, settings.kv_dtype).encode().hex(),
        aliases=tuple(aliases),
    )
    weights = [file for file in checkpoint.files if file.suffix == ".safetensors"]
    return ModelFacts(served, device, sum(file.stat().st_size for file in weights), backend.name)


def _demo_model() -> str:
    from demo_model import CHECKPOINT

    if not CHECKPOINT.is_dir():
        raise ConfigError("give a model: --model FOLDER, or --model OWNER/NAME of one on the hub")
    return str(CHECKPOINT)


def _name(path: str | None) -> str:
    if path is None:
        return DEMO_MODEL
    folder = Path(path).expanduser()
    return folder.resolve().name if folder.exists() else path
