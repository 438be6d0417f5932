"""A flood of ten times as many requests as a service can answer: its time to refuse, and the throughput of the rest.

    python benchmarks/flood.py --duration 20 --rounds 4

Rounds alternate: a steady number of requests at a time, which gives the peak, and a Poisson flood of ten times that.
An observer in another process measures the time to refuse, and asks a bare server that always refuses as well.
The model is large enough to be what bounds the service. With `--hidden-size 64 --layers 2 --output-len 256` it computes
next to nothing: then Python that passes tokens on takes all cores, and all other work waits.
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.baton_service import BatonService
from benchmarks.observer import Answer, observe, refusal_figures
from benchmarks.result_file import write_result
from benchmarks.server_process import server_process
from cli.bench.latency import Record
from cli.bench.open_loop import LoadClient
from cli.bench.schedule import Arrival, poisson
from tests.harness.checkpoints import make_checkpoint

_REFUSED = "RESOURCE_EXHAUSTED"
_HEAD_DIM = 32
_LEAD_S = 2.0
"""Not counted at the start of a round."""


def main() -> None:
    options = _parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "random", options.hidden_size, options.layers)
        config = Path(folder) / "baton.toml"
        config.write_text(
            f"[router]\nmax_open_requests = {options.max_open}\nmax_queued_requests = {options.max_queued}\n"
        )
        with (
            server_process("refusing") as bare,
            BatonService("flood", str(model), 1, 1, ["--config", str(config)]) as service,
        ):
            rounds = asyncio.run(_measure(service.address, bare.addresses[0], options))
            status = service.wait_for_rest(60)
    figures = _figures(rounds, options) | {"problems_at_rest": status["problems"]}
    write_result(options.out, figures, {})


def make_model(folder: Path, hidden_size: int, num_layers: int) -> Path:
    """Makes a checkpoint with random weights and a vocabulary of bytes. hidden_size: a multiple of 64."""
    shape = {
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // _HEAD_DIM,
        "num_key_value_heads": hidden_size // _HEAD_DIM // 2,
    }
    return make_checkpoint("llama-gqa", folder, max_position_embeddings=2048, **shape)


@dataclass
class Rounds:
    """Requests of each peak and each flood; answers that the observer got from the service and from a bare server."""

    peaks: list[list[Record]] = field(default_factory=list)
    floods: list[list[Record]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    bare_answers: list[Answer] = field(default_factory=list)


async def _measure(address: str, bare: str, options: argparse.Namespace) -> Rounds:
    rounds = Rounds()
    async with LoadClient(address, options.deadline) as client:
        for seed in range(options.rounds):
            rounds.peaks.append(await _steady(client, options, seed))
            rate = options.factor * _tokens_per_s(rounds.peaks[-1], options.duration) / options.output_len
            flood = poisson(rate, options.duration, options.input_len, options.output_len, seed)
            watching = observe(options.observe, options.duration - _LEAD_S, 1000 + 2 * seed, [address, bare])
            records, (answers, bare_answers) = await asyncio.gather(client.run(flood), watching)
            rounds.floods.append(records)
            rounds.answers += answers
            rounds.bare_answers += bare_answers
    return rounds


async def _steady(client: LoadClient, options: argparse.Namespace, seed: int) -> list[Record]:
    """`--at-a-time` requests are open for so long."""
    prompts = iter(poisson(1000.0, options.duration, options.input_len, options.output_len, seed + 1000))
    start = time.perf_counter()

    async def lane() -> list[Record]:
        records: list[Record] = []
        while (offset_s := time.perf_counter() - start) < options.duration:
            [record] = await client.run([Arrival(0.0, next(prompts).prompt, options.output_len)])
            records.append(_later(record, offset_s))
        return records

    return list(itertools.chain.from_iterable(await asyncio.gather(*(lane() for _ in range(options.at_a_time)))))


def _later(record: Record, offset_s: float) -> Record:
    chunks = tuple((at_s + offset_s, number) for at_s, number in record.chunks)
    return replace(record, sent_s=record.sent_s + offset_s, chunks=chunks, ended_s=record.ended_s + offset_s)


def _tokens_per_s(records: Sequence[Record], duration_s: float) -> float:
    """Of requests that ended well, while all of the load was there."""
    within = [
        number
        for record in records
        if record.error is None
        for at_s, number in record.chunks
        if _LEAD_S <= at_s < duration_s
    ]
    return sum(within) / (duration_s - _LEAD_S)


def _figures(rounds: Rounds, options: argparse.Namespace) -> dict[str, object]:
    peak, flood = (
        float(np.mean([_tokens_per_s(records, options.duration) for records in seen]))
        for seen in (rounds.peaks, rounds.floods)
    )
    sent = [record for records in rounds.floods for record in records]
    admitted = [one for one in sent if one.error != _REFUSED or one.chunks]
    answers = rounds.answers + rounds.bare_answers
    return {
        "throughput_ratio": flood / peak,
        "peak_tokens_per_s": peak,
        "flood_tokens_per_s": flood,
        "flood_rps": len(sent) / options.rounds / options.duration,
        **refusal_figures("refusal", rounds.answers),
        **refusal_figures("bare_refusal", rounds.bare_answers),
        "observer_lateness_p99_ms": float(np.percentile([answer.late_ms for answer in answers], 99)),
        "sent": len(sent),
        "refused": len(sent) - len(admitted),
        "admitted": len(admitted),
        "admitted_errors": dict(Counter(one.error for one in admitted if one.error is not None)),
        "admitted_longest_s": max(one.ended_s - one.sent_s for one in admitted),
        "deadline_s": options.deadline,
        "client_lateness_p99_ms": float(np.percentile([one.late_s * 1000 for one in sent], 99)),
    }


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factor", type=float, default=10.0, help="rate of the flood, in capacities")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of each round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--at-a-time", type=int, default=64, help="open requests that give the peak")
    parser.add_argument("--observe", type=float, default=20.0, help="requests a second of the observer")
    parser.add_argument("--max-open", type=int, default=64, help="requests that the router lets in")
    parser.add_argument("--max-queued", type=int, default=64, help="of these, without a first token")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--hidden-size", type=int, default=512, help="of the model, a multiple of 64")
    parser.add_argument("--layers", type=int, default=6, help="of the model")
    parser.add_argument("--deadline", type=float, default=40.0, help="seconds that each request may take")
    parser.add_argument("--out", default="flood", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
