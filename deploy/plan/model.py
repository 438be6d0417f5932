"""The model to serve: the facts that a plan needs before any worker has loaded it."""

import hashlib
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.plan.config import ModelSettings
from engine.checkpoint.gguf import SUFFIX, require_gguf
from engine.checkpoint.json_fields import parse_object
from engine.checkpoint.pulled import MODELS
from text.model_file import read_regular
from text.template.template_processes import Template
from wire.errors import ConfigError, ModelError
from wire.kv_policy import Dropping, parse_kv_policy
from wire.layout import Window
from wire.sampling import DEFAULTS
from wire.served_model import ServedModel

if TYPE_CHECKING:
    import torch

    from engine.checkpoint.checkpoint import Checkpoint
    from engine.checkpoint.config import AttentionShape, ServedConfig

DEMO_MODEL = "demo-model"
MAX_CONFIG_BYTES = 1 << 20
MAX_SPLITS = 32
"""As kernels/attention/paged.py has it, whose import needs Triton."""
BYTES_OF_A_NUMBER = 4
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class DraftFacts:
    """A checked folder of a draft model, None without a draft, and the bytes of a block of its KV."""

    folder: str | None = None
    weight_bytes: int = 0
    block_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A checked model folder. `device` is cpu or cuda, `kernels` the backend that all workers use there.

    weight_bytes: bytes of weights in the kernels' format. draft: the decode workers' draft model, with as many pages as
    theirs. is_mapped: all workers of a node map one file of weights. row_bytes: memory of a row of a graph's steps.
    captured_tokens: the most prompt tokens of a graph's steps.
    """

    served: ServedModel
    device: str
    weight_bytes: int
    kernels: str = "auto"
    draft: DraftFacts = field(default_factory=DraftFacts)
    is_mapped: bool = False
    row_bytes: int = 0
    captured_tokens: int = 0

    @property
    def node_bytes(self) -> int:
        """Bytes of the weights that the workers of a node share."""
        return (self.weight_bytes + self.draft.weight_bytes) * self.is_mapped

    @property
    def context_bytes(self) -> int:
        """Bytes of the KV of one request that fills the context."""
        layout = self.served.layout
        return Window(layout).num_needed(self.served.max_context_len) * layout.block_bytes

    def worker_bytes(self, pool_bytes: int) -> int:
        """Sums a worker's private memory: pages of KV, its draft's pages, and weights that it does not share."""
        num_blocks = pool_bytes // self.served.layout.block_bytes
        weight_bytes = self.weight_bytes + self.draft.weight_bytes - self.node_bytes
        return weight_bytes + pool_bytes + num_blocks * self.draft.block_bytes


def require_folders(model: str | None, draft: str | None) -> None:
    """Raises ModelError for a path without a model or a draft, in milliseconds; does not check a hub's name."""
    for setting, path in (("", model), ("speculation.draft: ", draft)):
        try:
            if path is not None:
                _require_model(path)
        except ModelError as error:
            raise ModelError(f"{setting}{error.message}", **error.ids) from error


def _require_model(name: str) -> None:
    path = Path(os.path.expanduser(name))
    if path.is_file():
        require_gguf(path)
    elif os.path.lexists(path):
        parse_object(read_regular(path / "config.json", MAX_CONFIG_BYTES), "config.json")
    elif name in MODELS:
        MODELS[name].find()
    elif not _HUB_NAME.fullmatch(name):
        raise ModelError(f"{name[:64]} is no folder, GGUF file, name of `baton pull` or name on the hub")


