"""Tokens a second with speculation over without, on the same weights and requests, the engines in turns.

    python benchmarks/speculation.py --rounds 9
    python benchmarks/speculation.py --checkpoint /path/to/a/checkpoint --draft /path/to/its/draft --context 512
    python benchmarks/speculation.py --checkpoint ... --draft ... --code --batches 1 4   # code, and the draft alone

Prompts are a sentence again and again, which the demo model goes on repeating, an English page, which it goes on with,
or tokens that do not repeat, with answers at so high a temperature that they do not either. All engines must give the
same tokens, or the run ends.
"""

import argparse
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.result_file import write_result
from demo_model import DRAFT
from demo_model.corpus import Split, make_sentence
from demo_model.documents import make_english
from engine.checkpoint.checkpoint import Checkpoint
from engine.core import EngineCore
from engine.model.decoder import Decoder
from engine.request import EngineRequest
from engine.schedule.continuous_batcher import ContinuousBatcher
from engine.speculation.draft_proposer import DraftProposer
from engine.speculation.speculator import NgramProposer, Speculator
from kv_store.device_pool import DevicePool
from kv_store.transfers import NoStore
from text.tokenizer import Tokenizer
from wire.ids import AttemptId, NamespaceRoot
from wire.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
DEMO_MODEL = ROOT / "demo_model" / "checkpoint"
BLOCK_SIZE = 16
BATCHES = (1, 4, 8, 32)
_QUESTIONS = (
    "Why is the sky blue? Explain it to a child.",
    "What is the capital of France, and what can a tourist see there?",
    "Write a short letter to a friend about a week in the mountains.",
    "List ten uses of a paper clip.",
)
_FUNCTIONS = (
    "def total(rows):\n    count = 0\n    for row in rows:\n        count += len(row)\n    return count\n",
    "def longest(rows):\n    best = rows[0]\n    for row in rows:\n        best = max(best, row)\n    return best\n",
    "def transpose(rows):\n    return [[row[at] for row in rows] for at in range(len(rows[0]))]\n",
    "def mean(rows):\n    if not rows:\n        return 0.0\n    return sum(map(sum, rows)) / sum(map(len, rows))\n",
)
FLAT = 20.0
"""A temperature at which all tokens are nearly as likely."""


@dataclass(frozen=True)
class Load:
    """Requests that run together."""

    name: str
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams


@dataclass(frozen=True)
class Outcome:
    """Seconds of decoding, the tokens of each request, and the guesses that came true of all."""

    seconds: float
    outputs: dict[str, list[int]]
    num_guessed: int
    num_accepted: int

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.outputs.values())) / self.seconds


class Contender:
    """An engine that is made anew for each round, on weights that all share; it keeps what it learned of a load."""

    def __init__(self, model: Decoder, num_blocks: int, speculator: Callable[[], Speculator]) -> None:
        self._model = model
        self._pool_blocks = num_blocks
        self._speculators = defaultdict[str, Speculator](speculator)

    def run(self, load: Load) -> Outcome:
        """Times steps from the one after which all requests have a token."""
        pool = DevicePool(self._model.layout, self._pool_blocks, self._model.device)
        batcher = ContinuousBatcher(max_step_tokens=4096, max_running=len(load.prompts))
        core = EngineCore(self._model, pool, batcher, NoStore(), self._speculators[load.name])
        outputs: dict[str, list[int]] = {}
        for number, prompt in enumerate(load.prompts):
            attempt_id = AttemptId(str(number))
            outputs[attempt_id] = []
            core.add(
                EngineRequest(
                    attempt_id=attempt_id,
                    root=NamespaceRoot(bytes(32)),
                    prompt_ids=tuple(prompt),
                    sampling=load.sampling,
                )
            )
        before = 0
        began_s = time.perf_counter()
        while core.has_requests:
            output = core.step()
            for choice, token_id in zip(output.choices, output.token_ids, strict=True):
                outputs[choice.attempt_id].append(token_id)
            if not before and all(outputs.values()):
                before, began_s = sum(map(len, outputs.values())), time.perf_counter()
        seconds = time.perf_counter() - began_s
        stats = core.stats()
        share = 1 - before / sum(map(len, outputs.values()))
        return Outcome(seconds / share, outputs, stats.num_guessed_tokens, stats.num_accepted_tokens)


def make_contenders(model: Decoder, draft_folder: Path | None, num_blocks: int) -> dict[str, Contender]:
    """Makes an engine without guesses, one with n-grams, and one with a draft model if there is one."""
    contenders = {
        "none": Contender(model, num_blocks, Speculator),
        "n-gram": Contender(model, num_blocks, lambda: Speculator(NgramProposer(), clock=time.perf_counter)),
    }
    if draft_folder is None:
        return contenders
    proposer = DraftProposer(Decoder.load(draft_folder, None, model.device, BLOCK_SIZE), num_blocks)
    drafted = Contender(model, num_blocks, lambda: Speculator(proposer, clock=time.perf_counter))
    return {**contenders, "draft model": drafted}


