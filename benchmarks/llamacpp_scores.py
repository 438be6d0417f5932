"""Sums the log-probabilities of contexts' tokens with llama.cpp, in its environment.

PYTHON -P benchmarks/llamacpp_scores.py FILE NUM_THREADS < {"contexts": [[TOKEN, ...], ...], "num_uncounted": N}
"""

import json
import sys

import numpy as np


def main() -> None:
    import llama_cpp

    asked = json.load(sys.stdin)
    longest = max(map(len, asked["contexts"]))
    threads = int(sys.argv[2])
    model = llama_cpp.Llama(
        sys.argv[1],
        n_ctx=longest,
        n_batch=512,
        n_threads=threads,
        n_threads_batch=threads,
        logits_all=True,
        verbose=False,
    )
    total = 0.0
    for ids in asked["contexts"]:
        model.reset()
        model.eval(ids)
        first = asked["num_uncounted"] - 1
        logits = np.asarray(model.scores[first : len(ids) - 1], dtype=np.float64)
        highest = logits.max(1, keepdims=True)
        sums = np.log(np.exp(logits - highest).sum(1)) + highest[:, 0]
        total += float((logits[np.arange(len(logits)), ids[first + 1 :]] - sums).sum())
    print(total)


if __name__ == "__main__":
    main()
