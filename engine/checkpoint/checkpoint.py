"""A model folder in Hugging Face's layout: config.json, generation_config.json, and one or more .safetensors files.

A folder made of a GGUF file has tensors.json in place of the .safetensors files (engine/checkpoint/gguf).

Nothing in it is ever executed: Python files, pickles (.bin, .pt) and `auto_map` are not read.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.config import ModelConfig, ServedConfig, parse_eos
from engine.checkpoint.families.table import FAMILIES, find_architecture
from engine.checkpoint.fingerprint import DigestCache, fingerprint
from engine.checkpoint.gguf import TABLE_FILE, VERSION
from engine.checkpoint.gguf.table import GgufCodes, GgufPart, read_table
from engine.checkpoint.json_fields import MAX_COUNT, JsonFields, parse_object
from engine.checkpoint.quantized.scheme import CodeReader, Scheme, parse_scheme
from engine.checkpoint.stacked_experts import StackedCodes, StackedExperts, single_experts
from engine.checkpoint.tensor_file import TensorEntry, TensorFile, is_finite
from engine.checkpoint.text_part import find_text_part, tensor_name, text_config
from kernels.quantized.matrix import Quantized
from text.model_file import read_regular
from text.template.template_processes import Template, render_end
from text.tokenizer import MAX_TOKENIZER_BYTES, Tokenizer, TokenizerConfig
from text.tokenizer_protocol import TokenKind
from wire.errors import InvalidRequest, ModelError, Unavailable
from wire.sampling import SamplingParams

logger = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 1 << 20
MAX_INDEX_BYTES = 1 << 25
SINGLE_FILE = "model.safetensors"
ONLY_SHARD = "model-00001-of-00001.safetensors"
"""The name of the only weight file, in a folder without an index."""
INDEX_FILE = "model.safetensors.index.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
ADVISED = ("temperature", "top_p", "min_p", "repetition_penalty")
"""Settings of sampling that are read from generation_config.json, beside top_k."""
PARTS = ("model.", "lm_head.")
_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*(?=\[)')
"""The field's name in tokenizer.json: a string of the vocabulary that spells it has its quotes escaped."""
RECOMPUTED = "rotary_emb.inv_freq"
"""Buffers in older files; they follow from config.json and are not read."""