def make_loads(
    tokenizer: Tokenizer, vocab_size: int, context_len: int, num_tokens: int, batches: Sequence[int]
) -> list[Load]:
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    flat = SamplingParams(temperature=FLAT, seed=1, max_tokens=num_tokens, ignore_eos=True)
    draw = random.Random(1)
    loads = []
    for batch in batches:
        sentences = [tokenizer.encode(f" {make_sentence(draw, Split.HELD_OUT)}") for _ in range(batch)]
        repeats = [[*islice(cycle(sentence), context_len)] for sentence in sentences]
        loads.append(Load(f"{batch} x text that repeats itself", repeats, greedy))
        pages = [tokenizer.encode(make_english(draw, Split.HELD_OUT, context_len)) for _ in range(batch)]
        loads.append(Load(f"{batch} x English", [page[:context_len] for page in pages], greedy))
        fresh = [draw.choices(range(1, vocab_size), k=context_len) for _ in range(batch)]
        loads.append(Load(f"{batch} x text that never repeats", fresh, flat))
    return loads


def make_real_loads(tokenizer: Tokenizer, context_len: int, num_tokens: int, batches: Sequence[int]) -> list[Load]:
    """Makes chats that ask for code again, code to go on with, and chats that ask a question, of a real model."""
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    files = [path.read_text() for path in sorted((ROOT / "engine" / "model").glob("*.py"))]
    codes = [tokenizer.encode(text[len(text) // 3 :])[:context_len] for text in files if len(text) > 3000]
    edits = [_chat(f"Write this code again, with the name `batch` in place of `rows`:\n{one}") for one in _FUNCTIONS]
    kinds = {
        "chat that asks for code again": [tokenizer.encode(one) for one in edits],
        "code to go on with": codes,
        "chat that asks a question": [tokenizer.encode(_chat(one)) for one in _QUESTIONS],
    }
    return [Load(f"{size} x {kind}", prompts[:size], greedy) for size in batches for kind, prompts in kinds.items()]


def _chat(text: str) -> str:
    """Frames a user's message as SmolLM2's template does, without its system message."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def compare(contenders: dict[str, Contender], load: Load, num_rounds: int) -> dict[str, float]:
    """Runs a load on all contenders in turns; returns the median ratio of each over the first, and its acceptance."""
    ratios: dict[str, list[float]] = {name: [] for name in contenders}
    outcomes: dict[str, Outcome] = {}
    for number in range(num_rounds + 1):
        order = [*contenders][:: 1 if number % 2 else -1]
        outcomes = {name: contenders[name].run(load) for name in order}
        first = outcomes[next(iter(contenders))]
        for name, outcome in outcomes.items():
            if outcome.outputs != first.outputs:
                raise SystemExit(f"{name} gives other tokens: {load.name}")
            if number:  # the first round only warms up
                ratios[name].append(outcome.tokens_per_s / first.tokens_per_s)
    figures = {}
    for name in [*contenders][1:]:
        outcome = outcomes[name]
        figures[f"{load.name}: {name}"] = median(ratios[name])
        figures[f"{load.name}: {name}, guesses accepted"] = outcome.num_accepted / max(1, outcome.num_guessed)
    return figures


def main() -> None:
    options = _parse(sys.argv[1:])
    torch.set_num_threads(options.threads)
    model = Decoder.load(options.checkpoint, options.dtype, torch.device("cpu"), BLOCK_SIZE)
    num_blocks = max(options.batches) * (-(-(options.context + options.tokens) // BLOCK_SIZE) + 1)
    contenders = make_contenders(model, options.draft, num_blocks)
    figures: dict[str, float] = {}
    tokenizer = Checkpoint(options.checkpoint).load_tokenizer()
    if options.code:
        contenders.pop("n-gram")
        loads = make_real_loads(tokenizer, options.context, options.tokens, options.batches)
        loads = [load for load in loads if "code to go on with" in load.name]
    else:
        loads = make_loads(tokenizer, model.vocab_size, options.context, options.tokens, options.batches)
    for load in loads:
        figures |= compare(contenders, load, options.rounds)
    write_result(options.out, figures, {})


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=DEMO_MODEL, help="a folder (default: the demo model)")
    parser.add_argument("--draft", type=Path, default=DRAFT, help="the draft's folder (default: the demo model's)")
    parser.add_argument("--dtype", help="what it computes in (default: its own)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--code", action="store_true", help="code of this repository as prompts, and no n-grams")
    parser.add_argument("--context", type=int, default=192, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=192, help="tokens of each answer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", default="speculation", help="name of the results in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
