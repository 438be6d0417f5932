"""How good a model's answers are under given engine settings: recall, perplexity, and agreement with transformers.

    python benchmarks/quality.py --model demo_model/checkpoint --seed 0 --prompts 100 --json
    OMP_NUM_THREADS=1 python benchmarks/quality.py --write
    OMP_NUM_THREADS=1 python benchmarks/quality.py --real --write

Recall is the share of held-out prompts whose asked fact is answered right, by the prompt's length in tokens of the demo
model and by the third of the facts in which the asked one stands. Perplexity is that of the last third of held-out
English pages. Agreement is the share of held-out texts of both kinds whose greedy continuation is, token for token,
that of transformers in float32.

All of them count what follows a cut: a prompt ends before its question's last three tokens, an English page after two
thirds. What stands behind the cut is given to the engine as if it had been emitted, so that it, and each answer, runs
on what is kept of the prompt's KV.

--write measures every technique of benchmarks/techniques.py instead, keeps the figures in
benchmarks/results/quality.json, and makes docs/quality.md of them; with --real it does so on SmolLM2
(benchmarks/quality_real.py), and keeps each row at once.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.quality_backends import Backend, CutText, TransformersBackend
from benchmarks.quality_page import MAIN_LEN, PLAN, Row, add_rows, renew_page, write_page
from benchmarks.quality_real import ROWS, measure_real
from benchmarks.techniques import LOAD, TECHNIQUES, Technique, decode_in_turns
from demo_model import CHECKPOINT
from demo_model.corpus import Split
from demo_model.documents import make_document, make_english
from demo_model.recall import Depth, RecallPrompt, is_right, make_recall_prompt
from text.tokenizer import Tokenizer
from wire.layout import KV_DTYPES

_BATCH_SIZE = 25
_ANSWER_LEN = 4
_CUT_LEN = 3
_PAGE_LEN = 384
_OPENING_LEN = 256
_CONTINUATION_LEN = 32


def make_facts_page(rng: random.Random, split: Split, length: int) -> str:
    """Facts, and questions with their answers, as the demo model was trained on; now and then a page of English."""
    return "".join(part.text for part in make_document(rng, split, length))


PAGES = {"english": make_english, "facts": make_facts_page}


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
    """Measures a loaded model. Its questions depend on the seed and the number of prompts only."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer, seed: int, num_prompts: int) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._seed = seed
        self._num_prompts = num_prompts

    def recall_by_depth(self, length: int) -> dict[str, float]:
        return {depth.name.lower(): self.recall(length, depth) for depth in Depth}

    def recall(self, length: int, depth: Depth) -> float:
        """Share of right answers to prompts of up to `length` tokens."""
        prompts = self._recall_prompts(length, depth)
        answers = self._generate([self._question(prompt) for prompt in prompts], _ANSWER_LEN)
        texts = [self._tokenizer.decode(answer) for answer in answers]
        return sum(map(is_right, prompts, texts)) / len(prompts)

    def perplexity(self, kind: str = "english") -> float:
        """Computes the perplexity of held-out text of a kind, one of PAGES, by token."""
        pages = [CutText.cut(page, _OPENING_LEN) for page in self._pages(kind)]
        total = sum(self._backend.log_likelihood(page) for page in pages)
        return math.exp(-total / sum(len(page.given_ids) - 1 for page in pages))

    def continuations(self, lengths: Sequence[int]) -> list[list[int]]:
        """Continues English pages, and prompts of these lengths."""
        texts = [CutText.cut(page[: _OPENING_LEN + _CUT_LEN], _OPENING_LEN) for page in self._pages("english")]
        for length in lengths:
            texts += map(self._question, self._recall_prompts(length, Depth.MIDDLE))
        return self._generate(texts, _CONTINUATION_LEN)

    def load(self, num_texts: int, length: int) -> list[CutText]:
        """Makes different texts of one length, to decode behind."""
        rng = random.Random(f"{self._seed} load")
        pages = (make_english(rng, Split.HELD_OUT, length) for _ in range(num_texts))
        return [CutText.cut(self._tokenizer.encode(page)[:length], -_CUT_LEN) for page in pages]

    def _question(self, prompt: RecallPrompt) -> CutText:
        return CutText.cut(self._tokenizer.encode(prompt.text), -_CUT_LEN)

    def _recall_prompts(self, length: int, depth: Depth) -> list[RecallPrompt]:
        rng = random.Random(f"{self._seed} recall {length} {depth.name}")
        return [make_recall_prompt(rng, Split.HELD_OUT, length, depth) for _ in range(self._num_prompts)]

    def _pages(self, kind: str) -> list[list[int]]:
        rng = random.Random(f"{self._seed} {kind}")
        pages = (PAGES[kind](rng, Split.HELD_OUT, _PAGE_LEN) for _ in range(self._num_prompts))
        return [self._tokenizer.encode(page) for page in pages]

    def _generate(self, texts: Sequence[CutText], max_tokens: int) -> list[list[int]]:
        starts = range(0, len(texts), _BATCH_SIZE)
        batches = (self._backend.generate(texts[start : start + _BATCH_SIZE], max_tokens) for start in starts)
        return [answer for batch in batches for answer in batch]


