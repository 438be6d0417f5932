"""Makes a checkpoint of a Llama's shape with random weights in bfloat16 and the demo model's tokenizer.

    python3 benchmarks/gpu_model.py /dev/shm/baton-8B

The folder appears under its name once all is written, so that others can wait for it; an existing folder stays.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from safetensors.torch import save_file
from torch import Tensor

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
LAYERS_A_FILE = 4


@dataclass(frozen=True)
class Sizes:
    """The sizes of a Llama."""

    name: str
    hidden: int
    mlp: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int

    @property
    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 16_384,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        }

    @property
    def num_weights(self) -> int:
        """Weights in the products of a token."""
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden * (width + self.num_heads * self.head_dim + 3 * self.mlp)
        return self.num_layers * layer + self.hidden * self.vocab

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's KV."""
        return 4 * self.num_layers * self.num_kv_heads * self.head_dim


SIZES = {
    one.name: one
    for one in (
        Sizes("8B", 4096, 14_336, 32, 32, 8, 128, 128_256),
        Sizes("1B", 2048, 8192, 16, 32, 8, 64, 128_256),
        Sizes("135M", 576, 1536, 30, 9, 3, 64, 49_152),
        Sizes("tiny", 256, 512, 4, 8, 2, 32, 1408),
    )
}


def make_model(folder: Path, sizes: Sizes) -> None:
    """Writes a checkpoint, on the GPU if there is one. Does nothing if the folder exists."""
    if folder.exists():
        return
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    index: dict[str, str] = {}
    with ThreadPoolExecutor(4) as writers:
        written = []
        for name, tensors in _files(sizes):
            index |= dict.fromkeys(tensors, name)
            written.append(writers.submit(save_file, tensors, part / name, {"format": "pt"}))
        for one in written:
            one.result()
    (part / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (part / "config.json").write_text(json.dumps(sizes.config))
    for name in TOKENIZER:
        shutil.copy(ROOT / "demo_model/checkpoint" / name, part / name)
    part.rename(folder)


def _files(sizes: Sizes) -> Iterator[tuple[str, dict[str, Tensor]]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    draw = torch.Generator(device).manual_seed(0)

    def drawn(columns: int, depth: int, scale: float = 0.02) -> Tensor:
        numbers = torch.randn(columns, depth, device=device, dtype=torch.bfloat16, generator=draw)
        return (numbers * scale).cpu()

    def ones() -> Tensor:
        return torch.ones(sizes.hidden, dtype=torch.bfloat16)

    hidden, queries, keys = sizes.hidden, sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    head = {
        "model.embed_tokens.weight": drawn(sizes.vocab, hidden, 0.1),
        "lm_head.weight": drawn(sizes.vocab, hidden, 0.05),
        "model.norm.weight": ones(),
    }
    yield "head.safetensors", head
    for first in range(0, sizes.num_layers, LAYERS_A_FILE):
        tensors: dict[str, Tensor] = {}
        for layer in range(first, min(sizes.num_layers, first + LAYERS_A_FILE)):
            own = {
                "self_attn.q_proj": drawn(queries, hidden),
                "self_attn.k_proj": drawn(keys, hidden),
                "self_attn.v_proj": drawn(keys, hidden),
                "self_attn.o_proj": drawn(hidden, queries),
                "mlp.gate_proj": drawn(sizes.mlp, hidden),
                "mlp.up_proj": drawn(sizes.mlp, hidden),
                "mlp.down_proj": drawn(hidden, sizes.mlp),
                "input_layernorm": ones(),
                "post_attention_layernorm": ones(),
            }
            tensors |= {f"model.layers.{layer}.{name}.weight": one for name, one in own.items()}
        yield f"layers-{first:02}.safetensors", tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", choices=SIZES, default="8B")
    options = parser.parse_args()
    make_model(options.folder, SIZES[options.sizes])
    print(f"made {options.folder}", flush=True)


if __name__ == "__main__":
    main()
