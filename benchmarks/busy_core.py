"""Decode speed of Baton's engine beside a process that burns a core, over its speed without: in turns.

    OMP_NUM_THREADS=2 python benchmarks/busy_core.py --rounds 5

Once with the niceness of the burner, and once with that of a worker's engine, which is lower in rank.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.peer_process import EngineProcess
from benchmarks.peers import Launcher, Point, default_folder, make_model
from benchmarks.result_file import write_result
from worker.loop import ENGINE_NICENESS

NICENESS_OF = {"as the burner": 0, "as a worker's engine": ENGINE_NICENESS}


@contextmanager
def burning_core() -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process that never waits."""
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield burner
    finally:
        burner.kill()
        burner.wait()


def measure(engine: EngineProcess, batch: int, num_tokens: int, num_rounds: int) -> tuple[list[float], list[float]]:
    """Returns tokens a second of each round, alone and beside the burner, after a round that warms up."""
    point = Point("decode", batch)
    point.ask(engine, num_tokens, seed=1)
    alone, beside = [], []
    for number in range(num_rounds):
        alone.append(point.rate(point.ask(engine, num_tokens, seed=100 + 2 * number)))
        with burning_core():
            beside.append(point.rate(point.ask(engine, num_tokens, seed=101 + 2 * number)))
    return alone, beside


def describe(alone: list[float], beside: list[float]) -> str:
    """Formats medians, and the median of the rounds' ratios with the least and the greatest."""
    ratios = sorted(one / other for one, other in zip(beside, alone, strict=True))
    spread = f"{ratios[0]:.2f} .. {ratios[-1]:.2f}"
    return f"{median(alone):.4g} alone, {median(beside):.4g} beside: {median(ratios):.2f} ({spread})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=48, help="of each request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, help="a checkpoint folder; SmolLM-135M's shape with random weights")
    parser.add_argument("--out", default="busy_core", help="name of the result in benchmarks/results")
    options = parser.parse_args()
    folder = (options.model or make_model(default_folder())).resolve()
    figures = {}
    with TemporaryDirectory() as scratch:
        launcher = Launcher(folder, default_folder().parent, options.threads, Path(scratch))
        for name, niceness in NICENESS_OF.items():
            with launcher.start("baton", "bfloat16", niceness) as engine:
                figures[name] = measure(engine, options.batch, options.tokens, options.rounds)
    rows = {f"tokens/s, {options.batch} requests, niceness {name}": describe(*both) for name, both in figures.items()}
    write_result(options.out, rows, {name: {"alone": one, "beside": two} for name, (one, two) in figures.items()})


if __name__ == "__main__":
    main()
