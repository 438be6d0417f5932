"""How good SmolLM2's answers are under each technique: perplexity of long real text, facts found in it, answers.

Texts are articles that people wrote (benchmarks/real_text.py), with facts put between their paragraphs. As in
benchmarks/quality.py, only what follows a cut counts, which runs on what is kept of the prompt's KV: a prompt ends
before the name that is asked for, so that no rule can keep the one fact. A row is kept as soon as it is measured.
"""

import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.choosers import Drawn, Latest
from benchmarks.machine import MachineState, commit, processor
from benchmarks.paper_rules import PAPER_RULES, PaperBackend
from benchmarks.peers import default_cache
from benchmarks.quality_backends import Backend, CutText
from benchmarks.real_model import plain_checkpoint
from benchmarks.real_text import NAME, TITLES, articles
from benchmarks.result_file import FOLDER
from benchmarks.techniques import Technique, decode
from text.tokenizer import Tokenizer

RESULTS = FOLDER / "quality_real.json"
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/quality.py --real --write"
BASE = "full, bfloat16"
REAL_TECHNIQUES = tuple(
    Technique(name, "", dtype=settings.pop("dtype", "bfloat16"), over=BASE, **settings)
    for name, settings in {
        BASE: dict[str, Any](),
        "int8": {"kv_dtype": "int8"},
        "fp8": {"kv_dtype": "fp8"},
        "int4": {"kv_dtype": "int4"},
        "snapkv=25%": {"kv_policy": "snapkv=25%"},
        "latest 25%": {"kv_policy": "snapkv=25%", "chooser": Latest()},
        "25% at random": {"kv_policy": "snapkv=25%", "chooser": Drawn()},
        "h2o=25%": {"kv_policy": "h2o=25%"},
        "h2o=10%": {"kv_policy": "h2o=10%"},
        "sinks=4+1020": {"kv_policy": "sinks=4+1020"},
        "window of 1024": {"window": 1024},
        "weights int8": {"weights": "int8"},
        "weights int4": {"weights": "int4"},
        "full, float32": {"dtype": "float32"},
    }.items()
)
ROWS = (*(one.name for one in REAL_TECHNIQUES), *PAPER_RULES)
PLAN = {1000: 4, 2000: 2, 4000: 1}
"""Lengths of texts with facts, and how many of each; a text has a fact for each of PLACES, and all are asked for."""
PLACES = ("Paris", "Oslo", "Lima", "Cairo", "Delhi", "Rome", "Kyoto", "Quito")
NUM_ANSWERS, ANSWER_PROMPT_LEN, ANSWER_LEN = 16, 512, 32
SCORED = ("Anarchism", "Abraham Lincoln", "Aristotle")
PAGE_LEN, OPENING_LEN = 3072, 2048
NUM_BLOCKS = 1200
_VALUE_LEN = 4
_ROOM = 48
_NUM_STEPS = 4


@dataclass(frozen=True)
class RealRow:
    """The figures of a technique. found: by length. answers: token ids, compared with the ids of BASE."""

    perplexity: float
    found: dict[int, float]
    bytes_per_token: float
    answers: list[list[int]]
    load_average: float

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> "RealRow":
        """Reads a row of RESULTS."""
        return cls(**{**row, "found": {int(length): share for length, share in row["found"].items()}})


@dataclass(frozen=True)
class Haystack:
    """A text with facts, up to the name that is asked for, and each end of the question with its answer."""

    prompt_ids: tuple[int, ...]
    questions: Mapping[str, str]


