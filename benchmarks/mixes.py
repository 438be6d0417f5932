"""Streams of drawn mixes that are not, bit by bit, what each of them is alone: there must be none.

    python benchmarks/mixes.py --mixes 5000

A mix has 17 streams of 64 tokens on small random models: steps at which they come, sizes of chunks, prefixes that were
served before, pages so few that streams are preempted, and sampling are drawn from the mix's seed. The tests of
tests/exactness draw the same way. A hundred seeds share their weights; each seed runs in every dtype.
"""

import argparse
import random
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.result_file import write_result
from engine.model.decoder import Decoder
from kernels.cpu.library import best_isa
from tests.exactness.test_one_mind import ARCHITECTURES, Crowd, Key, Mix, Tokens, prompt
from tests.harness.checkpoints import make_checkpoint
from tests.harness.engines import make_core, request
from tests.kernels.backends import make_backend
from wire.sampling import SamplingParams

NUM_STREAMS = 17
NUM_TOKENS = 64
MIXES_A_MODEL = 100
PARAMS = tuple(
    SamplingParams(temperature=temperature, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=logprobs)
    for temperature, seed in ((0.0, 0), (1.0, 3), (0.7, 11))
    for logprobs in (None, 5)
)


class Solo:
    """A model, and the tokens of each stream that it has served alone."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._tokens: dict[Key, Tokens] = {}

    def tokens(self, key: Key) -> Tokens:
        if key not in self._tokens:
            self._tokens[key] = Crowd(make_core(self.model)).run([request(prompt(key[0]), key[1])])[0]
        return self._tokens[key]

    def compare(self, mix: Mix) -> Counter[str]:
        """Runs a mix; counts streams, how many of them differ, preemptions, and tokens found in a cache."""
        crowd, outputs = mix.run(self.model)
        differ = [tokens != self.tokens(key) for key, tokens in zip(mix.keys, outputs, strict=True)]
        return Counter(
            mixes=1,
            streams=len(outputs),
            streams_that_differ=sum(differ),
            preemptions=crowd.num_preempted,
            prompt_tokens_found_in_a_cache=crowd.num_found,
        )


def compare(seeds: range, dtypes: list[str]) -> tuple[dict[str, Counter[str]], list[str]]:
    """Runs the mixes of seeds in each dtype; returns counts by dtype, and seeds of mixes with a stream that differs."""
    counts: dict[str, Counter[str]] = {dtype: Counter() for dtype in dtypes}
    failing: list[str] = []
    for number, group in groupby(seeds, lambda seed: seed // MIXES_A_MODEL):
        solos = make_models(number, dtypes)
        for seed in group:
            for dtype, solo in solos.items():
                count = solo.compare(Mix.drawn(random.Random(seed), NUM_STREAMS, PARAMS))
                counts[dtype].update(count)
                if count["streams_that_differ"]:
                    failing.append(f"{seed} {dtype}")
                    print(f"{failing[-1]}: {count['streams_that_differ']} streams differ", flush=True)
    return counts, failing


def make_models(number: int, dtypes: list[str]) -> dict[str, Solo]:
    """Makes the model of that number: an architecture with random weights, in each dtype."""
    with TemporaryDirectory() as name:
        arch, kv_policy = ARCHITECTURES[number % len(ARCHITECTURES)]
        folder = make_checkpoint(arch, Path(name), seed=number, initializer_range=0.1)
        backend = make_backend(best_isa())
        cpu = torch.device("cpu")
        models = {one: Decoder.load(folder, one, cpu, 16, backend, kv_policy=kv_policy) for one in dtypes}
        return {dtype: Solo(model) for dtype, model in models.items()}


def main() -> None:
    options = parse(sys.argv[1:])
    began_s = perf_counter()
    counts, failing = compare(range(options.seed, options.seed + options.mixes), options.dtype)
    figures = {name: sum(count[name] for count in counts.values()) for name in counts[options.dtype[0]]}
    ends = {"failing seeds": ", ".join(failing) or "none", "seconds": perf_counter() - began_s}
    write_result(options.out, figures | ends, {"by_dtype": counts, "kernels": best_isa()})
    sys.exit(bool(failing))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", type=int, default=5000, help="seeds, each a mix in every dtype (default 5000)")
    parser.add_argument("--seed", type=int, default=0, help="the first one (default 0)")
    parser.add_argument(
        "--dtype", type=lambda text: text.split(","), default=["float32", "bfloat16"], help="default float32,bfloat16"
    )
    parser.add_argument("--out", default="mixes", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
