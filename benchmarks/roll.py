"""Rolls the workers of a cluster under load, and counts what that did to the answers.

    python benchmarks/roll.py                 # 2 + 2 workers, requests at random times, one roll; about 4 minutes
    python benchmarks/roll.py --weights       # the same to other weights: each answer is of the old or of the new model

Every answer is compared, token by token, with that of an engine in this process. TTFT p99 of requests sent while the
roll lasts is shown over that of requests sent before it. Exit status 1 if an answer was lost, wrong or refused.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.baton_service import HANDED_OFF, BatonService, num_in_use
from benchmarks.chaos_client import ChaosClient
from benchmarks.chaos_tally import Stream, Tally
from benchmarks.question import Question, make_questions
from benchmarks.result_file import write_result
from cli.bench.schedule import poisson
from tests.harness.checkpoints import make_checkpoint

_REST_TIMEOUT_S = 60.0
_ROLL_TIMEOUT_S = 150.0
_WARM_UP_S = 5.0


def main() -> None:
    options = _parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_checkpoint("llama-gqa", Path(folder) / "random", max_position_embeddings=2048))
        questions = _questions(model, options)
        order = ["--threads", "2", "--pool-bytes", "64MiB"]
        if options.weights:
            other = str(make_checkpoint("llama-gqa", Path(folder) / "other", seed=1, max_position_embeddings=2048))
            order, answers = ["--model", other], _questions(other, options)
            pairs = [pair for pair in zip(questions, answers, strict=True) if not any(one.stop_string for one in pair)]
            questions = [replace(one, also=(new,)) for one, new in pairs]
        settings = ["--dtype", "float32", "--threads", "1", *HANDED_OFF]
        with BatonService("roll", model, options.prefill, options.decode, settings) as service:
            pids = set(service.worker_pids())
            client = ChaosClient(service.address, questions, options.timeout)
            streams, rolls = asyncio.run(_measure(client, service, order, options))
            status = service.wait_for_rest(_REST_TIMEOUT_S)
            num_old = len(pids & set(service.worker_pids()))
    begun_s, ended_s = rolls
    before = Tally.of([one for one in streams if _WARM_UP_S <= one.sent_s < begun_s])
    during = Tally.of([one for one in streams if begun_s <= one.sent_s < ended_s])
    whole = Tally.of(streams)
    num_refused = sum((one.error or "").startswith("RESOURCE_EXHAUSTED") for one in streams)
    figures = {
        "workers": f"{options.prefill} + {options.decode}",
        "lost": whole.lost - num_refused,
        "wrong": whole.wrong,
        "refused": num_refused,
        "ttft_p99_during_over_before": during.ttft_p99_s / before.ttft_p99_s,
        "ttft_p99_before_s": before.ttft_p99_s,
        "ttft_p99_during_s": during.ttft_p99_s,
        "stream_stall_p99_s": whole.stream_stall_p99_s,
        "roll_s": ended_s - begun_s,
        "sent": whole.sent,
        "sent_during": during.sent,
        "handed_over": whole.replayed,
        "workers_not_replaced": num_old,
        "leaked_pages": num_in_use(status),
        "problems": status["problems"],
    }
    write_result(options.out, figures, {"events": status["events"], "errors": whole.errors})
    sys.exit(1 if whole.lost or whole.wrong or num_old or status["problems"] else 0)


def _questions(model: str, options: argparse.Namespace) -> list[Question]:
    return make_questions(model, options.questions, options.prompt_len, options.tokens, seed=1)


async def _measure(
    client: ChaosClient, service: BatonService, order: Sequence[str], options: argparse.Namespace
) -> tuple[Sequence[Stream], tuple[float, float]]:
    """Returns the streams, and the roll's begin and end in seconds since the load's begin."""
    times_s = [one.at_s for one in poisson(options.rate, options.duration, 0, 0, seed=1)]
    load, start_s = asyncio.create_task(client.arrive(times_s)), time.perf_counter()
    await asyncio.sleep(options.before)
    begun_s = time.perf_counter() - start_s
    done = await asyncio.to_thread(service.call, "roll", *order, timeout_s=_ROLL_TIMEOUT_S)
    ended_s = time.perf_counter() - start_s
    assert done.returncode == 0, done.stdout
    return await load, (begun_s, ended_s)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second, at random times")
    parser.add_argument("--duration", type=float, default=130.0, help="seconds in which requests are sent")
    parser.add_argument("--before", type=float, default=45.0, help="seconds until the roll begins")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--questions", type=int, default=64, help="different ones; more are asked again")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a request may take")
    parser.add_argument("--weights", action="store_true", help="roll to other weights of the same architecture")
    parser.add_argument("--out", default="roll", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
