"""The cost of a schema: tokens a second with one over without, text that it forces guessed or not, and its first token.

    OMP_NUM_THREADS=1 python benchmarks/structured_speed.py --model smollm2
    OMP_NUM_THREADS=1 python benchmarks/structured_speed.py --hostile

Engines run in turns on the same weights and requests; an answer without a schema has as many tokens as one with. With
--hostile a grammar of each kind is built and answered beside eight free streams, whose gaps are compared with gaps of
a run beside a request without a grammar.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.machine import has_avx512, processor
from benchmarks.result_file import write_result
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.hub import find_folder
from engine.core import EngineCore
from engine.events import Failed
from engine.grammar.grammars import Grammars
from engine.model.decoder import Decoder
from engine.request import EngineRequest
from engine.schedule.continuous_batcher import ContinuousBatcher
from engine.speculation.speculator import Speculator
from kv_store.device_pool import DevicePool
from kv_store.transfers import NoStore
from text.tokenizer import Tokenizer
from wire.errors import BatonError
from wire.ids import AttemptId, NamespaceRoot
from wire.sampling import FormatKind, ResponseFormat, SamplingParams

DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo_model" / "checkpoint"
BLOCK_SIZE = 16
ROOT = NamespaceRoot(bytes(32))
PROMPT_LEN = 64
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 8, "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 3, "maxItems": 6},
        "story": {"type": "string", "minLength": 200, "maxLength": 400},
    },
    "required": ["name", "age", "tags", "story"],
    "additionalProperties": False,
}
NUM_STREAMS = 8


@dataclass(frozen=True)
class Bench:
    """A model, its tokenizer, and an engine's pages for `num_running` requests."""

    model: Decoder
    tokenizer: Tokenizer
    num_running: int
    max_len: int

    def core(self, guesses: bool) -> EngineCore:
        """Makes an engine; without guesses no text that a grammar forces is guessed."""
        num_blocks = (self.num_running + 1) * (-(-self.max_len // BLOCK_SIZE) + 1)
        pool = DevicePool(self.model.layout, num_blocks, self.model.device)
        speculator = Speculator(clock=time.perf_counter) if guesses else Speculator(max_draft_len=0)
        return EngineCore(self.model, pool, ContinuousBatcher(max_running=self.num_running + 1), NoStore(), speculator)

    def grammars(self) -> Grammars:
        return Grammars(lambda: self.tokenizer.definition, self.model.vocab_size, self.model.eos_token_ids)

    def request(self, number: int, sampling: SamplingParams) -> EngineRequest:
        prompt = self.tokenizer.encode(f"{number}: tell of somebody, as JSON. " * 20)[:PROMPT_LEN]
        return EngineRequest(attempt_id=AttemptId(str(number)), root=ROOT, prompt_ids=tuple(prompt), sampling=sampling)


@dataclass(frozen=True)
class Timed:
    """A run of requests: seconds of decoding, steps, and tokens of each request."""

    seconds: float
    num_steps: int
    outputs: Mapping[str, Sequence[int]]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.outputs.values())) / self.seconds


def decode(core: EngineCore, requests: Sequence[EngineRequest]) -> Timed:
    """Times the steps after the one that gave the last request its first token."""
    outputs: dict[str, list[int]] = {one.attempt_id: [] for one in requests}
    for one in requests:
        core.add(one)
    before, num_steps, began_s = 0, 0, time.perf_counter()
    while core.has_requests:
        output = core.step()
        num_steps += 1
        for choice, token_id in zip(output.choices, output.token_ids, strict=True):
            outputs[choice.attempt_id].append(token_id)
        if not before and all(outputs.values()):
            before, num_steps, began_s = sum(map(len, outputs.values())), 0, time.perf_counter()
    share = 1 - before / sum(map(len, outputs.values()))
    return Timed((time.perf_counter() - began_s) / share, num_steps, outputs)


