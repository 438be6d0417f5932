"""A KV cache beside none: transformers with `use_cache=False`, with its own cache, and Baton's engine."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
import transformers

from benchmarks.claim_families.engines import Asked, load, run_afresh, weights
from benchmarks.claim_families.finding import Chart, Family, Finding, Inputs, Report, Stopwatch, spread
from engine.schedule.continuous_batcher import ContinuousBatcher

HIDDEN_SIZE, NUM_LAYERS = 512, 6
PROMPT_LEN = 64
OUTPUT_LENS = (25, 50, 100, 200)
NUM_ROUNDS = 2
NUM_COUNTED = 100


class WithoutBaton:
    """transformers' model of the same weights, and a count of the tokens that it computes."""

    def __init__(self, folder: str) -> None:
        # Any: as in tests/harness/checkpoints.py, `generate` is declared for a protocol that no class claims.
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.num_computed = 0
        self._model.get_input_embeddings().register_forward_hook(self._count)

    def generate(self, prompt: tuple[int, ...], num_tokens: int, use_cache: bool) -> list[int]:
        """Continues a prompt greedily."""
        ids = torch.tensor([prompt])
        answer = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            use_cache=use_cache,
        )
        return [int(token) for token in answer[0, len(prompt) :]]

    def computations(self, num_tokens: int, use_cache: bool) -> int:
        """Counts the tokens that pass through the model for an answer to a prompt of one token."""
        self.num_computed = 0
        self.generate((32,), num_tokens, use_cache)
        return self.num_computed

    def _count(self, _module: object, inputs: tuple[torch.Tensor, ...], _output: object) -> None:
        self.num_computed += inputs[0].numel()


@contextmanager
def one_thread() -> Iterator[None]:
    """Gives torch one thread, as many as Baton's kernels have here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measure(inputs: Inputs) -> Report:
    model_of = weights(inputs, HIDDEN_SIZE, NUM_LAYERS)
    folder, words = model_of.folder, model_of.words
    with one_thread():
        model = load(folder, "float32")
        peer = WithoutBaton(str(folder))
        prompt = tuple(random.Random(0).choices(range(32, 256), k=PROMPT_LEN))
        watches: dict[int, Stopwatch] = {}
        for num_tokens in OUTPUT_LENS[: -1 if inputs.real else None]:
            ways: dict[str, Callable[[], object]] = {
                "none": partial(peer.generate, prompt, num_tokens, use_cache=False),
                "transformers": partial(peer.generate, prompt, num_tokens, use_cache=True),
                "Baton": partial(run_afresh, model, ContinuousBatcher(), [Asked(prompt, num_tokens)]),
            }
            ways["Baton"]()
            watches[num_tokens] = Stopwatch().take_turns(ways, NUM_ROUNDS)
        counts = [peer.computations(NUM_COUNTED, use_cache) for use_cache in (False, True)]
    setting = (
        f"{words[0].upper()}{words[1:]}, float32, one thread; one request, a prompt "
        f"of {PROMPT_LEN} tokens. Baseline: transformers on the same weights with `use_cache=False`. Baton's "
        "engine is faster for other reasons, too: transformers with its cache shows the part of the cache, by "
        "which the claim is judged, at the longest answer."
    )
    series: dict[str, list[tuple[float | str, float]]] = {
        name: [(num_tokens, median(watch.ratios("none", name))) for num_tokens, watch in watches.items()]
        for name in ("transformers", "Baton")
    }
    chart = Chart("Times faster than without a cache", "tokens generated", "x", series)
    return Report(setting, _findings(watches, counts), chart)


def _findings(watches: dict[int, Stopwatch], counts: list[int]) -> dict[str, Finding]:
    told = "; ".join(
        f"{num} tokens: {spread(watch.ratios('none', 'transformers'))}, Baton {spread(watch.ratios('none', 'Baton'))}"
        for num, watch in watches.items()
        if num >= NUM_COUNTED
    )
    longest = median(watches[max(watches)].ratios("none", "transformers"))
    computed = sum(PROMPT_LEN + at for at in range(NUM_COUNTED)) / (PROMPT_LEN + NUM_COUNTED - 1)
    without, cached = counts
    return {
        "cache_speed": Finding(
            f"{computed:.0f}x fewer tokens computed for {NUM_COUNTED} generated after {PROMPT_LEN}",
            told,
            longest >= 10,
            f"{max(watches)} tokens, the longest answer, by transformers",
        ),
        "cache_computations": Finding(
            f"1 + 2 + ... + {NUM_COUNTED} = {NUM_COUNTED * (NUM_COUNTED + 1) // 2:,}, and {NUM_COUNTED}",
            f"{without:,} and {cached:,} tokens passed through the model",
            (without, cached) == (NUM_COUNTED * (NUM_COUNTED + 1) // 2, NUM_COUNTED),
        ),
    }


FAMILY = Family(
    "A cache and none",
    {
        "cache_speed": "a KV cache makes generation 10-100x faster",
        "cache_computations": "5,000 token computations without a cache, 100 with it, for 100 generated",
    },
    measure,
)
