"""Speculation beside none, on the same weights: answers that repeat themselves, and answers that never do."""

import torch

from benchmarks.claim_families.finding import Family, Finding, Inputs, Report
from benchmarks.speculation import BLOCK_SIZE, DEMO_MODEL, compare, make_contenders, make_loads, make_real_loads
from demo_model import DRAFT
from engine.checkpoint.checkpoint import Checkpoint
from engine.model.decoder import Decoder

BATCHES = (1, 4, 32)
CONTEXT_LEN, NUM_TOKENS, NUM_ROUNDS = 192, 192, 5
REAL_BATCHES, REAL_TOKENS = (1, 4), 64
HARMLESS = 0.97
CLAIMS = {
    "speculation_speed": "speculation makes tokens 2-3x faster",
    "speculation_hurts": "speculation hurts at large batches, and where drafts are refused",
}


def measure(inputs: Inputs) -> Report:
    folder = inputs.real or DEMO_MODEL
    model = Decoder.load(folder, None if inputs.real is None else "bfloat16", torch.device("cpu"), BLOCK_SIZE)
    num_blocks = max(BATCHES) * (-(-(CONTEXT_LEN + NUM_TOKENS) // BLOCK_SIZE) + 1)
    contenders = make_contenders(model, DRAFT if inputs.real is None else None, num_blocks)
    tokenizer = Checkpoint(folder).load_tokenizer()
    if inputs.real is None:
        made = make_loads(tokenizer, model.vocab_size, CONTEXT_LEN, NUM_TOKENS, BATCHES)
        loads = [load for load in made if "English" not in load.name]
        words = f"The demo model, one thread; prompts of {CONTEXT_LEN} tokens, answers of {NUM_TOKENS}; guesses by "
        words += "n-grams and by the demo's draft."
    else:
        loads = make_real_loads(tokenizer, CONTEXT_LEN, REAL_TOKENS, REAL_BATCHES)
        words = "SmolLM2-135M, its file dequantized, bf16, one thread; chats that ask for a function with one name "
        words += "changed, pieces of this repository's Python, chats that ask a question; greedy answers of "
        words += f"{REAL_TOKENS} tokens; guesses by n-grams."
    figures: dict[str, float] = {}
    for load in loads:
        figures |= compare(contenders, load, NUM_ROUNDS)
    proposers = [*contenders][1:]
    gains = {f"{load.name}, {name}": figures[f"{load.name}: {name}"] for load in loads for name in proposers}
    first = loads[0].name
    worst = min(gains, key=gains.__getitem__)
    best = max(proposers, key=lambda name: gains[f"{first}, {name}"])
    return Report(
        f"{words} Baseline: the same engine without guesses; tokens are the same. Medians of {NUM_ROUNDS} "
        "rounds, in an engine that goes on: guesses that lose time are left out.",
        {
            "speculation_speed": Finding(
                "(1 - a^(k + 1)) / (1 - a) tokens a run, at acceptance a of k tokens",
                f"{first}: "
                + ", ".join(
                    f"{gains[f'{first}, {name}']:.3g}x by {name}s, {figures[f'{first}: {name}, guesses accepted']:.0%} "
                    "of guesses accepted"
                    for name in proposers
                ),
                gains[f"{first}, {best}"] >= 2,
                f"{best}s",
            ),
            "speculation_hurts": Finding(
                "k + 1 rows a run: dear once a batch multiplies for longer than it reads",
                "; ".join(f"{gain:.3g}x at {name}" for name, gain in gains.items())
                + "; guesses are left out from 16 tokens a step on",
                gains[worst] < HARMLESS,
                f"{worst}, below {HARMLESS}"
                if gains[worst] < HARMLESS
                else f"none is below {HARMLESS}, as guesses are left out where they lose",
            ),
        },
    )


SPECULATIVE = Family("Speculation", CLAIMS, measure)
