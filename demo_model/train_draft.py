"""The training of the demo model's draft, in minutes: `python -m demo_model.train_draft --out demo_model/draft`.

First on repeated random tokens, as the demo model; then on texts, with the demo model's next token as the target.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from demo_model import CHECKPOINT
from demo_model.batches import TrainingBatch, make_loops, make_repeats, make_texts
from demo_model.train import TrainingStage

LEARNING_RATE = 6e-3
WARM_UP_STEPS = 100
WINDOW = 64
REPORT_EVERY = 50


def make_mixture(rng: random.Random, tokenizer: PreTrainedTokenizerFast, num_rows: int, length: int) -> TrainingBatch:
    """Makes texts or, twice as often, repeated sentences, where guesses come true."""
    return rng.choice((make_texts, make_loops, make_loops))(rng, tokenizer, num_rows, length)


STAGES = (
    TrainingStage(make_repeats, (64,), 1024, 300),
    TrainingStage(make_mixture, (64, 128), 1024, 900),
    TrainingStage(make_mixture, (64, 128, 256, 384), 1024, 900),
)


def main() -> None:
    """Trains, and saves the draft and the record of the training. Its tokenizer is the demo model's."""
    args = _parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    target = LlamaForCausalLM.from_pretrained(CHECKPOINT).eval()
    draft = _make_draft(target.config)
    num_steps = sum(stage.num_steps for stage in STAGES)
    started = time.monotonic()
    optimizer = torch.optim.AdamW(draft.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_scale(step, num_steps))
    for step, batch in enumerate(_batches(random.Random(args.seed), tokenizer)):
        loss, share = _train_step(draft, target, optimizer, batch)
        schedule.step()
        if step % REPORT_EVERY == 0:
            minutes = (time.monotonic() - started) / 60
            print(f"step {step} loss {loss:.4f} agrees {share:.4f} minutes {minutes:.1f}", flush=True)
    _save(draft, args, (time.monotonic() - started) / 60)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _make_draft(target: LlamaConfig) -> MistralForCausalLM:
    """Makes a model of two layers, the fewest that learn the look-up; wider layers guess no better, and slower.

    Its windows are as long as repeated sentences need, so that a guess costs the same in any context.
    """
    config = MistralConfig(
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_position_embeddings,
        head_dim=target.head_dim,
        rope_parameters=target.rope_parameters,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=WINDOW,
    )
    return MistralForCausalLM(config)


def _learning_rate_scale(step: int, num_steps: int) -> float:
    """Returns the rate's factor: rises over the first steps, then 1, then falls to 0 over the last half."""
    return min(1.0, (step + 1) / WARM_UP_STEPS, 2 * (num_steps - step) / num_steps)


def _batches(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> Iterator[TrainingBatch]:
    for stage in STAGES:
        for _ in range(stage.num_steps):
            length = rng.choice(stage.lengths)
            yield stage.make_batch(rng, tokenizer, stage.tokens_per_step // length, length)


def _train_step(
    draft: MistralForCausalLM, target: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: TrainingBatch
) -> tuple[float, float]:
    """Updates the draft once; returns the loss before, and the share of tokens on which both models agree."""
    with torch.inference_mode():
        wanted = target(batch.token_ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    wanted = wanted.clone()
    logits = draft(batch.token_ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    weights = batch.weights[:, 1:].flatten()
    losses = functional.cross_entropy(logits, wanted.softmax(-1), reduction="none")
    loss = (losses * weights).sum() / weights.sum()
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    optimizer.step()
    agrees = (logits.argmax(-1) == wanted.argmax(-1)).float()
    return loss.item(), ((agrees * weights).sum() / weights.sum()).item()


def _save(draft: MistralForCausalLM, args: argparse.Namespace, minutes: float) -> None:
    draft.bfloat16().save_pretrained(args.out)
    config = json.loads((args.out / "config.json").read_text())
    # Weights lose nothing by half the bits; its KV would, and a fifth of its guesses with it.
    (args.out / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")
    record = {
        "command": f"python -m demo_model.train_draft --out {args.out} --seed {args.seed}",
        "minutes": round(minutes, 1),
        "torch": torch.__version__,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