class Checkpoint:
    """A model folder with checked configuration and weight headers. Weights are read one tensor at a time.

    values: the object in config.json. sampling: the settings that generation_config.json advises, over the defaults.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ModelError, with the reason, for a folder that cannot be served."""
        if not folder.is_dir():
            raise ModelError("the model folder does not exist, or is not a folder", folder=str(folder))
        self.folder = folder
        generation = _read_generation_config(folder)
        self.values = _read_values(folder)
        self.config, scheme = _read_config(folder, text_config(self.values), generation)
        self.sampling = _parse_sampling(generation, self.config.vocab_size)
        opened = _open_weights(folder, str if find_text_part(self.values) is None else tensor_name)
        self._weight_paths = sorted({file.path for file in opened.values()})
        files = {name: file for name, file in opened.items() if isinstance(file, TensorFile)}
        may_stack = files and isinstance(self.config, ModelConfig)
        self._tensor_to_file = single_experts(files, self.native_config) if may_stack else opened
        self._codes = _find_codes(self._tensor_to_file, scheme)
        self._unread = set(self._tensor_to_file)

    @property
    def native_config(self) -> ModelConfig:
        """The configuration of a native architecture."""
        assert isinstance(self.config, ModelConfig), "no native architecture"
        return self.config

    @property
    def says_tied(self) -> bool:
        """Whether config.json itself ties embeddings and head: neither a family's default does, nor a wrapper's field.

        Wrappers of a text part say true by default, beside heads of their own.
        """
        return self.values.get("tie_word_embeddings") is True and find_text_part(self.values) is None

    def __contains__(self, name: str) -> bool:
        return name in self._tensor_to_file or self.has_codes(name)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that distinguish this model: configuration, weights and, if there is one, tokenizer.json."""
        tokenizer = self.folder / TOKENIZER_FILE
        return (self.folder / "config.json", *self._weight_paths, *([tokenizer] if os.path.lexists(tokenizer) else []))

    def fingerprint(self, dtype: str, backend_version: str, cache: DigestCache) -> bytes:
        """Returns the model's fingerprint. It covers the rules for a GGUF file's tensors, and transformers' modules."""
        rules = f" gguf {VERSION}" if os.path.lexists(self.folder / TABLE_FILE) else ""
        rules += "" if self.config.is_native else f" transformers {version('transformers')}"
        return fingerprint(self.files, dtype, backend_version + rules, cache)

    @property
    def unread(self) -> frozenset[str]:
        """Names of the tensors not read yet."""
        return frozenset(self._unread)

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Reads and converts a tensor; to the device `meta` without its content.

        Raises ModelError if it is missing, of another shape or not of floats, or not finite in `dtype`.
        """
        if name not in self:
            raise ModelError(f"the weights lack the tensor {name}", folder=str(self.folder))
        file = self._tensor_to_file[name]
        entry = file.entries[name]
        if entry.shape != shape:
            raise ModelError(f"tensor {name} has shape {list(entry.shape)}, config.json makes it {list(shape)}")
        if isinstance(entry, TensorEntry) and (not entry.dtype.is_floating_point or entry.dtype.itemsize == 1):
            raise ModelError(f"tensor {name} is {entry.dtype}: quantized weights are not supported")
        self._unread.discard(name)
        if device.type == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        tensor = file.read(name, dtype).to(device)
        if not is_finite(tensor):
            raise ModelError(f"tensor {name} has NaN or infinity as {str(dtype).removeprefix('torch.')}")
        return tensor

    @property
    def floats(self) -> dict[str, TensorEntry]:
        """The tensors of floats in .safetensors files, by name."""
        found = {name: file.entries[name] for name, file in self._tensor_to_file.items()}
        return {
            name: one for name, one in found.items() if isinstance(one, TensorEntry) and one.dtype.is_floating_point
        }

    def read_floats(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Reads all tensors of floats into host memory, in a dtype. Raises the errors of `read`."""
        return {name: self.read(name, one.shape, dtype, torch.device("cpu")) for name, one in self.floats.items()}

    @property
    def is_quantized(self) -> bool:
        """Whether a matrix is quantized."""
        return any(self.has_codes(f"{name.rpartition('.')[0]}.weight") for name in self._tensor_to_file)

    def has_codes(self, name: str) -> bool:
        """Tells whether a tensor is quantized."""
        return bool(self._codes.names(name))

    def read_codes(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Quantized | None:
        """Reads a quantized tensor's codes; None for a tensor of floats. Device `meta` and errors as in `read`."""
        names = self._codes.names(name)
        if not names:
            return None
        self._unread.difference_update(names)
        codes = self._codes.read(name, shape, device)
        if device.type != "meta" and not codes.is_finite(dtype):
            raise ModelError(f"tensor {name} has NaN or infinity as {str(dtype).removeprefix('torch.')}")
        return codes.to(device)

    def refuse_unread(self) -> None:
        """Raises ModelError for an unread tensor of the decoder; warns of other tensors, such as further heads."""
        parts = [one for one in self._unread if one.startswith(PARTS) and not one.endswith(RECOMPUTED)]
        if parts:
            raise ModelError(
                f"the weights have {min(parts)[:128]}, which is no part of the model that config.json describes "
                f"({self.config.architecture} of {self.config.num_layers} layers)"
            )
        if self._unread:
            logger.warning("%d tensors are no part of the model: %s", len(self._unread), min(self._unread))

    def load_tokenizer(self) -> Tokenizer:
        """Reads the tokenizer. Raises ModelError for a malformed one, or for tokens that the model does not know."""
        tokenizer, vocab_size = Tokenizer.load(self.folder), self.config.vocab_size
        if tokenizer.vocab_size > vocab_size:
            raise ModelError(
                f"the tokenizer has a token {tokenizer.vocab_size - 1}, config.json a vocab_size of {vocab_size}: "
                "one of the two is of another model"
            )
        return tokenizer


TensorSource = TensorFile | GgufPart | StackedExperts


def _find_codes(tensor_to_file: Mapping[str, TensorSource], scheme: Scheme | None) -> CodeReader:
    parts = {name: file for name, file in tensor_to_file.items() if isinstance(file, GgufPart)}
    files = {name: file for name, file in tensor_to_file.items() if isinstance(file, TensorFile)}
    if stacked := next((one for one in tensor_to_file.values() if isinstance(one, StackedExperts)), None):
        return StackedCodes(stacked)
    return scheme.open(files) if scheme and not parts else GgufCodes(parts)


def _read_values(folder: Path) -> dict[str, Any]:
    return parse_object(read_regular(folder / "config.json", MAX_CONFIG_BYTES), "config.json")


def is_native(folder: Path) -> bool:
    """Tells whether the native decoder runs a model folder. Raises ModelError for a malformed config.json."""
    return find_architecture(JsonFields(text_config(_read_values(folder)), "config.json")) in FAMILIES


def parse_config(values: Mapping[str, Any]) -> ServedConfig:
    """Parses the object in config.json. Raises ModelError, with field or reason, for a model that is not served."""
    if find_architecture(fields := JsonFields(values, "config.json")) in FAMILIES:
        return ModelConfig.parse(values)
    from engine.checkpoint.modules.outline import Outline  # which imports transformers

    if "quantization_config" in fields:
        raise ModelError("config.json: quantization_config is read of native architectures alone")
    return Outline(values).config


def _read_config(folder: Path, values: Mapping[str, Any], generation: JsonFields) -> tuple[ServedConfig, Scheme | None]:
    if "auto_map" in values:
        logger.warning("config.json names code of its own (auto_map), which is ignored")
    config = parse_config(values)
    scheme = parse_scheme(JsonFields(values, "config.json"))
    named = [
        one
        for fields in (JsonFields(values, "config.json"), generation)
        for one in parse_eos(fields, config.vocab_size)
    ]
    if os.path.lexists(folder / TOKENIZER_FILE):
        named += [one for one in _find_end_ids(folder) if one < config.vocab_size]
        named = named or _read_end_off_template(folder)
    return replace(config, eos_token_ids=tuple(dict.fromkeys(named)) or config.eos_token_ids), scheme


def _find_end_ids(folder: Path) -> list[int]:
    """Finds the id of tokenizer_config.json's eos_token; loading the tokenizer would take several times longer."""
    end, content = TokenizerConfig.load(folder).end_token, read_regular(folder / TOKENIZER_FILE, MAX_TOKENIZER_BYTES)
    try:
        return [int(one["id"]) for one in _added_tokens(content) if one["content"] == end]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ModelError(f"{TOKENIZER_FILE}: not a tokenizer") from error


def _added_tokens(content: bytes) -> Any:
    """Reads the added tokens of a tokenizer.json; parsing its vocabulary, too, would take 0.2 s."""
    text = content.decode()
    if (found := _ADDED_TOKENS.search(text)) is None:
        return parse_object(content, TOKENIZER_FILE).get("added_tokens") or ()
    return json.JSONDecoder().raw_decode(text, found.end())[0]


def _read_end_off_template(folder: Path) -> list[int]:
    """Returns the special token that ends an assistant's last turn in the chat template, if there is one.

    Renders a conversation in a process of its own, which takes seconds.
    """
    if (template := Template.load(folder)) is None:
        return []
    try:
        behind = render_end(template)
    except (InvalidRequest, Unavailable):
        return []
    tokenizer = Tokenizer.load(folder)
    ends = {one for one in tokenizer.encode_rendered(behind) if tokenizer.kind(one) is TokenKind.SILENT}
    return [*ends] if len(ends) == 1 else []


def _read_generation_config(folder: Path) -> JsonFields:
    """Reads generation_config.json, empty where there is none."""
    path = folder / GENERATION_FILE
    data = read_regular(path, MAX_CONFIG_BYTES) if os.path.lexists(path) else b"{}"
    return JsonFields(parse_object(data, GENERATION_FILE), GENERATION_FILE)


def _parse_sampling(fields: JsonFields, vocab_size: int) -> SamplingParams:
    """Reads the sampling that the model's authors advise. Raises ModelError for a value out of its range."""
    given = {name: fields.number(name, -MAX_COUNT, MAX_COUNT) for name in ADVISED if name in fields}
    top_k = {"top_k": fields.count("top_k", least=-1)} if "top_k" in fields else {}
    try:
        (sampling := SamplingParams(**given, **top_k)).require_in_range(vocab_size)  # type: ignore[arg-type]
    except InvalidRequest as error:
        raise ModelError(f"{GENERATION_FILE}: {error.message}") from error
    return sampling


def _open_weights(folder: Path, rename: Callable[[str], str]) -> Mapping[str, TensorFile | GgufPart]:
    if os.path.lexists(folder / TABLE_FILE):
        return read_table(folder)
    if os.path.lexists(folder / INDEX_FILE) and not os.path.lexists(folder / SINGLE_FILE):
        return _open_shards(folder, rename)
    for name in (SINGLE_FILE, ONLY_SHARD):
        if os.path.lexists(folder / name):
            file = TensorFile(folder / name, rename)
            return dict.fromkeys(file.entries, file)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise ModelError("the weights are pickles (.bin, .pt), which are never read: convert them to safetensors")
    raise ModelError(f"the model folder has neither {SINGLE_FILE} nor {INDEX_FILE}", folder=str(folder))


def _open_shards(folder: Path, rename: Callable[[str], str]) -> dict[str, TensorFile]:
    weight_map = parse_object(read_regular(folder / INDEX_FILE, MAX_INDEX_BYTES), INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{INDEX_FILE} has no weight_map")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{INDEX_FILE} names {str(shard)[:64]}, which is no .safetensors file of the folder")
    shards = {shard: TensorFile(folder / shard, rename) for shard in sorted(set(weight_map.values()))}
    for tensor, shard in weight_map.items():
        if rename(tensor) not in shards[shard].entries:
            raise ModelError(f"{INDEX_FILE} places {tensor[:64]} in {shard[:64]}, which lacks it")
    return {rename(tensor): shards[shard] for tensor, shard in weight_map.items()}