def compare(bench: Bench, num_tokens: int, num_rounds: int) -> dict[str, float]:
    """Measures free answers, ones in a schema, and ones whose forced text is guessed, in turns."""
    schema = ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps(PERSON))
    free = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    held = SamplingParams(temperature=0.0, max_tokens=num_tokens, response_format=schema)
    grammars, numbers = bench.grammars(), range(bench.num_running)
    ratios: dict[str, list[float]] = {"with a schema": [], "with a schema, forced text guessed": []}
    steps = [0.0, 0.0]
    for round_number in range(num_rounds + 1):
        plain = decode(bench.core(False), [grammars.prepare(bench.request(one, held)) for one in numbers])
        guessed = decode(bench.core(True), [grammars.prepare(bench.request(one, held)) for one in numbers])
        if guessed.outputs != plain.outputs:
            raise SystemExit("guesses change tokens")
        lengths = [len(one) for one in plain.outputs.values()]
        without = decode(
            bench.core(False),
            [
                bench.request(one, replace(free, max_tokens=length))
                for one, length in zip(numbers, lengths, strict=True)
            ],
        )
        if round_number:  # the first round only warms up
            for name, one in zip(ratios, (plain, guessed), strict=True):
                ratios[name].append(one.tokens_per_s / without.tokens_per_s)
            steps = [float(guessed.num_steps), float(plain.num_steps)]
    figures = {f"{bench.num_running} requests: tokens/s {name} / without": median(one) for name, one in ratios.items()}
    return figures | {f"{bench.num_running} requests: steps, forced text guessed / not": steps[0] / steps[1]}


def first_tokens(bench: Bench, num_rounds: int) -> dict[str, float]:
    """Measures the time to a first token with a schema never seen, beside the same without."""
    grammars, waits = bench.grammars(), dict[bool, list[float]]({True: [], False: []})
    for number in range(2 * num_rounds + 2):
        is_held = number % 2 == 0
        properties = {**PERSON["properties"], f"field{number}": {"type": "string", "pattern": f"^a{number}[a-z]{{3}}$"}}  # type: ignore[dict-item]
        source = json.dumps({**PERSON, "properties": properties})
        given = ResponseFormat(FormatKind.JSON_SCHEMA, source) if is_held else None
        core = bench.core(False)
        began_s = time.perf_counter()
        core.add(grammars.prepare(bench.request(number, SamplingParams(max_tokens=1, response_format=given))))
        while core.has_requests:
            core.step()
        if number > 1:
            waits[is_held].append(1e3 * (time.perf_counter() - began_s))
    return {"TTFT with a schema never seen, ms more than without": median(waits[True]) - median(waits[False])}