class RealMeter:
    """Measures a loaded model; the texts depend on nothing but their articles."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer, bytes_per_token: Callable[[CutText], float]) -> None:
        self._backend = backend
        self._bytes_per_token = bytes_per_token
        self._tokenizer = tokenizer

    def measure(self) -> RealRow:
        answers = self.answers()
        found = {length: self.found(length) for length in PLAN}
        load_average = MachineState.measure().load_average
        return RealRow(self.perplexity(), found, self.bytes_per_token(), answers, load_average)

    def perplexity(self) -> float:
        """Computes the perplexity of the end of long articles, by token."""
        pages = [CutText.cut(self._ids(title)[:PAGE_LEN], OPENING_LEN) for title in SCORED]
        total = sum(self._backend.log_likelihood(page) for page in pages)
        return math.exp(-total / sum(len(page.given_ids) - 1 for page in pages))

    def found(self, length: int) -> float:
        """Share of facts that answers have right."""
        haystacks = [make_haystack(self._tokenizer, length, number) for number in range(PLAN[length])]
        right = [self._is_right(one, end, value) for one in haystacks for end, value in one.questions.items()]
        return sum(right) / len(right)

    def answers(self) -> list[list[int]]:
        """Continues pages greedily, a few tokens each behind the cut."""
        titles = [*articles()]
        pages = [
            self._ids(titles[at % len(titles)])[OPENING_LEN + at * ANSWER_PROMPT_LEN :] for at in range(NUM_ANSWERS)
        ]
        texts = [CutText.cut(page[: ANSWER_PROMPT_LEN + 3], ANSWER_PROMPT_LEN) for page in pages]
        return [self._backend.generate([text], ANSWER_LEN)[0] for text in texts]

    def bytes_per_token(self) -> float:
        """Bytes of KV that a request of OPENING_LEN tokens holds while it decodes."""
        text = CutText.cut(self._ids(SCORED[0])[: OPENING_LEN + 3], OPENING_LEN)
        return self._bytes_per_token(text)

    def _is_right(self, haystack: Haystack, end: str, value: str) -> bool:
        text = CutText(haystack.prompt_ids, tuple(self._tokenizer.encode(end)))
        [answer] = self._backend.generate([text], _VALUE_LEN + 1)
        return self._tokenizer.decode(answer).strip().startswith(value)

    def _ids(self, title: str) -> list[int]:
        return self._tokenizer.encode(articles()[title])


def make_haystack(tokenizer: Tokenizer, length: int, number: int) -> Haystack:
    """Puts a fact behind each of the parts of an article, about `length` tokens in all."""
    draw = random.Random(f"{length} {number}")
    values = {place: str(draw.randrange(1000, 10_000)) for place in PLACES}
    facts = [f"The secret number of {place} is {value}." for place, value in values.items()]
    body = tokenizer.encode([*articles().values()][number % len(articles())])
    part_len = (length - _ROOM - sum(len(tokenizer.encode(fact)) for fact in facts)) // len(facts)
    parts = (tokenizer.decode(body[at * part_len : (at + 1) * part_len]).strip() for at in range(len(facts)))
    text = "".join(f"{part}\n\n{fact}\n\n" for part, fact in zip(parts, facts, strict=True))
    prompt_ids = tokenizer.encode(f"{text}The secret number of")
    return Haystack(tuple(prompt_ids), {f" {place} is": value for place, value in values.items()})


def measure_real(only: str | None) -> None:
    """Measures the techniques, or one, and keeps each row at once."""
    folder = plain_checkpoint(default_cache() / "smollm2-float32")
    tokenizer = Tokenizer.load(folder)
    for name in ROWS:
        if only in (None, name):
            print(f"{name} ...", file=sys.stderr, flush=True)
            keep(name, _measure(name, folder, tokenizer))


def _measure(name: str, folder: Path, tokenizer: Tokenizer) -> RealRow:
    if name in PAPER_RULES:
        theirs = PaperBackend(folder, PAPER_RULES[name])
        return RealMeter(theirs, tokenizer, theirs.bytes_per_token).measure()
    [technique] = [one for one in REAL_TECHNIQUES if one.name == name]
    with TemporaryDirectory() as scratch:
        ours = technique.load(folder, Path(scratch), num_blocks=NUM_BLOCKS)
        return RealMeter(ours, tokenizer, lambda text: decode(ours, [text], _NUM_STEPS).bytes_per_token).measure()


def keep(name: str, row: RealRow) -> None:
    """Writes a row among the kept ones."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    rows = {**kept["rows"], name: asdict(row)}
    content = {
        "command": COMMAND,
        "machine": f"{processor()}, {datetime.now(UTC):%Y-%m-%d}, commit {commit()}",
        "text": NAME,
        "rows": {one: rows[one] for one in ROWS if one in rows},
    }
    RESULTS.write_text(
        json.dumps(content, indent=None, separators=(",", ":")).replace('"answers"', '\n"answers"') + "\n"
    )