def inspect_model(
    settings: ModelSettings, device: str, cpu_kernels: str = "auto", draft: str | None = None, proposer: str = "off"
) -> ModelFacts:
    """Finds, checks and hashes a model, and finds and checks its draft; does not hash unchanged files again.

    Blocks while it downloads or hashes. Raises ModelError for an unfit folder, ConfigError for settings that do not go
    with the model.
    """
    # torch takes a second to import, which the other commands need not wait for.
    import torch

    from engine.checkpoint.checkpoint import Checkpoint
    from engine.checkpoint.fingerprint import DigestCache
    from engine.checkpoint.hub import find_folder
    from engine.model.decoder import compute_dtype
    from engine.model.programs import captured_tokens
    from engine.model.weights import check_weights, count_bytes
    from engine.speculation.draft_folder import naming_the_draft, open_draft
    from kernels.backend import TRITON_EXACT
    from kernels.cpu.library import NoKernels
    from kernels.selection import select_backend

    checkpoint = Checkpoint(find_folder(settings.path or _demo_model()))
    check_weights(checkpoint)
    if not checkpoint.config.is_native and proposer != "off":
        name = checkpoint.config.architecture
        raise ConfigError(f"speculation.proposer: {name} runs by transformers' modules, with which nothing is guessed")
    tokenizer, template = checkpoint.load_tokenizer(), Template.load(checkpoint.folder)
    with naming_the_draft():  # before the weights are hashed, which takes long
        other = None if draft is None else open_draft(find_folder(draft), checkpoint)
        if other is not None:
            check_weights(other)
    kernels = cpu_kernels if device == "cpu" else "auto"
    try:
        kernels = kernels if settings.weights == "auto" else f"{cpu_kernels}-{settings.weights}"
        backend = select_backend(torch.device(device), kernels)
    except NoKernels as error:
        raise ConfigError(f"worker.cpu_kernels or model.weights: {error}") from error
    compute = compute_dtype(None if settings.dtype == "auto" else settings.dtype, checkpoint.config, backend)
    # Guesses are verified in chunks, whose attention sums in another order than that of decoding rows.
    guesses = proposer != "off" or other is not None
    if device != "cpu" and _has_one_order(settings.exact, guesses, checkpoint, compute):
        backend = select_backend(torch.device(device), TRITON_EXACT)
    dtype = str(compute).removeprefix("torch.")
    _require_droppable(settings, checkpoint.config.attention)
    config = checkpoint.config.keeping(parse_kv_policy(settings.kv_policy, settings.kv_dtype))
    is_exact = backend.name == TRITON_EXACT and not guesses
    name, *aliases = settings.served_names or (_name(settings.path),)
    served = ServedModel(
        name=name,
        folder=str(checkpoint.folder.resolve()),
        dtype=dtype,
        max_context_len=config.max_context_len,
        vocab_size=checkpoint.config.vocab_size,
        fingerprint_hex=checkpoint.fingerprint(dtype, backend.version, DigestCache.of_user()).hex(),
        layout_hex=config.kv_layout(dtype, settings.block_size, settings.kv_dtype).encode().hex(),
        text_hex=hashlib.sha256(f"{tokenizer.definition} {template}".encode()).hexdigest(),
        aliases=tuple(aliases),
        kv_policies=settings.kv_policies,
        sampling=DEFAULTS if settings.generation_config == "off" else checkpoint.sampling,
        max_chat_tokens=settings.max_chat_tokens,
        tool_format=settings.tool_format,
        reasoning_format=settings.reasoning_format,
        batch_invariant=config.is_native and (device == "cpu" or is_exact),
    )
    facts = ModelFacts(
        served=served,
        device=device,
        weight_bytes=count_bytes(checkpoint, compute, backend),
        kernels=backend.name,
        row_bytes=_row_bytes(checkpoint.config),
        captured_tokens=captured_tokens(checkpoint.native_config) if config.is_native else 0,
    )
    if other is None:
        return mapped_within(facts, settings.weight_cache_bytes * config.is_native)
    its_dtype = compute_dtype(None, other.config, backend)
    layout = other.config.kv_layout(str(its_dtype).removeprefix("torch."), settings.block_size)
    its_bytes = count_bytes(other, its_dtype, backend)
    draft_facts = DraftFacts(str(other.folder.resolve()), its_bytes, layout.block_bytes)
    return mapped_within(replace(facts, draft=draft_facts), settings.weight_cache_bytes)


def _row_bytes(config: "ServedConfig") -> int:
    """Counts the bytes of a decoding row of one layer: its states, and float32 attention of the most splits.

    Layers follow one another in the same memory. Models that are not native have no graphs.
    """
    from engine.checkpoint.config import ModelConfig

    if not isinstance(config, ModelConfig):
        return 0
    attention = config.attention
    splits = MAX_SPLITS * attention.num_heads * (attention.head_dim + 1)
    return BYTES_OF_A_NUMBER * (splits + 4 * config.hidden_size + 3 * config.intermediate_size)


def mapped_within(facts: ModelFacts, weight_cache_bytes: int) -> ModelFacts:
    """Returns the facts, with `is_mapped` if the cache of packed weights has room for model and draft."""
    num_bytes = facts.weight_bytes + facts.draft.weight_bytes
    return replace(facts, is_mapped=facts.device == "cpu" and num_bytes <= weight_cache_bytes)


def _has_one_order(exact: str, guesses: bool, checkpoint: "Checkpoint", compute: "torch.dtype") -> bool:
    """Tells whether a GPU has products of one order: "auto" where tokens are promised, and devices timed their kind."""
    import torch

    from kernels.tiles import is_quick_in_order

    if exact != "auto":
        return exact == "on"
    is_promised = checkpoint.config.is_native and not guesses
    return is_promised and is_quick_in_order() and compute is not torch.float32 and not checkpoint.is_quantized


def _require_droppable(settings: ModelSettings, attention: "AttentionShape") -> None:
    """Raises ConfigError for a policy that drops KV by attention, if the model cannot have it."""
    has_windows = any(window is not None for window in attention.windows)
    for text in settings.kv_policies:
        if has_windows and isinstance(parse_kv_policy(text), Dropping):
            raise ConfigError(f"model.kv_policy {text}: the model has windows, which drop KV by age: choose full")


def _demo_model() -> str:
    from demo_model import CHECKPOINT

    if not CHECKPOINT.is_dir():
        raise ConfigError("give a model: --model FOLDER, or --model OWNER/NAME of one on the hub")
    return str(CHECKPOINT)


def _name(path: str | None) -> str:
    if path is None:
        return DEMO_MODEL
    folder = Path(os.path.expanduser(path))
    return (folder if folder.is_file() else folder.resolve()).name.removesuffix(SUFFIX) if folder.exists() else path
