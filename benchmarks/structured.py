"""Answers in schemas that are drawn from the specification's features: each is valid, or the beginning of a valid one.

    OMP_NUM_THREADS=1 python benchmarks/structured.py
    OMP_NUM_THREADS=2 python benchmarks/structured.py --model smollm2 --threads 2 --out structured_smollm2

Each schema has a greedy answer and a seeded one. Whole answers are validated by jsonschema. A cut answer is ended by
the shortest bytes that the grammar allows, and then validated: a prefix of a valid answer.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jsonschema
import torch
from llguidance import LLTokenizer

from benchmarks.machine import has_avx512, processor
from benchmarks.result_file import write_result
from benchmarks.schemas import Schema, draw_schema, features
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.hub import find_folder
from engine.core import EngineCore
from engine.events import Failed, Finished
from engine.grammar.grammars import Grammars
from engine.model.decoder import Decoder
from engine.request import EngineRequest
from engine.schedule.continuous_batcher import ContinuousBatcher
from kv_store.device_pool import DevicePool
from kv_store.transfers import NoStore
from text.grammar import new_matcher
from wire.ids import AttemptId, NamespaceRoot
from wire.sampling import FinishReason, FormatKind, ResponseFormat, SamplingParams

DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo_model" / "checkpoint"
BLOCK_SIZE = 16
MAX_END_BYTES = 4096
ROOT = NamespaceRoot(bytes(32))
ENDERS = b'"}],: Z'
"""Bytes that end a JSON text soonest, the best first; after them any digit, then any byte."""


@dataclass
class Answer:
    """An answer to one schema. error: the message of a failed request."""

    schema: Schema
    token_ids: list[int]
    ended: bool = False
    error: str = ""


@dataclass(frozen=True)
class Service:
    """A model, and the grammars of its requests."""

    model: Decoder
    checkpoint: Checkpoint
    num_running: int

    @classmethod
    def load(cls, name: str, num_running: int) -> "Service":
        folder = find_folder(name)
        model = Decoder.load(folder, None, torch.device("cpu"), BLOCK_SIZE)
        return cls(model, Checkpoint(folder), num_running)

    def answer(self, schemas: Sequence[Schema], sampling: SamplingParams, max_prompt_len: int) -> list[Answer]:
        """Answers each schema, `num_running` at a time."""
        tokenizer = self.checkpoint.load_tokenizer()
        grammars = Grammars(lambda: tokenizer.definition, self.model.vocab_size, self.model.eos_token_ids)
        num_blocks = self.num_running * (-(-(max_prompt_len + sampling.max_tokens) // BLOCK_SIZE) + 1)
        pool = DevicePool(self.model.layout, num_blocks, self.model.device)
        core = EngineCore(self.model, pool, ContinuousBatcher(max_running=self.num_running), NoStore())
        answers = {AttemptId(str(number)): Answer(schema, []) for number, schema in enumerate(schemas)}
        waiting = list(reversed(answers.items()))
        while waiting or core.has_requests:
            while waiting and len(core.attempts) < self.num_running:
                attempt_id, answer = waiting.pop()
                source = json.dumps(answer.schema, ensure_ascii=False)
                prompt = tokenizer.encode(f"Write JSON of the schema {source}.\nJSON: ")[:max_prompt_len]
                given = replace(sampling, response_format=ResponseFormat(FormatKind.JSON_SCHEMA, source))
                core.add(
                    grammars.prepare(
                        EngineRequest(attempt_id=attempt_id, root=ROOT, prompt_ids=tuple(prompt), sampling=given)
                    )
                )
            output = core.step()
            for choice, token_id in zip(output.choices, output.token_ids, strict=True):
                answers[choice.attempt_id].token_ids.append(token_id)
            for event in output.events:
                if isinstance(event, Finished):
                    answers[event.attempt_id].ended = event.reason is FinishReason.STOP
                if isinstance(event, Failed):
                    answers[event.attempt_id].error = event.error.message
        return [*answers.values()]

    def text(self, answer: Answer) -> bytes:
        """The bytes of an answer, without the token that ended it."""
        tokenizer = self.checkpoint.load_tokenizer()
        ids = answer.token_ids[:-1] if answer.ended else answer.token_ids
        return b"".join(map(tokenizer.token_bytes, ids))


def ended(schema: Schema, text: bytes, byte_tokenizer: LLTokenizer) -> bytes:
    """Ends a text as soon as its grammar allows. Raises ValueError for a text that the grammar does not take."""
    given = ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))
    matcher = new_matcher(given, byte_tokenizer)
    if not matcher.consume_tokens([*text]):
        raise ValueError("the grammar does not take it")
    made, draw = bytearray(text), random.Random(1)
    while not matcher.is_accepting():
        if len(made) > len(text) + MAX_END_BYTES:
            raise ValueError(f"no end was found of {text!r}")
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> (byte % 8) & 1]
        digits = [one for one in allowed if one in b"0123456789"]
        byte = next((one for one in ENDERS if one in allowed), draw.choice(digits or allowed))
        matcher.consume_tokens([byte])
        made.append(byte)
    return bytes(made)


def is_valid(schema: Schema, text: bytes) -> bool:
    """Validates an answer as jsonschema does, with exact decimal numbers."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    try:
        value = json.loads(text, parse_float=Decimal)
        jsonschema.Draft202012Validator(exact, format_checker=checker).validate(value)
    except (ValueError, jsonschema.ValidationError) as fault:
        print(f"INVALID {text[:300]!r}: {str(fault).splitlines()[0]}")
        return False
    return True


