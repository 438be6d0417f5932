"""When which request is sent: decided before the first one is, so that no answer can delay a later request."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from cli.bench.trace import ScaledTrace, TraceRow

PROMPT_IDS = range(32, 256)
"""Token ids that prompts are made of: every vocabulary has them, and hardly any has special tokens there."""


@dataclass(frozen=True)
class Arrival:
    """A request, and when to send it, in seconds from the start of its round."""

    at_s: float
    prompt: tuple[int, ...]
    output_len: int


def poisson(rate: float, duration_s: float, input_len: int, output_len: int, seed: int) -> list[Arrival]:
    """Arrivals of a Poisson process with `rate` a second; all prompts differ."""
    endless = poisson_process(rate, input_len, output_len, seed)
    return list(takewhile(lambda arrival: arrival.at_s < duration_s, endless))


def poisson_process(rate: float, input_len: int, output_len: int, seed: int, prefix_len: int = 0) -> Iterator[Arrival]:
    """Yields arrivals without end. The first `prefix_len` tokens of all prompts are the same, and no others."""
    draw = random.Random(seed)
    prefix = _random_tokens(random.Random(f"{seed} prefix"), min(prefix_len, input_len))
    at_s = draw.expovariate(rate)
    while True:
        yield Arrival(at_s, prefix + _random_tokens(draw, input_len - len(prefix)), output_len)
        at_s += draw.expovariate(rate)


def replay(trace: ScaledTrace, seed: int) -> list[Arrival]:
    """Reads a trace's arrivals and lengths. Prompts share the prefixes that the trace names, and no others."""
    draw = random.Random(seed)
    return [Arrival(row.at_s, _trace_tokens(row, trace.block_len, draw, seed), row.output_len) for row in trace.rows]


def _random_tokens(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.choices(PROMPT_IDS, k=length))


def _trace_tokens(row: TraceRow, block_len: int, draw: random.Random, seed: int) -> tuple[int, ...]:
    known = [token for name in row.blocks for token in _block_tokens(name, block_len, seed)][: row.input_len]
    return (*known, *_random_tokens(draw, row.input_len - len(known)))


def _block_tokens(name: int, length: int, seed: int) -> Sequence[int]:
    return _random_tokens(random.Random(f"{seed} block {name}"), length)
