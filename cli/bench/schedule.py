"""The schedule of requests, drawn before the first is sent, so that no answer can delay a later request.

Published traces of real services are scaled down to the machine and the model. Two forms are known: Mooncake's JSON
lines (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`, one per 512 tokens) and Azure's CSV (`TIMESTAMP`,
`ContextTokens`, `GeneratedTokens`).
"""

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise, takewhile
from pathlib import Path

from wire.errors import InvalidRequest, require

PROMPT_IDS = range(32, 256)
"""Token ids of prompts: every vocabulary has them, and few have special tokens among them."""
MOONCAKE_BLOCK_LEN = 512
_EPOCH = datetime(2000, 1, 1)


@dataclass(frozen=True)
class TraceRow:
    """A request of a trace: its time, its lengths, and the names of its prompt's blocks, if the trace has them."""

    at_s: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class ScaledTrace:
    """Rows to send, and how they differ from the trace, which each figure must tell."""

    rows: tuple[TraceRow, ...]
    block_len: int
    time_factor: float
    length_factor: float
    num_clipped: int

    def describe(self) -> str:
        pace = f"arrivals {1 / self.time_factor:.3g} times as fast"
        clipped = f"{self.num_clipped} of {len(self.rows)} cut to fit the context"
        return f"{len(self.rows)} requests, {pace}, lengths x {self.length_factor:.3g}, {clipped}"


def read_trace(path: Path) -> list[TraceRow]:
    """Reads all rows, the first at 0 s. Raises InvalidRequest for an unknown form, no rows, or times that go back."""
    try:
        rows = [*_rows_of(path)]
    except (ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        raise InvalidRequest("trace", "is neither Azure's .csv nor Mooncake's .jsonl") from error
    require(rows, "trace", "has no requests")
    back = next((place for place, (row, later) in enumerate(pairwise(rows), 2) if later.at_s < row.at_s), None)
    require(back is None, "trace", f"request {back} is earlier than the one before it")
    return [replace(row, at_s=row.at_s - rows[0].at_s) for row in rows]


def _rows_of(path: Path) -> Iterator[TraceRow]:
    """Yields the rows of a file. Raises ValueError and others for an unknown form."""
    if path.suffix == ".jsonl":
        yield from (_mooncake_row(json.loads(line)) for line in path.read_text().splitlines())
    elif path.suffix == ".csv":
        with path.open(newline="") as file:
            yield from map(_azure_row, csv.DictReader(file))
    else:
        raise ValueError("an unknown suffix")


def scale(rows: Sequence[TraceRow], rate: float, duration_s: float, length_factor: float, max_len: int) -> ScaledTrace:
    """Takes the first rate * duration rows, scales their times to `duration_s`, and multiplies lengths.

    Cuts a request that exceeds `max_len` tokens, prompt and output: the prompt first, to no less than half.
    """
    taken = rows[: max(2, round(rate * duration_s))]
    time_factor = duration_s / (taken[-1].at_s - taken[0].at_s or duration_s)
    resized = [_resize(row, length_factor) for row in taken]
    clipped = [_clip(row, max_len) for row in resized]
    return ScaledTrace(
        rows=tuple(replace(row, at_s=(row.at_s - taken[0].at_s) * time_factor) for row in clipped),
        block_len=max(1, round(MOONCAKE_BLOCK_LEN * length_factor)),
        time_factor=time_factor,
        length_factor=length_factor,
        num_clipped=sum(row != before for row, before in zip(clipped, resized, strict=True)),
    )


def _mooncake_row(raw: dict[str, int | list[int]]) -> TraceRow:
    at_ms, input_len, output_len, blocks = (
        raw[name] for name in ("timestamp", "input_length", "output_length", "hash_ids")
    )
    if not isinstance(at_ms, int) or not isinstance(input_len, int) or not isinstance(output_len, int):
        raise ValueError("a row's timestamp or length is not a number")
    return TraceRow(at_ms / 1000, input_len, output_len, tuple(blocks) if isinstance(blocks, list) else ())


def _azure_row(raw: dict[str, str]) -> TraceRow:
    # Seven digits of a second: datetime takes six.
    at = datetime.fromisoformat(raw["TIMESTAMP"][:26])
    return TraceRow((at - _EPOCH).total_seconds(), int(raw["ContextTokens"]), int(raw["GeneratedTokens"]))


def _resize(row: TraceRow, factor: float) -> TraceRow:
    return replace(
        row,
        input_len=max(1, round(row.input_len * factor)),
        output_len=max(1, round(row.output_len * factor)),
    )


def _clip(row: TraceRow, max_len: int) -> TraceRow:
    output_len = min(row.output_len, max(1, max_len - min(row.input_len, max_len // 2)))
    return replace(row, input_len=min(row.input_len, max_len - output_len), output_len=output_len)


@dataclass(frozen=True)
class Arrival:
    """A request, and the time to send it, in seconds from the start of its round."""

    at_s: float
    prompt: tuple[int, ...]
    output_len: int


def poisson(rate: float, duration_s: float, input_len: int, output_len: int, seed: int) -> list[Arrival]:
    """Draws arrivals of a Poisson process with `rate` a second; all prompts differ."""
    endless = poisson_process(rate, input_len, output_len, seed)
    return list(takewhile(lambda arrival: arrival.at_s < duration_s, endless))


def poisson_process(rate: float, input_len: int, output_len: int, seed: int, prefix_len: int = 0) -> Iterator[Arrival]:
    """Yields arrivals without end. Prompts share exactly their first `prefix_len` tokens."""
    draw = random.Random(seed)
    prefix = _random_tokens(random.Random(f"{seed} prefix"), min(prefix_len, input_len))
    at_s = draw.expovariate(rate)
    while True:
        yield Arrival(at_s, prefix + _random_tokens(draw, input_len - len(prefix)), output_len)
        at_s += draw.expovariate(rate)


def replay(trace: ScaledTrace, seed: int) -> list[Arrival]:
    """Reads a trace's arrivals and lengths. Prompts share exactly the prefixes that the trace names."""
    draw = random.Random(seed)
    return [Arrival(row.at_s, _trace_tokens(row, trace.block_len, draw, seed), row.output_len) for row in trace.rows]


def _random_tokens(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.choices(PROMPT_IDS, k=length))


def _trace_tokens(row: TraceRow, block_len: int, draw: random.Random, seed: int) -> tuple[int, ...]:
    blocks = (_random_tokens(random.Random(f"{seed} block {name}"), block_len) for name in row.blocks)
    known = [token for block in blocks for token in block][: row.input_len]
    return (*known, *_random_tokens(draw, row.input_len - len(known)))