def tally(service: Service, answers: Sequence[Answer]) -> Counter[str]:
    """Counts the answers by how they fared."""
    counts, byte_tokenizer = Counter[str](), LLTokenizer("byte")
    for one in answers:
        text = service.text(one)
        counts["tokens"] += len(one.token_ids)
        if one.error:
            print(f"FAILED {one.error}: {json.dumps(one.schema)[:300]}")
            counts["failed"] += 1
        elif one.ended:
            counts["ended"] += 1
            counts["ended and valid"] += is_valid(one.schema, text)
        else:
            counts["cut"] += 1
            counts["cut and prefix"] += is_valid(one.schema, ended(one.schema, text, byte_tokenizer))
    return counts


def main() -> None:
    options = _parse(sys.argv[1:])
    torch.set_num_threads(options.threads)
    schemas = [draw_schema(random.Random(options.seed + number)) for number in range(options.schemas)]
    service = Service.load(str(options.model), options.running)
    samplings = {
        "greedy": SamplingParams(temperature=0.0, max_tokens=options.tokens),
        "seeded": SamplingParams(temperature=1.0, seed=options.seed, max_tokens=options.tokens),
    }
    figures: dict[str, object] = {
        "processor": f"{processor()}, {'AVX-512' if has_avx512() else 'no AVX-512'}",
        "schemas": len(schemas),
        "keywords, types and formats": len(set().union(*map(features, schemas))),
    }
    for name, sampling in samplings.items():
        began_s = time.perf_counter()
        counts = tally(service, service.answer(schemas, sampling, options.prompt))
        figures |= {
            f"{name}: ended by themselves / all": f"{counts['ended']} / {len(schemas)}",
            f"{name}: valid / ended by themselves": f"{counts['ended and valid']} / {counts['ended']}",
            f"{name}: prefix of a valid one / cut": f"{counts['cut and prefix']} / {counts['cut']}",
            f"{name}: failed": counts["failed"],
            f"{name}: tokens, seconds": f"{counts['tokens']}, {time.perf_counter() - began_s:.0f}",
        }
    write_result(options.out, figures, {})


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL, help="a folder or a name of a model (default: the demo model)")
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=512, help="max_tokens of an answer")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt, which is cut there")
    parser.add_argument("--running", type=int, default=32, help="requests at a time")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", default="structured", help="name of the results in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
