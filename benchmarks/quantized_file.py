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
from benchmarks.peers import default_cache, make_model
from benchmarks.real_model import real_file

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
"""The shape of a model of 322 million weights; rows are multiples of 256 values."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", help="a mixture of llama.cpp's, such as Q4_K_M or Q4_0")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    python = INSTALLERS["llamacpp"](default_cache() / "llamacpp")
    with TemporaryDirectory(dir=options.file.absolute().parent) as folder:
        checkpoint = make_model(Path(folder, "checkpoint"), **SIZES)
        script = str(ROOT / "benchmarks" / "gguf_file.py")
        arguments = [str(checkpoint), str(options.file), "bfloat16", str(real_file()), options.kind]
        subprocess.run([str(python), "-P", script, *arguments], check=True, timeout=1800)


if __name__ == "__main__":
    main()
