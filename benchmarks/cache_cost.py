"""Tokens a second that the prefix cache costs an engine where no prompt has a beginning in common with another.

    python benchmarks/cache_cost.py --rounds 40

Two engines on the same weights take turns with the same prompts. One has the cache as it is; the other's blocks have
no names, so that it hashes, finds, publishes and evicts nothing. No store is behind either. Both must give the same
tokens. Time is taken by the clock, and as CPU time, which other processes disturb less. What the cache takes hardly
depends on the model, so it is also measured on the demo model, where it stands out, and divided by the model's time.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine.sequence
from benchmarks.machine import MachineState
from benchmarks.peer_engines import Baton, TokenLog, make_prompts
from benchmarks.peers import default_folder, make_model
from benchmarks.result_file import write_result
from engine.kv.retention import Retention, Tokens
from wire.block_names import BlockName
from wire.ids import PageId

DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo_model" / "checkpoint"
VOCAB_SIZE = 256
"""Ids that prompts are made of: every model has them."""


class Nameless(Retention):
    """A retention of blocks without names: none is found, and none is published."""

    def names(self, tokens: Tokens, num_tokens: int, num_dropped: int = 0) -> list[BlockName]:
        return []

    def filled(self, tokens: Tokens, start: int, num_computed: int) -> list[tuple[BlockName, PageId]]:
        return []


@contextmanager
def no_cache() -> Iterator[None]:
    """Lets engines make sequences without names."""
    with patch.object(engine.sequence, "retention_of", Nameless):
        yield


@dataclass(frozen=True)
class Turn:
    """Seconds of one generation, by the clock and of CPU, and its tokens."""

    wall_s: float
    cpu_s: float
    token_ids: list[list[int]]


@dataclass(frozen=True)
class Round:
    """Two turns with the cache around two turns without it: a machine that grows slower or faster meets both alike."""

    with_cache: tuple[Turn, Turn]
    without: tuple[Turn, Turn]


def take_turn(engine: Baton, prompts: Sequence[list[int]], num_tokens: int) -> Turn:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    log = TokenLog(len(prompts))
    engine.generate(prompts, num_tokens, log)
    return Turn(time.perf_counter() - began_s, time.process_time() - began_cpu_s, log.token_ids)


def take_turns(cached: Baton, uncached: Baton, asked: Sequence[Sequence[list[int]]], num_tokens: int) -> Round:
    """Runs two lists of prompts with each engine. Raises RuntimeError where tokens differ."""
    first = take_turn(cached, asked[0], num_tokens)
    with no_cache():
        without = (take_turn(uncached, asked[0], num_tokens), take_turn(uncached, asked[1], num_tokens))
    one = Round((first, take_turn(cached, asked[1], num_tokens)), without)
    if [turn.token_ids for turn in one.with_cache] != [turn.token_ids for turn in one.without]:
        raise RuntimeError("the cache has changed tokens")
    return one


def describe_loss(with_s: Sequence[tuple[float, float]], without_s: Sequence[tuple[float, float]]) -> str:
    """Tells the share of tokens a second that is lost: median and quartiles of the rounds, and the fastest turns'.

    with_s, without_s: seconds of both turns, a pair a round.
    """
    low, middle, high = np.percentile(_loss(np.sum(with_s, axis=1), np.sum(without_s, axis=1)), [25, 50, 75])
    fastest = _loss(fastest_quarter(with_s), fastest_quarter(without_s))
    return f"{middle:.2f} (quartiles {low:.2f} .. {high:.2f}); of the fastest turns {fastest:.2f}"


def fastest_quarter(turns_s: Sequence[tuple[float, float]]) -> np.float64:
    """Averages the shortest quarter of turns, in which other work of the machine shows least."""
    ordered = np.sort(np.ravel(turns_s))
    return np.float64(ordered[: -(-len(ordered) // 4)].mean())


def _loss(with_s: Any, without_s: Any) -> Any:
    return (1 - without_s / with_s) * 100


class Rounds:
    """Rounds on one model; `load` is requests at a time, prompt tokens and output tokens."""

    def __init__(self, folder: Path, load: tuple[int, int, int], options: argparse.Namespace) -> None:
        batch, prompt_len, num_tokens = load
        self._tokens_a_turn = batch * (prompt_len + num_tokens)
        cached = Baton(folder, options.threads, options.dtype)
        uncached = copy(cached)
        uncached.renew()
        rounds = []
        for seed in range(0, 2 * options.rounds + 2, 2):
            asked = [make_prompts(batch, prompt_len, one, VOCAB_SIZE) for one in (seed, seed + 1)]
            rounds.append(take_turns(cached, uncached, asked, num_tokens))
        del rounds[0]  # it warms up
        self.with_s, self.with_cpu_s = ([_pair(one.with_cache, name) for one in rounds] for name in ("wall_s", "cpu_s"))
        self.without_s, self.without_cpu_s = (
            [_pair(one.without, name) for one in rounds] for name in ("wall_s", "cpu_s")
        )

    @property
    def us_a_token(self) -> float:
        """CPU time without the cache, of prompt and output tokens alike, in the fastest turns."""
        return float(fastest_quarter(self.without_cpu_s)) / self._tokens_a_turn * 1e6

    @property
    def cache_us_a_token(self) -> float:
        taken_s = fastest_quarter(self.with_cpu_s) - fastest_quarter(self.without_cpu_s)
        return float(taken_s) / self._tokens_a_turn * 1e6


def main() -> None:
    options = parse(sys.argv[1:])
    before = MachineState.measure()
    folder = options.model or make_model(default_folder())
    load = (options.batch, options.prompt_len, options.tokens)
    model, demo = (Rounds(one, load, options) for one in (folder, DEMO_MODEL))
    figures = {
        "tokens/s lost to the cache, %": describe_loss(model.with_s, model.without_s),
        "the same by CPU time, %": describe_loss(model.with_cpu_s, model.without_cpu_s),
        "demo model: tokens/s lost, %": describe_loss(demo.with_s, demo.without_s),
        "demo model: CPU us that the cache takes a token, prompt and output": demo.cache_us_a_token,
        "that over the model's CPU time a token, %": demo.cache_us_a_token / model.us_a_token * 100,
        "load": f"{options.rounds} rounds of 2 turns; requests, prompt and output tokens of a turn: {load}",
        "model": f"{folder.name}, {options.dtype}, {options.threads} threads, {model.us_a_token:.0f} us a token",
        "load average before": before.load_average,
    }
    write_result(options.out, figures, {"model": vars(model), "demo": vars(demo)})


def _pair(turns: tuple[Turn, Turn], name: str) -> tuple[float, float]:
    return getattr(turns[0], name), getattr(turns[1], name)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="of two turns each (default 40)")
    parser.add_argument("--batch", type=int, default=8, help="requests at a time (default 8)")
    parser.add_argument("--prompt-len", type=int, default=64, help="prompt tokens (default 64)")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer (default 16)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--model", type=Path, help="a checkpoint folder; SmolLM-135M's shape with random weights")
    parser.add_argument("--out", default="cache_cost", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