def hostile_formats() -> dict[str, ResponseFormat]:
    """Returns grammars that cost a lot, by kind."""
    deep: dict[str, object] = {"type": "integer"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"], "additionalProperties": False}
    wide = {f"p{number}": {"type": "string"} for number in range(1500)}
    sources = {
        "deep": (FormatKind.JSON_SCHEMA, json.dumps(deep)),
        "1,500 optional properties": (FormatKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": wide})),
        "exponential": (
            FormatKind.LARK,
            "\n".join(["start: r0", *(f"r{n}: r{n + 1} r{n + 1}" for n in range(30)), 'r30: "a"?']),
        ),
        "ambiguous": (FormatKind.LARK, 'start: s\ns: s s | s s s | "a" | "b"'),
        "left-recursive": (FormatKind.LARK, 'start: e\ne: e "+" e | e "*" e | /[0-9a-z ]/'),
        "counted regex": (FormatKind.REGEX, "([a-z ]{0,400}[0-9]{0,400}){0,200}"),
        "unicode classes": (FormatKind.REGEX, r"(\p{L}|\p{N}|\p{P}|\p{Z}){50,900}"),
        "(a*)*b": (FormatKind.REGEX, "(([a-z ]*)*)*b"),
        "intersection": (
            FormatKind.LARK,
            "start: T\nT: /(.|\\n){0,300}[abc](.|\\n){0,20}/ & /[^x]*(.|\\n){0,30}e(.|\\n){12}/",
        ),
        "64 KB of words": (FormatKind.REGEX, "|".join(f"w{number}x" for number in range(9000))),
        "1 MB of words, past the service's 64 KB": (FormatKind.REGEX, "|".join(f"w{n}x" for n in range(140_000))),
    }
    return {name: ResponseFormat(kind, source) for name, (kind, source) in sources.items()}


def p99_gap_ms(bench: Bench, given: ResponseFormat | None, num_tokens: int) -> tuple[float, str]:
    """Decodes eight free streams; a request in a format arrives again and again. Returns their p99 gap and its fate."""
    core, grammars, fate = bench.core(True), bench.grammars(), "answers"
    free = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    held = SamplingParams(temperature=1.0, seed=1, max_tokens=64, response_format=given)
    for number in range(NUM_STREAMS):
        core.add(bench.request(number, free))
    arrivals, gaps, beside, number = dict[str, float](), list[float](), "", NUM_STREAMS
    with ThreadPoolExecutor(1) as thread:
        prepared = None
        while any(str(one) in core.attempts for one in range(NUM_STREAMS)):
            if prepared is None and not beside:
                number += 1
                prepared = thread.submit(grammars.prepare, bench.request(number, held))
            if prepared is not None and prepared.done():
                try:
                    core.add(prepared.result())
                    beside = str(number)
                except BatonError as error:
                    fate = f"refused: {error.message[:60]}"
                prepared = None
            output = core.step()
            now_s = time.perf_counter()
            for event in output.events:
                if isinstance(event, Failed):
                    fate = f"ended: {event.error.message[:60]}"
            for choice in output.choices:
                if int(choice.attempt_id) < NUM_STREAMS:
                    if choice.attempt_id in arrivals:
                        gaps.append(now_s - arrivals[choice.attempt_id])
                    arrivals[choice.attempt_id] = now_s
            if beside not in core.attempts:
                beside = ""
    return 1e3 * float(np.quantile(gaps, 0.99)), fate


def hostile(bench: Bench, num_tokens: int, num_rounds: int) -> tuple[dict[str, float], list[list[object]]]:
    """Measures the gaps of streams beside each hostile grammar, over the gaps beside a free request, in turns."""
    p99_gap_ms(bench, None, num_tokens)
    table: list[list[object]] = [["grammar", "p99 gap of streams / beside a free request", "the request itself"]]
    for name, given in hostile_formats().items():
        pairs = [(p99_gap_ms(bench, None, num_tokens), p99_gap_ms(bench, given, num_tokens)) for _ in range(num_rounds)]
        ratio = median(beside[0] / alone[0] for alone, beside in pairs)
        table.append([name, ratio, pairs[-1][1][1]])
        print(table[-1], flush=True)
    return {"worst p99 ratio": max(float(str(row[1])) for row in table[1:])}, table


def main() -> None:
    options = _parse(sys.argv[1:])
    torch.set_num_threads(options.threads)
    folder = find_folder(str(options.model))
    model = Decoder.load(folder, None, torch.device("cpu"), BLOCK_SIZE)
    tokenizer = Checkpoint(folder).load_tokenizer()

    def bench(num_running: int) -> Bench:
        return Bench(model, tokenizer, num_running, PROMPT_LEN + options.tokens)

    figures: dict[str, object] = {
        "processor": f"{processor()}, {'AVX-512' if has_avx512() else 'no AVX-512'}",
        "vocabulary": model.vocab_size,
    }
    if options.hostile:
        worst, table = hostile(bench(NUM_STREAMS), options.tokens, options.rounds)
        write_result(options.out, figures | worst, {}, table)
        return
    for batch in options.batches:
        figures |= compare(bench(batch), options.tokens, options.rounds)
    write_result(options.out, figures | first_tokens(bench(1), 10 * options.rounds), {})


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL, help="a folder or a name of a model (default: the demo model)")
    parser.add_argument("--hostile", action="store_true", help="gaps of streams beside hostile grammars")
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 32))
    parser.add_argument("--tokens", type=int, default=192, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", default="structured_speed", help="name of the results in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
