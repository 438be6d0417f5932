"""How good a model's answers are under given engine settings: recall, perplexity, and agreement with transformers.

    python benchmarks/quality.py --model demo_model/checkpoint --seed 0 --prompts 100 --json

Recall is the share of held-out prompts whose asked fact is answered right, by the prompt's length in tokens of the demo
model and by the third of the facts in which the asked one stands. Perplexity is that of held-out English. Agreement is
the share of held-out prompts of both kinds whose greedy continuation is, token for token, that of transformers in
float32.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.quality_backends import Backend, EngineBackend, TransformersBackend
from demo_model import CHECKPOINT
from demo_model.corpus import Split
from demo_model.documents import make_english
from demo_model.recall import Depth, RecallPrompt, is_right, make_recall_prompt
from engine.engine import Engine
from text.tokenizer import Tokenizer
from wire.layout import KV_DTYPES

_BATCH_SIZE = 25
_ANSWER_LEN = 4
_ENGLISH_LEN = 128
_OPENING_LEN = 8
_CONTINUATION_LEN = 32


@dataclass(frozen=True)
class Quality:
    """`recall` by prompt length, `recall_by_depth` by prompt length and depth; all but `perplexity` are shares."""

    model: str
    backend: str
    seed: int
    prompts_per_cell: int
    recall: dict[int, float]
    recall_by_depth: dict[int, dict[str, float]]
    perplexity: float
    greedy_agreement: float


class Meter:
    """Measures a loaded model. What it asks depends on the seed and the number of prompts only."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer, seed: int, num_prompts: int) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._seed = seed
        self._num_prompts = num_prompts

    def recall(self, length: int, depth: Depth) -> float:
        """Share of right answers to prompts of up to `length` tokens."""
        prompts = self._recall_prompts(length, depth)
        answers = self._generate(self._backend, [self._encode(prompt.text) for prompt in prompts], _ANSWER_LEN)
        texts = [self._tokenizer.decode(answer) for answer in answers]
        return sum(map(is_right, prompts, texts)) / len(prompts)

    def perplexity(self) -> float:
        """Of held-out English, by token."""
        pages = [self._encode(page) for page in self._english()]
        total = sum(self._backend.log_likelihood(page) for page in pages)
        return math.exp(-total / sum(len(page) - 1 for page in pages))

    def agreement(self, reference: Backend, lengths: Sequence[int]) -> float:
        """Share of prompts that the reference continues with the same tokens."""
        prompts = [self._encode(page)[:_OPENING_LEN] for page in self._english()]
        for length in lengths:
            prompts += [self._encode(prompt.text) for prompt in self._recall_prompts(length, Depth.MIDDLE)]
        ours, theirs = (self._generate(backend, prompts, _CONTINUATION_LEN) for backend in (self._backend, reference))
        return sum(one == other for one, other in zip(ours, theirs, strict=True)) / len(prompts)

    def _recall_prompts(self, length: int, depth: Depth) -> list[RecallPrompt]:
        rng = random.Random(f"{self._seed} recall {length} {depth.name}")
        return [make_recall_prompt(rng, Split.HELD_OUT, length, depth) for _ in range(self._num_prompts)]

    def _english(self) -> list[str]:
        rng = random.Random(f"{self._seed} english")
        return [make_english(rng, Split.HELD_OUT, _ENGLISH_LEN) for _ in range(self._num_prompts)]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def _generate(self, backend: Backend, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        starts = range(0, len(prompts), _BATCH_SIZE)
        return [
            answer for start in starts for answer in backend.generate(prompts[start : start + _BATCH_SIZE], max_tokens)
        ]


def measure(args: argparse.Namespace) -> Quality:
    """All figures of the model and engine settings that `args` name."""
    reference = TransformersBackend(args.model)
    backend = reference if args.backend == "transformers" else _load_engine(args)
    meter = Meter(backend, Tokenizer.load(args.model), args.seed, args.prompts)
    by_depth = {length: {depth.name.lower(): meter.recall(length, depth) for depth in Depth} for length in args.lengths}
    return Quality(
        model=args.model.name,
        backend=args.backend,
        seed=args.seed,
        prompts_per_cell=args.prompts,
        recall={length: sum(row.values()) / len(row) for length, row in by_depth.items()},
        recall_by_depth=by_depth,
        perplexity=meter.perplexity(),
        greedy_agreement=meter.agreement(reference, args.lengths),
    )


def format_table(quality: Quality) -> str:
    """The recall by length and depth as a Markdown table, and the other figures below it."""
    depths = [depth.name.lower() for depth in Depth]
    lines = [
        f"| prompt tokens ({quality.backend}) | {' | '.join(depths)} | all |",
        "|---:|" + "---:|" * (len(depths) + 1),
    ]
    for length, by_depth in quality.recall_by_depth.items():
        cells = [*(by_depth[depth] for depth in depths), quality.recall[length]]
        lines.append(f"| {length} | {' | '.join(f'{cell:.1%}' for cell in cells)} |")
    figures = f"perplexity {quality.perplexity:.3f}, greedy agreement {quality.greedy_agreement:.1%}"
    return "\n".join([*lines, "", figures])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table or the JSON."""
    args = _parse_args(arguments)
    quality = measure(args)
    as_json = json.dumps(asdict(quality), indent=2)
    if args.json is None:
        print(format_table(quality))
    elif args.json == Path("-"):
        print(as_json)
    else:
        args.json.write_text(as_json + "\n")


def _load_engine(args: argparse.Namespace) -> EngineBackend:
    engine = Engine.load(
        str(args.model),
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        device=args.device,
        block_size=args.block_size,
        num_blocks=args.num_blocks,
    )
    return EngineBackend(engine)


def _parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="a model folder (default: the demo model)")
    parser.add_argument("--backend", choices=("baton", "transformers"), default="baton")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=100, help="prompts per length and depth (default: 100)")
    parser.add_argument("--lengths", type=_lengths, default=(64, 150, 300, 900), help="such as 64,150,300")
    parser.add_argument("--dtype", help="what Baton computes in (default: float32)")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto", help="what Baton keeps KV in (default: auto)")
    parser.add_argument("--device", default="cpu", help="where Baton computes (default: cpu)")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, default=2048)
    parser.add_argument("--json", type=Path, nargs="?", const=Path("-"), help="print JSON, or write it to this file")
    return parser.parse_args(arguments)


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(int(length) for length in text.split(","))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
