"""Perplexity of long real text under SmolLM2's file: Baton beside llama.cpp on the same file, and transformers.

    OMP_NUM_THREADS=1 python benchmarks/perplexity.py --tokens 20480

The text is that of benchmarks/real_text.py, cut into contexts that see nothing of one another; all tokens but the first
two of each count. transformers runs in float32 on the file's weights as the package gguf dequantizes them. Engines run
one after another: times are no figures here. Where llama.cpp cannot be installed, it is left out, and that is said.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks.machine import processor
from benchmarks.peer_installs import install_llamacpp, peer_env
from benchmarks.peer_process import EngineFailed, last_line, say
from benchmarks.peers import default_cache
from benchmarks.quality_backends import Backend, CutText, TransformersBackend
from benchmarks.real_model import plain_checkpoint, real_file
from benchmarks.real_text import NAME, articles
from benchmarks.result_file import write_result
from benchmarks.techniques import Technique
from engine.checkpoint.hub import find_folder
from kernels.selection import select_backend
from text.tokenizer import Tokenizer

Contexts = Sequence[Sequence[int]]
TIMEOUT_S = 1800.0
THEIRS = "llama.cpp, Q4_1"
REFERENCE = "transformers, float32"
NUM_UNCOUNTED = 2
"""Tokens of a context that do not count: the first, and the one that a prompt's only row brings."""


def make_contexts(tokenizer: Tokenizer, num_tokens: int, context_len: int) -> list[list[int]]:
    """Takes contexts from the articles in turns, whole ones, until there are so many tokens."""
    ids = [tokenizer.encode(text) for text in articles().values()]
    starts = range(0, max(map(len, ids)), context_len)
    contexts = (one[at : at + context_len] for at in starts for one in ids if at + context_len <= len(one))
    return [*islice(contexts, num_tokens // context_len)]


def score(backend: Backend, contexts: Contexts) -> float:
    """Sums the log-probabilities of the tokens that count."""
    return sum(backend.log_likelihood(CutText.cut(one, 1)) for one in contexts)


def score_by_baton(contexts: Contexts, folder: Path, dtype: str) -> float:
    num_blocks = 2 + 2 * max(map(len, contexts)) // 16
    return score(Technique("asked", "", dtype=dtype).load(folder, Path(), num_blocks=num_blocks), contexts)


def score_by_transformers(contexts: Contexts, folder: Path) -> float:
    return score(TransformersBackend(plain_checkpoint(folder)), contexts)


def score_by_llamacpp(contexts: Contexts, venv: Path) -> float:
    """Does as `score`, with llama.cpp on the file, in its own environment. Raises EngineFailed."""
    script = Path(__file__).with_name("llamacpp_scores.py")
    command = [str(install_llamacpp(venv)), "-P", str(script), str(real_file()), str(torch.get_num_threads())]
    asked = json.dumps({"contexts": contexts, "num_uncounted": NUM_UNCOUNTED})
    with TemporaryDirectory() as scratch:
        env = peer_env(torch.get_num_threads(), Path(scratch))
        done = subprocess.run(
            command, input=asked, capture_output=True, text=True, timeout=TIMEOUT_S, env=env, check=False
        )
    if done.returncode:
        raise EngineFailed(last_line(done.stderr))
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    options = parse(sys.argv[1:])
    torch.set_num_threads(options.threads)
    folder = find_folder(str(real_file()))
    contexts = make_contexts(Tokenizer.load(folder), options.tokens, options.context)
    num_counted = sum(len(one) - NUM_UNCOUNTED for one in contexts)
    plain, venv = default_cache() / "smollm2-float32", options.venvs.resolve() / "llamacpp"
    engines: dict[str, Callable[[], float]] = {
        "Baton, Q4_1, bfloat16": partial(score_by_baton, contexts, folder, "bfloat16"),
        "Baton, Q4_1, float32": partial(score_by_baton, contexts, folder, "float32"),
        THEIRS: partial(score_by_llamacpp, contexts, venv),
        REFERENCE: partial(score_by_transformers, contexts, plain),
    }
    figures: dict[str, float] = {}
    left_out = {}
    for name, run in engines.items():
        try:
            figures[name] = math.exp(-run() / num_counted)
            say(f"{name}: {figures[name]:.5f}")
        except EngineFailed as error:
            left_out[name] = str(error)
            say(f"{name} is left out: {error}")
    rows: dict[str, str] = {f"perplexity, {name}": f"{one:.4f}" for name, one in figures.items()}
    for base in (THEIRS, REFERENCE):
        ratios = {name: one / figures[base] - 1 for name, one in figures.items() if base in figures and name != base}
        rows |= {f"{name} over {base}": f"{100 * ratio:+.3f} %" for name, ratio in ratios.items()}
    rows |= {
        "tokens that count": f"{num_counted:,} in {len(contexts)} contexts of {options.context:,}",
        "text": f"{NAME}: {', '.join(articles())}",
        "machine": f"{processor()}, {select_backend(torch.device('cpu')).version}",
        **{f"left out: {name}": why for name, why in left_out.items()},
    }
    write_result(options.out, rows, figures)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--context", type=int, default=1024, help="tokens that see one another")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--venvs", type=Path, default=default_cache(), help="where llama.cpp's environment is, or is made"
    )
    parser.add_argument("--out", default="perplexity", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
