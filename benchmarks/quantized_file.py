"""Makes a GGUF file of random weights, hidden 1,024, that llama.cpp's own quantizer wrote, for peers.py --gguf.

    python benchmarks/quantized_file.py Q4_K_M /tmp/q4_k_m.gguf

Its tokenizer is SmolLM2's. llama.cpp's environment is made the first time.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.peer_installs import INSTALLERS
from benchmarks.peers import default_cache
from benchmarks.real_model import real_file


def draw_checkpoint(folder: Path) -> None:
    """Saves a Llama of 322 million random weights in bfloat16; its rows are multiples of 256 values."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", help="a mixture of llama.cpp's, such as Q4_K_M or Q4_0")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    python = INSTALLERS["llamacpp"](default_cache() / "llamacpp")
    with TemporaryDirectory(dir=options.file.absolute().parent) as folder:
        draw_checkpoint(Path(folder))
        script = str(ROOT / "benchmarks" / "gguf_file.py")
        arguments = [folder, str(options.file), "bfloat16", str(real_file()), options.kind]
        subprocess.run([str(python), "-P", script, *arguments], check=True, timeout=1800)


if __name__ == "__main__":
    main()
