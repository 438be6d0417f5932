"""Small GGUF models of each type, written with the package `gguf`, and the same weights as plain checkpoints."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from engine.checkpoint.gguf import TABLE_FILE, VERSION
from engine.checkpoint.gguf.blocks import TYPES, StoredTensor
from engine.checkpoint.gguf.table import dequantize
from tests.harness.checkpoints import byte_level_tokenizer, make_checkpoint

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Rows of all matrices are a multiple of 256 numbers, the block of Q4_K, Q5_K and Q6_K."""
SPREAD = 0.1
DRAWN = ("Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
"""The types that the package does not quantize to."""
BY_HAND = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe", "gpt_oss")
"""Model types whose tensors are named by the table below; others are named by the package."""
_JUDGED = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
MAX_LAYERS = 8
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

_ARCHITECTURES = {"mixtral": "llama", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
_ROUTERS = ("block_sparse_moe.gate", "mlp.gate", "mlp.router")
_EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}

Stored = NDArray[np.uint8]


def drawn_blocks(name: str, rows: int, columns: int, seed: int, spread: float = 1.0) -> Stored:
    """Draws stored rows of a type: any bits for codes, normal numbers for floats and half-precision scales.

    spread: the standard deviation of what they are dequantized to, about.
    """
    kind, random = TYPES[name], np.random.default_rng(seed)
    drawn = (spread * random.normal(size=(rows, columns))).astype(np.float32)
    match name:
        case "F32":
            return drawn.view(np.uint8)
        case "F16":
            return drawn.astype(np.float16).view(np.uint8)
        case "BF16":
            return np.ascontiguousarray(drawn.view(np.uint16)[:, 1::2]).view(np.uint8)
    blocks = random.integers(0, 256, (rows * columns // kind.numbers, kind.bytes), dtype=np.uint8)
    if name == "MXFP4":  # its first byte is an exponent
        blocks[:, 0] = random.integers(124, 127, len(blocks)) + round(math.log2(spread))
    halves = random.normal(size=(len(blocks), len(kind.halves)))
    for factor in (1.0, spread):
        for column, at in enumerate(kind.halves):
            blocks[:, at : at + 2] = (halves[:, column, None] * factor).astype(np.float16).view(np.uint8)
        halves /= dequantize(kind, blocks).std().item()
    return blocks.reshape(rows, -1)


def write_table(folder: Path, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Writes the table of one file's tensors into a folder."""
    rows = {
        name: {"type": one.kind.name, "shape": list(one.shape), "file": 0, "offset": one.offset, "heads": one.heads}
        for name, one in tensors.items()
    }
    files = [{"path": str(path), "bytes": path.stat().st_size}]
    (folder / TABLE_FILE).write_text(json.dumps({"version": VERSION, "files": files, "tensors": rows}))


def make_gguf(folder: Path, kind: str, arch: str = "llama-gqa", num_parts: int = 1, **overrides: Any) -> Path:
    """Writes a GGUF model with matrices of a type into `folder`, and into `folder/plain` the weights it stands for.

    Returns its first file. overrides: keys of the configuration of the architecture, of tests.harness.checkpoints.
    """
    plain = make_checkpoint(arch, folder / "plain", **{**SHAPE, **overrides})
    config = json.loads((plain / "config.json").read_text())
    weights, is_stacked = load_file(plain / "model.safetensors"), config["model_type"] == "gpt_oss"
    weights = _unstacked(weights) if is_stacked else weights
    tensors = longrope_factors(config)
    dequantized = {}
    for seed, (their_name, names) in enumerate(_their_names(config["model_type"], weights, is_stacked).items()):
        is_matrix = weights[names[0]].ndim == 2 and "ffn_gate_inp" not in their_name
        its_kind = kind if is_matrix else "F32"
        heads = _turned_heads(config, names[0])
        stored: list[Stored] = []
        for index, name in enumerate(names):
            weight = weights[name]
            stored.append(_stored(its_kind, _turn(weight, heads), seed + 1000 * index))
            values = gguf.dequantize(stored[-1], gguf.GGMLQuantizationType[its_kind]).astype(np.float32)
            dequantized[name] = turn_back(torch.from_numpy(values).reshape(weight.shape), heads)
        tensors[their_name] = (np.stack(stored) if "_exps" in their_name else stored[0], its_kind)
    dequantized = _stacked(dequantized) if is_stacked else dequantized
    save_file(dequantized, plain / "model.safetensors", {"format": "pt"})
    count = len(tensors)
    parts = [list(tensors)[count * part // num_parts : count * (part + 1) // num_parts] for part in range(num_parts)]
    paths = [folder / f"model-{part + 1:05}-of-{num_parts:05}.gguf" for part in range(num_parts)]
    paths = paths if num_parts > 1 else [folder / "model.gguf"]
    for index, (path, names) in enumerate(zip(paths, parts, strict=True)):
        written = {name: tensors[name] for name in names}
        write_gguf(path, config, written, split=(index, num_parts) if num_parts > 1 else None)
    return paths[0]


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, tuple[Stored, str]],
    split: tuple[int, int] | None = None,
    metadata: Mapping[str, Any] = {},
) -> None:
    """Writes a file of stored tensors with their types; `metadata` replaces keys, or takes out those of None."""
    arch = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    rope = config["rope_parameters"]
    experts = config.get("num_local_experts")
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    vocabulary = byte_level_tokenizer(config["vocab_size"]).get_vocab()
    values: dict[str, Any] = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.attention.key_length": config["head_dim"] if config.get("head_dim") else None,
        f"{arch}.expert_count": experts,
        f"{arch}.expert_used_count": config["num_experts_per_tok"] if experts else None,
        f"{arch}.expert_feed_forward_length": width if experts and arch != "llama" else None,
        f"{arch}.attention.sliding_window": config["sliding_window"] if arch == "gpt-oss" else None,
        f"{arch}.rope.freq_base": rope["rope_theta"],
        f"{arch}.rope.scaling.type": rope["rope_type"] if rope["rope_type"] in ("linear", "yarn") else None,
        f"{arch}.rope.scaling.factor": rope["factor"] if rope["rope_type"] in ("linear", "yarn") else None,
        f"{arch}.rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
        **{f"{arch}.{key}": value for key, value in _own_keys(config).items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": sorted(vocabulary, key=vocabulary.__getitem__),
        "tokenizer.ggml.token_type": [1] * len(vocabulary),
        **metadata,
    }
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        _add(writer, key, value)
    if split is not None:
        writer.add_uint16("split.no", split[0])
        writer.add_uint16("split.count", split[1])
    for name, (stored, kind) in tensors.items():
        writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama3_divisors(rope: Mapping[str, Any], head_dim: int) -> NDArray[np.float32]:
    """The tensor rope_freqs that llama.cpp's converter makes of Llama 3's scaling."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / head_dim)
        smooth = (rope["original_max_position_embeddings"] / wavelength - low) / (high - low)
        divisors.append(1 / ((1 - min(1, max(0, smooth))) / rope["factor"] + min(1, max(0, smooth))))
    return np.array(divisors, np.float32)


def _own_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for one architecture or two."""
    rope, head_dim = (
        config["rope_parameters"],
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
    )
    part = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    match config["model_type"]:
        case "granite":
            return {
                "embedding_scale": config["embedding_multiplier"],
                "attention.scale": config["attention_multiplier"],
                "residual_scale": config["residual_multiplier"],
                "logit_scale": config["logits_scaling"],
                "rope.dimension_count": part,
            }
        case "phi3":
            trained_len, stretch = config["original_max_position_embeddings"], 1.0
            if rope["rope_type"] == "longrope":
                stretch = config["max_position_embeddings"] / trained_len
            return {
                "rope.dimension_count": part,
                "rope.scaling.original_context_length": trained_len,
                "rope.scaling.attn_factor": math.sqrt(1 + math.log(stretch) / math.log(trained_len)),
                "attention.sliding_window": config["sliding_window"],
            }
        case "glm4" | "smollm3":
            return {"rope.dimension_count": part}
    return {}


def longrope_factors(config: Mapping[str, Any]) -> dict[str, tuple[Stored, str]]:
    """The tensors that llama.cpp's converter makes of LongRoPE; none for another scaling."""
    rope = config["rope_parameters"]
    kinds = ("short", "long") if rope["rope_type"] == "longrope" else ()
    return {
        f"rope_factors_{kind}.weight": (np.array(rope[f"{kind}_factor"], np.float32).view(np.uint8), "F32")
        for kind in kinds
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _stored(kind: str, weight: torch.Tensor, seed: int) -> Stored:
    rows, columns = (1, *weight.shape)[-2:]
    if kind in DRAWN:
        return drawn_blocks(kind, rows, columns, seed, SPREAD)
    quantized = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    return np.ascontiguousarray(quantized).view(np.uint8).reshape(*weight.shape[:-1], -1)


def _their_names(arch: str, weights: Mapping[str, torch.Tensor], is_gpt_oss: bool) -> dict[str, list[str]]:
    """Groups tensors, of which experts are in their order, under llama.cpp's names."""
    grouped: dict[str, list[str]] = {}
    by_expert = sorted(weights, key=lambda name: int(name.split(".")[-3]) if ".experts." in name else 0)
    for name in by_expert:
        theirs = _their_name(arch, name)
        theirs = theirs.replace("ffn_norm", "post_attention_norm") if is_gpt_oss else theirs
        grouped.setdefault(theirs, []).append(name)
    return grouped


def _their_name(arch: str, name: str) -> str:
    if arch not in BY_HAND:
        names = gguf.get_tensor_name_map(_JUDGED[arch], MAX_LAYERS)
        return str(names.get_name(name, try_suffixes=(".weight", ".bias")))
    stem, _, kind = name.rpartition(".")
    if kind == "sinks":
        return f"blk.{name.split('.')[2]}.attn_sinks.weight"
    if stem.startswith("model.layers."):
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        theirs = f"ffn_{_EXPERTS[part.split('.')[-1]]}_exps" if ".experts." in part else _NAMES.get(part)
        return f"blk.{layer}.{'ffn_gate_inp' if part in _ROUTERS else theirs}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def _unstacked(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Takes the stacked matrices and biases of gpt-oss apart, into those of single experts."""
    single: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        part, _, stem = name.rpartition(".")
        if not part.endswith(".experts"):
            single[name] = tensor
            continue
        kind = "bias" if stem.endswith("_bias") else "weight"
        matrices = {"gate_proj": 0, "up_proj": 1} if stem.startswith("gate_up") else {"down_proj": None}
        for expert, own in enumerate(tensor):
            rows = own if kind == "bias" else own.T
            for matrix, first in matrices.items():
                single[f"{part}.{expert}.{matrix}.{kind}"] = (rows if first is None else rows[first::2]).contiguous()
    return single


def _stacked(single: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Undoes `_unstacked`."""
    stacked = {name: tensor for name, tensor in single.items() if ".experts." not in name}
    parts = {name.partition(".experts.")[0] for name in single if ".experts." in name}
    for part in parts:
        count = sum(name.startswith(f"{part}.experts.") and name.endswith("down_proj.bias") for name in single)
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (
                torch.stack([single[f"{part}.experts.{expert}.{matrix}.{kind}"] for expert in range(count)])
                for matrix in ("gate_proj", "up_proj", "down_proj")
            )
            both = torch.stack((gate, up), 2).flatten(1, 2)
            for stem, tensor in (("gate_up_proj", both), ("down_proj", down)):
                whole = tensor.mT if kind == "weight" else tensor
                stacked[f"{part}.experts.{stem}{suffix}"] = whole.contiguous()
    return stacked


def _turned_heads(config: Mapping[str, Any], name: str) -> int:
    if config["model_type"] not in ("llama", "mixtral", "granite", "smollm3"):
        return 0
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in name else 0


def _turn(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Puts rows i and i + half of each head side by side, as llama.cpp's converter does."""
    if not heads:
        return weight
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


def turn_back(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes what llama.cpp's converter does to the rows of queries and keys; a copy of others."""
    if not heads:
        return weight.contiguous()
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def load_oracle(path: Path, folder: Path) -> Any:
    """Loads the weights as the package `gguf` reads and dequantizes them into transformers in float32.

    Undoes what llama.cpp's converter did: turned heads of `llama`, and 1 added to norms of Gemma.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ours = json.loads((folder / "tensors.json").read_text())["tensors"]
    names = {row["offset"]: name for name, row in ours.items()}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    heads = heads if config.model_type == "llama" else {}
    added = 1.0 if hasattr(config, "norm_offset") else 0.0
    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        name = names[tensor.data_offset]
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        values = values - added if values.ndim == 1 else values
        state[name] = turn_back(values, heads.get(name.split(".")[-2], 0))
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model.eval()
