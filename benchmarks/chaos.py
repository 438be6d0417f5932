"""Asks a service while its processes are killed and stopped, and counts what that did to the answers.

    python benchmarks/chaos.py --seed 1 --duration 180 --kill-every 10 --streams 32 --tokens 900
    python benchmarks/chaos.py --seed 2 --duration 180 --kill-every 6 --faults all --rate 3

The first keeps so many streams open; with `--rate` requests arrive at random times, whatever becomes of earlier ones.
Every answer is compared, token by token, with that of an engine in this process. At the end all pages must be at rest.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.baton_service import HANDED_OFF, BatonService, num_in_use
from benchmarks.chaos_client import ChaosClient
from benchmarks.chaos_tally import Stream, Tally
from benchmarks.fault_injector import Fault, FaultInjector, FaultKind, plan
from benchmarks.question import make_questions
from benchmarks.result_file import write_result
from cli.bench.schedule import poisson
from tests.harness.checkpoints import make_checkpoint

_REST_TIMEOUT_S = 90.0
_MAX_STALL_S = 5.0


def main() -> None:
    options = _parse(sys.argv[1:])
    kinds = list(FaultKind) if options.faults == "all" else [FaultKind(name) for name in options.faults.split(",")]
    faults = plan(options.seed, options.duration, options.kill_every, kinds, options.max_pause)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(
            make_checkpoint("llama-gqa", Path(folder) / "random", max_position_embeddings=2048)
        )
        questions = make_questions(model, options.questions, options.prompt_len, options.tokens, options.seed)
        with BatonService(
            "chaos", model, options.prefill, options.decode, ["--dtype", "float32", *HANDED_OFF]
        ) as service:
            client = ChaosClient(service.address, questions, options.timeout)
            injector = FaultInjector(service)
            streams = asyncio.run(_harm(client, injector, faults, options))
            status = service.wait_for_rest(_REST_TIMEOUT_S)
    tally = Tally.of(streams)
    num_leaked = num_in_use(status)
    figures = {
        **asdict(tally),
        "leaked_pages": num_leaked,
        "problems": status["problems"],
        "faults": len(injector.done),
    }
    details = {
        "faults": injector.done,
        "events": status["events"],
        "worst": [one.describe() for one in _worst(streams)],
    }
    write_result(options.out, figures, details)
    bad = tally.lost or tally.wrong or num_leaked or status["problems"] or tally.stream_stall_p99_s > _MAX_STALL_S
    sys.exit(1 if bad else 0)


async def _harm(
    client: ChaosClient, injector: FaultInjector, faults: Sequence[Fault], options: argparse.Namespace
) -> list[Stream]:
    async with asyncio.TaskGroup() as group:
        load = group.create_task(_load(client, options))
        group.create_task(injector.run(faults))
    return load.result()


async def _load(client: ChaosClient, options: argparse.Namespace) -> list[Stream]:
    if options.rate is None:
        return await client.keep_open(options.streams, options.duration)
    arrivals = poisson(options.rate, options.duration, 0, 0, options.seed)
    return await client.arrive([arrival.at_s for arrival in arrivals])


def _worst(streams: Sequence[Stream]) -> list[Stream]:
    """Returns the streams that say most about the faults."""
    return sorted(streams, key=lambda one: (one.error is None, one.is_right, -one.longest_stall_s))[:5]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = " ".join(kind.value for kind in FaultKind)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--duration", type=float, default=180.0, help="seconds in which streams are opened")
    parser.add_argument("--kill-every", type=float, default=10.0, help="seconds from fault to fault")
    parser.add_argument("--faults", default="kill", help=f"all, or of {names} joined by commas")
    parser.add_argument("--max-pause", type=float, default=4.0, help="seconds for which something is stopped at most")
    parser.add_argument("--streams", type=int, default=32, help="open at any time")
    parser.add_argument("--rate", type=float, help="requests a second, instead of a number of streams")
    parser.add_argument("--tokens", type=int, default=900, help="of each answer")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--questions", type=int, default=128, help="different ones; more are asked again")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a request may take")
    parser.add_argument("--model", help="checkpoint folder; default: a small one with random weights")
    parser.add_argument("--out", default="chaos", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
