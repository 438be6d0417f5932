"""The training of the demo model: `python -m demo_model.train --out demo_model/checkpoint`.

First on repeated random tokens, until the model looks up the token after an earlier occurrence; then on texts, from
short to long.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo_model.batches import TrainingBatch, make_repeats, make_texts
from demo_model.tokenizer import train_tokenizer

_LEARNING_RATE = 4e-3
_WARM_UP_STEPS = 100
_NUM_AWAKE_LAYERS = 2
_REPORT_EVERY = 50

BatchMaker = Callable[[random.Random, PreTrainedTokenizerFast, int, int], TrainingBatch]


@dataclass(frozen=True)
class TrainingStage:
    """A stage: `num_steps` batches of about `tokens_per_step` tokens, each with a row length drawn from `lengths`."""

    make_batch: BatchMaker
    lengths: tuple[int, ...]
    tokens_per_step: int
    num_steps: int


STAGES = (
    TrainingStage(make_repeats, (64,), 2048, 900),
    TrainingStage(make_texts, (64,), 2048, 1200),
    TrainingStage(make_texts, (64, 128, 192), 3072, 1500),
    TrainingStage(make_texts, (64, 192, 320, 448), 4096, 1500),
    TrainingStage(make_texts, (64, 256, 512, 1024), 4096, 2000),
)


def main() -> None:
    """Trains, and saves the model, its tokenizer and the record of the training."""
    args = _parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(args.seed)
    model = _make_model(tokenizer)
    started = time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _learning_rate_scale)
    for step, batch in enumerate(_batches(random.Random(args.seed), tokenizer)):
        loss, share_right = _train_step(model, optimizer, batch)
        schedule.step()
        if step % _REPORT_EVERY == 0:
            length, minutes = batch.token_ids.shape[1], (time.monotonic() - started) / 60
            print(
                f"step {step} length {length} loss {loss:.4f} right {share_right:.4f} minutes {minutes:.1f}",
                flush=True,
            )
    _save(model, tokenizer, args, (time.monotonic() - started) / 60)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Makes a model whose upper layers add nothing at first.

    Two layers learn the look-up within a few hundred steps; four random layers had not after twice as many.
    """
    model = LlamaForCausalLM(_config(tokenizer))
    for layer in model.model.layers[_NUM_AWAKE_LAYERS:]:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def _config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.02,
    )


def _learning_rate_scale(step: int) -> float:
    """Returns the rate's factor: rises over the first steps, then 1, then falls to 0 over the last stage."""
    left = sum(stage.num_steps for stage in STAGES) - step
    return min(1.0, (step + 1) / _WARM_UP_STEPS, left / STAGES[-1].num_steps)


def _batches(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> Iterator[TrainingBatch]:
    for stage in STAGES:
        for _ in range(stage.num_steps):
            length = rng.choice(stage.lengths)
            yield stage.make_batch(rng, tokenizer, stage.tokens_per_step // length, length)


def _train_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: TrainingBatch) -> tuple[float, float]:
    """Updates the weights once; returns the loss before, and the share of fully weighted tokens guessed right."""
    logits = model(batch.token_ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    targets, weights = batch.token_ids[:, 1:].flatten(), batch.weights[:, 1:].flatten()
    losses = functional.cross_entropy(logits, targets, reduction="none")
    loss = (losses * weights).sum() / weights.sum()
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    counted = weights == 1.0
    return loss.item(), (logits.argmax(-1) == targets)[counted].float().mean().item()


def _save(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace, minutes: float
) -> None:
    """Writes the folder that transformers and Baton load."""
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    record = {
        "command": f"python -m demo_model.train --out demo_model/checkpoint --seed {args.seed}",
        "minutes": round(minutes, 1),
        "torch": torch.__version__,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