def share_alike(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> float:
    """Divides the number of continuations that are the same as theirs by that of all."""
    return sum(one == other for one, other in zip(ours, theirs, strict=True)) / len(ours)


def measure(args: argparse.Namespace) -> Quality:
    """All figures of the model and engine settings that `args` name."""
    reference = TransformersBackend(args.model)
    asked = Technique("asked", "", dtype=args.dtype, kv_dtype=args.kv_dtype)
    sizes = args.device, args.block_size, args.num_blocks
    backend = reference if args.backend == "transformers" else asked.load(args.model, Path(), *sizes)
    tokenizer = Tokenizer.load(args.model)
    ours, theirs = (Meter(one, tokenizer, args.seed, args.prompts) for one in (backend, reference))
    by_depth = {length: ours.recall_by_depth(length) for length in args.lengths}
    return Quality(
        model=args.model.name,
        backend=args.backend,
        seed=args.seed,
        prompts_per_cell=args.prompts,
        recall=_over_depths(by_depth),
        recall_by_depth=by_depth,
        perplexity=ours.perplexity(),
        greedy_agreement=share_alike(ours.continuations(args.lengths), theirs.continuations(args.lengths)),
    )


def measure_all(args: argparse.Namespace) -> dict[str, Row]:
    """Measures the techniques that are asked for on the same texts, and their speed in turns if these are all."""
    asked = [one for one in TECHNIQUES if args.only in (None, one.name)]
    needed = [one for one in TECHNIQUES if one in asked or one.name in {each.over for each in asked}]
    with TemporaryDirectory() as scratch:
        backends = {one.name: one.load(args.model, Path(scratch), num_blocks=args.num_blocks) for one in needed}
    tokenizer = Tokenizer.load(args.model)
    meters = {
        name: {length: Meter(backend, tokenizer, args.seed, num) for length, num in PLAN.items()}
        for name, backend in backends.items()
    }
    texts = meters[asked[0].name][MAIN_LEN].load(LOAD.num_texts, LOAD.text_len)
    loads = decode_in_turns([backends[one.name] for one in asked], texts, LOAD.num_steps, LOAD.num_rounds)
    continued = {name: by_length[MAIN_LEN].continuations([MAIN_LEN]) for name, by_length in meters.items()}
    rows = {}
    for technique, load in zip(asked, loads, strict=True):
        print(f"{technique.name} ...", file=sys.stderr, flush=True)
        by_length = meters[technique.name]
        by_depth = {length: meter.recall_by_depth(length) for length, meter in by_length.items()}
        agreement = share_alike(continued[technique.name], continued[technique.over])
        perplexities = {kind: by_length[MAIN_LEN].perplexity(kind) for kind in PAGES}
        shown = load if args.only is None else replace(load, tokens_per_s=None)
        rows[technique.name] = Row(_over_depths(by_depth), by_depth, perplexities, agreement, shown)
    return rows


def _over_depths(by_depth: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
    return {length: sum(row.values()) / len(row) for length, row in by_depth.items()}


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
    if args.real:
        measure_real(args.only)
        renew_page()
        return
    if args.write:
        (write_page if args.only is None else add_rows)(measure_all(args))
        return
    quality = measure(args)
    as_json = json.dumps(asdict(quality), indent=2)
    if args.json is None:
        print(format_table(quality))
    elif args.json == Path("-"):
        print(as_json)
    else:
        args.json.write_text(as_json + "\n")


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
    parser.add_argument("--write", action="store_true", help="measure all techniques, and make docs/quality.md")
    parser.add_argument("--real", action="store_true", help="with --write: on SmolLM2, which is fetched")
    names = dict.fromkeys((*(one.name for one in TECHNIQUES), *ROWS))
    parser.add_argument("--only", choices=[*names], help="with --write: renew one technique's row, without its speed")
    args = parser.parse_args(arguments)
    if args.real and not args.write:
        parser.error("--real goes with --write")
    return args


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(int(length) for length in text.split(","))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
