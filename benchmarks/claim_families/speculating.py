"""Speculation beside none, on the same weights: answers that repeat themselves, and answers that never do."""

import torch

from benchmarks.claim_families.finding import Family, Finding, Inputs, Report
from benchmarks.speculation import BLOCK_SIZE, DEMO_MODEL, Contender, compare, make_loads
from engine.checkpoint.checkpoint import Checkpoint
from engine.model.decoder import Decoder
from engine.speculation import NgramProposer, Speculator

BATCHES = (1, 4, 32)
CONTEXT_LEN, NUM_TOKENS, NUM_ROUNDS = 192, 192, 5
HARMLESS = 0.97
CLAIMS = {
    "speculation_speed": "speculation makes tokens 2-3x faster",
    "speculation_hurts": "speculation hurts at large batches, and where drafts are refused",
    "speculation_memory": "speculation takes 1.5-2x the memory",
}


def measure(_inputs: Inputs) -> Report:
    model = Decoder.load(DEMO_MODEL, None, torch.device("cpu"), BLOCK_SIZE)
    num_blocks = max(BATCHES) * (-(-(CONTEXT_LEN + NUM_TOKENS) // BLOCK_SIZE) + 1)
    contenders = {
        "none": Contender(model, num_blocks, Speculator),
        "n-gram": Contender(model, num_blocks, lambda: Speculator(NgramProposer())),
    }
    tokenizer = Checkpoint(DEMO_MODEL).load_tokenizer()
    loads = make_loads(tokenizer, model.vocab_size, CONTEXT_LEN, NUM_TOKENS, BATCHES)
    figures: dict[str, float] = {}
    for load in loads:
        figures |= compare(contenders, load, NUM_ROUNDS)
    gains = {load.name: figures[f"{load.name}: n-gram"] for load in loads}
    speed = gains[loads[0].name]
    accepted = figures[f"{loads[0].name}: n-gram, guesses accepted"]
    return Report(
        f"The demo model, one thread; prompts of {CONTEXT_LEN} tokens, answers of {NUM_TOKENS}; guesses by n-grams. "
        f"Baseline: the same engine without guesses; tokens are the same. Medians of {NUM_ROUNDS} rounds.",
        {
            "speculation_speed": Finding(
                "(1 - a^(k + 1)) / (1 - a) tokens a run, at acceptance a of k tokens",
                f"{speed:.3g}x for one answer that repeats itself, {accepted:.0%} of guesses accepted",
                speed >= 2,
            ),
            "speculation_hurts": Finding(
                "k + 1 rows a run: dear once a batch multiplies for longer than it reads",
                "; ".join(f"{gain:.3g}x at {name}" for name, gain in gains.items())
                + "; guesses are left out from 16 tokens a step on",
                min(gains.values()) < HARMLESS,
            ),
            "speculation_memory": Finding(
                "weights and KV of the draft model beside the target's: 1.01-1.1x for 1-10 %",
                "n-grams take neither weights nor KV; a draft model was not measured",
            ),
        },
    )


SPECULATIVE = Family("Speculation", CLAIMS, measure)