def read_real() -> tuple[str, dict[str, RealRow]]:
    """Reads the machine and the kept rows."""
    kept = json.loads(RESULTS.read_text())
    return kept["machine"], {name: RealRow.read(row) for name, row in kept["rows"].items()}


def format_section(machine: str, rows: Mapping[str, RealRow]) -> str:
    """Formats an introduction and a table."""
    loads = [row.load_average for row in rows.values()]
    texts = ", ".join(f"{num * len(PLACES)} at {length:,}" for length, num in PLAN.items())
    introduction = _INTRODUCTION.format(
        command=COMMAND,
        machine=machine,
        loads=f"{min(loads):.1f} to {max(loads):.1f}",
        text=NAME,
        titles=", ".join(TITLES),
        facts=texts,
        opening_len=OPENING_LEN,
        scored_len=PAGE_LEN - OPENING_LEN,
        page_len=PAGE_LEN,
        num_pages=len(SCORED),
        num_places=len(PLACES),
        num_answers=NUM_ANSWERS,
        answer_prompt_len=ANSWER_PROMPT_LEN,
        answer_len=ANSWER_LEN,
    )
    head = ["technique", "bytes a token", "perplexity", *(f"facts at {length:,}" for length in PLAN)]
    head += ["answers that change"]
    lines = [_line(head), "|---|" + "---:|" * (len(head) - 1)]
    lines += [_line([name, *_cells(row, rows[BASE])]) for name, row in rows.items()]
    return f"{introduction}\n\n" + "\n".join(lines)


def _cells(row: RealRow, base: RealRow) -> list[str]:
    over = row.perplexity / base.perplexity - 1
    shown = f"{row.perplexity:.3f}" if row is base else f"{row.perplexity:.3f} ({over:+.1%})"
    found = [f"{row.found[length]:.0%}" for length in PLAN]
    return [f"{row.bytes_per_token:,.0f}", shown, *found, figures_of(row, base)["changed"]]


def figures_of(row: RealRow, base: RealRow) -> dict[str, str]:
    """Returns what advice about a technique names: changed answers, and facts found at the shortest length."""
    length = min(PLAN)
    changed = sum(one != other for one, other in zip(row.answers, base.answers, strict=True))
    found = [f"{one.found[length]:.0%}" for one in (base, row)]
    return {"changed": f"{changed} of {len(base.answers)}", "found": f"{found[1]} of facts in place of {found[0]}"}


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


_INTRODUCTION = """\
## On a real model

SmolLM2-135M-Instruct (`baton pull smollm2`: 30 layers, 3 KV heads of 64, a file in Q4_1), its weights dequantized, in
bfloat16 where a row names nothing else: the same bits as from the packed file. The text is of Wikipedia's articles
({titles}; {text}). This command measures the
rows, three to five minutes each on a busy machine, keeps each at once, and makes the page (`--only NAME` for one):

    {command}

- *bytes a token*: of KV while one request of {opening_len:,} tokens decodes;
- *perplexity*: of the last {scored_len:,} tokens of {num_pages} texts of {page_len:,}, and over the first row's;
- *facts*: a text has {num_places} sentences such as "The secret number of Oslo is 4821." between its paragraphs, and
  each is asked for: {facts} tokens. The prompt ends before the place's name;
- *answers that change*: of {num_answers} texts of {answer_prompt_len} tokens, where one of the next {answer_len}
  tokens is not the first row's;
- *latest*, *at random* and the window are controls, as above. Weights in int8 and int4 are made of these dequantized
  ones, which had 4 to 5 bits before. `snapkv` and `h2o` are the product's variants, of whole pages;
- *by its paper*: the rule as SnapKV's and H2O's authors have it, for each KV head by itself, on dense attention of
  torch (benchmarks/paper_rules.py): SnapKV by 32 rows, H2O by all rows, a token at each step. It is in float32, where a
  kept token takes twice the bytes.

A model of 135M finds few facts in long text even with all of its KV: the first row is what others can reach. No
speeds, as the machine had other work: {machine}, load average {loads} on two cores."""
