"""Converts a checkpoint of the Llama architecture into llama.cpp's file, in the environment of llama.cpp.

    PYTHON -P benchmarks/gguf_file.py FOLDER FILE DTYPE
    PYTHON -P benchmarks/gguf_file.py FOLDER FILE DTYPE TOKENIZER_FILE Q4_K_M

With a fourth argument the file has the tokenizer of that GGUF file; with a fifth llama.cpp quantizes it to that type.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt


def write_gguf(folder: Path, path: Path, dtype: str, tokenizer: Path | None = None) -> None:
    """Converts a checkpoint of the Llama architecture. ValueError for any other.

    tokenizer: a GGUF file whose tokenizer is copied; the file has none without it.
    """
    import gguf

    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}
    if config["model_type"] != "llama" or rope.get("rope_type", "default") != "default":
        raise ValueError("only Llama with plain rotary embeddings is converted for llama.cpp")
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // num_heads)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if tokenizer is None:
        writer.add_tokenizer_model("none")
    else:
        for name, field in gguf.GGUFReader(tokenizer).fields.items():
            if name.startswith("tokenizer."):
                kinds = field.types
                writer.add_key_value(name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    stored = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype]
    for name, values in _read_tensors(folder):
        rows = {"q_proj": num_heads, "k_proj": num_kv_heads}.get(name.split(".")[-2])
        values = values if rows is None else interleave_halves(values, rows)
        kind = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else stored]
        name = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize_gguf(source: Path, path: Path, kind: str) -> None:
    """Lets llama.cpp quantize a file to one of its mixtures, such as Q4_K_M. ValueError where it refuses."""
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if llama_cpp.llama_model_quantize(bytes(source), bytes(path), settings):
        raise ValueError(f"llama.cpp does not quantize {source} to {kind}")


def interleave_halves(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Brings rows i and i + size / 2 of each head beside each other, where GGUF has pairs that rotate together."""
    halves = values.reshape(num_heads, 2, len(values) // num_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(values.shape)


def _read_tensors(folder: Path) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Reads safetensors files, as float32. Source: the format's page at huggingface.co/docs/safetensors."""
    for path in sorted(folder.glob("*.safetensors")):
        data = np.memmap(path, dtype=np.uint8, mode="r")
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:start].tobytes())
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                yield name, _as_float32(data[start + begin : start + end], entry["dtype"]).reshape(entry["shape"])


def _as_float32(raw: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "BF16":
        return (np.frombuffer(raw.tobytes(), np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw.tobytes(), {"F16": np.float16, "F32": np.float32}[dtype]).astype(np.float32)


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], *map(Path, sys.argv[4:5]))
    if len(sys.argv) > 5:
        whole = Path(sys.argv[2]).replace(Path(sys.argv[2] + ".whole"))
        quantize_gguf(whole, Path(sys.argv[2]), sys.argv[5])
        whole.unlink()
