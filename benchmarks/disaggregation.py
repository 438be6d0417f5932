"""A prefill and a decode worker beside two co-located ones, a core each, under the load of a published trace.

    python benchmarks/disaggregation.py --trace azure_code_2023.csv

Limits come first, from the co-located service with one request at a time: 4 times its TTFT and 3 times its TPOT, by the
prompt's length. Then the co-located service tries chunk sizes, and keeps the best. Then both services
are up, and rounds alternate; each round has the trace's next requests. Goodput counts requests that ended within both
limits. Workers are bound to a core each; router, client and all else share these cores, and what they take is shown.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.baton_service import BatonService
from benchmarks.machine import MachineState
from benchmarks.result_file import write_result
from cli.bench.latency import LatencyLimits, Limits, ModeSummary, Record, percentiles_ms, summarize
from cli.bench.open_loop import LoadClient
from cli.bench.schedule import Arrival, ScaledTrace, poisson, read_trace, replay, scale
from router.config import Disaggregation
from tests.harness.checkpoints import make_checkpoint

NUM_CORES = 2
MAX_CONTEXT_LEN = 2048
_HEAD_DIM = 32
_WARM_UP_SEED = -1


@dataclass(frozen=True)
class QuietLimits:
    """Limits by a prompt's length: multiples of what a quiet service took at some lengths, and straight lines between.

    lengths: ascending. ttft_s, tpot_s: the quiet service's times, a value a length.
    """

    lengths: tuple[int, ...]
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    ttft_factor: float = 4.0
    tpot_factor: float = 3.0

    def holds_for(self, record: Record) -> bool:
        return self.at(record.prompt_len).holds_for(record)

    def at(self, prompt_len: int) -> LatencyLimits:
        """Returns the limits of a length."""
        ttft_s, tpot_s = (float(np.interp(prompt_len, self.lengths, one)) for one in (self.ttft_s, self.tpot_s))
        return LatencyLimits(self.ttft_factor * ttft_s, self.tpot_factor * tpot_s)

    def describe(self, prompt_len: int) -> str:
        limits = self.at(prompt_len)
        return f"{prompt_len}: TTFT {limits.ttft_s * 1000:.0f} TPOT {limits.tpot_s * 1000:.1f}"


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
class Mode:
    """Rounds of one service, and the CPU seconds that its parts and the client took for them."""

    rounds: list[list[Record]] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def running_itl_p99_ms(self, rounds: slice = slice(None)) -> float:
        """Takes the gaps after a request's second message: the first gap has the hand-over in it."""
        gaps = (gap for one in self.rounds[rounds] for record in one for gap in record.gaps_s[1:])
        return percentiles_ms(gaps).p99

    def summary(self, limits: Limits, rounds: slice = slice(None)) -> ModeSummary:
        return summarize(self.rounds[rounds], limits)

    def cpu_shares(self) -> dict[str, float]:
        """Divides CPU seconds by the cores' time."""
        span_s = NUM_CORES * sum(max(record.ended_s for record in one) for one in self.rounds)
        return {name: seconds / span_s for name, seconds in self.cpu_s.items()}


async def play(service: BatonService, mode: Mode, schedule: Sequence[Arrival], timeout_s: float) -> None:
    """Sends one round to a service, and notes what came of it."""
    before_s = {**service.cpu_s(), "client": time.process_time()}
    async with LoadClient(service.address, timeout_s) as client:
        mode.rounds.append(await client.run(schedule))
    for name, seconds in {**service.cpu_s(), "client": time.process_time()}.items():
        mode.cpu_s[name] = mode.cpu_s.get(name, 0.0) + seconds - before_s[name]


async def measure_quiet(address: str, options: argparse.Namespace) -> QuietLimits:
    """Sends one request at a time, of each length several, and takes medians."""
    ttft_s, tpot_s = [], []
    async with LoadClient(address, options.timeout) as client:
        await client.run(poisson(2.0, 2.0, 64, 2, _WARM_UP_SEED))
        for length in options.quiet_lengths:
            asked = poisson(100.0, 1.0, length, options.quiet_output, seed=length)[: options.quiet_requests]
            records = [(await client.run([replace(one, at_s=0.0)]))[0] for one in asked]
            require_ended(records)
            ttft_s.append(median(record.ttft_s for record in records))
            tpot_s.append(median(record.tpot_s for record in records))
    return QuietLimits(tuple(options.quiet_lengths), tuple(ttft_s), tuple(tpot_s))


def require_ended(records: Sequence[Record]) -> None:
    """Exits with the reason if a request has failed: times of the others alone would tell too little."""
    if failed := [one for one in records if one.error or not one.chunks]:
        told = f"{failed[0].error} {failed[0].reason}"
        sys.exit(f"{len(failed)} of {len(records)} requests failed, the first of {failed[0].prompt_len} tokens: {told}")


def schedules(options: argparse.Namespace) -> list[tuple[ScaledTrace, list[Arrival]]]:
    """Cuts the trace into consecutive rounds; the first round chooses the chunk size."""
    rows = read_trace(options.trace)
    size = round(options.rate * options.duration)
    traces = [
        scale(rows[at : at + size], options.rate, options.duration, options.length_factor, MAX_CONTEXT_LEN)
        for at in range(0, (options.rounds + 1) * size, size)
    ]
    return [(trace, replay(trace, options.seed + number)) for number, trace in enumerate(traces)]


class Services:
    """Starts services of one model, with their workers bound to cores."""

    def __init__(self, model: Path, scratch: Path, options: argparse.Namespace) -> None:
        self._model = model
        self._scratch = scratch
        self._options = options

    def co_located(self, chunk_len: int) -> BatonService:
        return self._service(f"co{chunk_len}", 0, 2, f"[batch]\nmax_chunk_tokens = {chunk_len}\n")

    def disaggregated(self) -> BatonService:
        return self._service("disagg", 1, 1, f'[router]\ndisaggregation = "{self._options.disaggregation}"\n')

    def of_mode(self, mode: Disaggregation) -> BatonService:
        """Describes a service of a prefill and a decode worker, by the mode of its router."""
        return self._service(mode.value, 1, 1, f'[router]\ndisaggregation = "{mode.value}"\n')

    def _service(self, name: str, num_prefill: int, num_decode: int, settings: str) -> BatonService:
        config = self._scratch / f"{name}.toml"
        config.write_text(settings)
        flags = ["--config", str(config), "--threads", "1", "--dtype", self._options.dtype]
        return BatonService(name, str(self._model), num_prefill, num_decode, flags)


def choose_chunk_len(
    services: Services, schedule: Sequence[Arrival], options: argparse.Namespace
) -> tuple[QuietLimits, dict[int, float]]:
    """Measures the quiet limits with the first chunk size, then each size's goodput on the same round."""
    limits, goodputs = None, {}
    for chunk_len in options.chunk:
        with services.co_located(chunk_len) as service:
            service.pin_workers()
            limits = limits or asyncio.run(measure_quiet(service.address, options))
            mode = Mode()
            asyncio.run(play(service, mode, schedule, options.timeout))
            goodputs[chunk_len] = mode.summary(limits).goodput_rps
            print(f"chunks of {chunk_len}: goodput {goodputs[chunk_len]:.2f} a second", file=sys.stderr, flush=True)
    assert limits is not None, "no chunk size was given"
    return limits, goodputs


def best_chunk_len(goodputs: Mapping[int, float]) -> int:
    """Picks the smallest chunk size within 1 % of the best goodput: it has the shortest gaps between tokens."""
    return min(size for size, goodput in goodputs.items() if goodput >= 0.99 * max(goodputs.values()))


async def take_turns(
    services: dict[str, BatonService], rounds: Sequence[Sequence[Arrival]], timeout_s: float
) -> dict[str, Mode]:
    """Sends each round to every service, each time another one first."""
    modes = {name: Mode() for name in services}
    for service in services.values():
        async with LoadClient(service.address, timeout_s) as client:
            await client.run(poisson(2.0, 2.0, 64, 2, _WARM_UP_SEED))
    for number, schedule in enumerate(rounds):
        for name in sorted(services, reverse=bool(number % 2)):
            await play(services[name], modes[name], schedule, timeout_s)
    return modes


def compare(modes: dict[str, Mode], limits: Limits) -> dict[str, str]:
    """Divides figures of the disaggregated service by the co-located one's: all rounds, and lowest .. highest round."""
    base, other = modes["co-located"], modes["disaggregated"]
    figures: dict[str, Callable[[Mode, slice], float]] = {
        "ITL p99 of running decodes": lambda mode, rounds: mode.running_itl_p99_ms(rounds),
        "ITL p99": lambda mode, rounds: mode.summary(limits, rounds).itl_ms.p99,
        "TTFT p50": lambda mode, rounds: mode.summary(limits, rounds).ttft_ms.p50,
        "TTFT p99": lambda mode, rounds: mode.summary(limits, rounds).ttft_ms.p99,
        "goodput": lambda mode, rounds: mode.summary(limits, rounds).goodput_rps,
    }
    ratios = {}
    for name, figure in figures.items():
        parts = [slice(None), *(slice(at, at + 1) for at in range(len(base.rounds)))]
        whole, *each = (_ratio(figure(other, part), figure(base, part)) for part in parts)
        ratios[f"{name}, disaggregated / co-located"] = f"{whole:.2f} ({min(each):.2f} .. {max(each):.2f})"
    return ratios


def _ratio(value: float, base: float) -> float:
    return value / base if base else float("nan")


def tabulate(modes: dict[str, Mode], limits: Limits) -> list[list[object]]:
    """Puts the modes' figures into columns."""
    rows: list[list[object]] = [["", *modes]]
    each = {name: mode.summary(limits) for name, mode in modes.items()}
    for title, pick in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("client late by", "client_lateness_ms")):
        percentiles = [getattr(one, pick) for one in each.values()]
        rows.append(
            [f"{title} p50 / p90 / p99, ms", *(f"{p.p50:.1f} / {p.p90:.1f} / {p.p99:.1f}" for p in percentiles)]
        )
    rows.append(["ITL p99 of running decodes, ms", *(mode.running_itl_p99_ms() for mode in modes.values())])
    rows.append(["goodput, requests a second", *(f"{s.goodput_rps:.2f} ({s.good_share:.0%})" for s in each.values())])
    rows.append(["requests ended / sent", *(f"{s.num_ended} / {s.num_sent}" for s in each.values())])
    for part in ("workers", "router", "others", "client"):
        rows.append([f"CPU of {part}, share of both cores", *(f"{m.cpu_shares()[part]:.1%}" for m in modes.values())])
    return rows


def main() -> None:
    options = parse(sys.argv[1:])
    before = MachineState.measure()
    [(_, trial), *rounds] = schedules(options)
    with TemporaryDirectory() as name:
        model = options.model or make_model(Path(name, "model"), options.hidden_size, options.layers)
        services = Services(model, Path(name), options)
        limits, goodputs = choose_chunk_len(services, trial, options)
        chunk_len = best_chunk_len(goodputs)
        with services.co_located(chunk_len) as base, services.disaggregated() as other:
            base.pin_workers()
            other.pin_workers()
            both = {"co-located": base, "disaggregated": other}
            modes = asyncio.run(take_turns(both, [schedule for _, schedule in rounds], options.timeout))
    random = f"random, hidden size {options.hidden_size}, {options.layers} layers"
    figures = {
        **compare(modes, limits),
        "load": f"{options.trace.name}, {len(rounds)} rounds, the first of {rounds[0][0].describe()}",
        "model": f"{options.model or random}, {options.dtype}",
        "router.disaggregation of the disaggregated": options.disaggregation,
        "chunk size of the co-located": f"{chunk_len}; goodput by size {goodputs}",
        "limits by prompt length, ms": ", ".join(map(limits.describe, limits.lengths)),
        "load average before": before.load_average,
    }
    details = {
        "limits": asdict(limits),
        "modes": {name: asdict(mode.summary(limits)) for name, mode in modes.items()},
        "rounds": {
            name: [asdict(mode.summary(limits, slice(at, at + 1))) for at in range(len(mode.rounds))]
            for name, mode in modes.items()
        },
        "cpu_s": {name: dict(mode.cpu_s) for name, mode in modes.items()},
    }
    write_result(options.out, figures, details, tabulate(modes, limits))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake .jsonl or Azure .csv")
    parser.add_argument("--length-factor", type=float, default=0.125, help="multiplies its lengths (default 1/8)")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second (default 4)")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of arrivals in a round (default 20)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds that each service gets (default 4)")
    parser.add_argument(
        "--chunk", type=_sizes, default=[64, 128, 256, 512], help="sizes to try (default 64,128,256,512)"
    )
    parser.add_argument("--quiet-lengths", type=_sizes, default=[16, 64, 128, 256, 512, 930])
    parser.add_argument("--quiet-requests", type=int, default=5, help="of each length (default 5)")
    parser.add_argument("--quiet-output", type=int, default=16, help="tokens of each (default 16)")
    parser.add_argument("--disaggregation", choices=list(Disaggregation), default="always", help="router's setting")
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: random weights")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--hidden-size", type=int, default=512, help="of the random model, a multiple of 64")
    parser.add_argument("--layers", type=int, default=6, help="of the random model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a request may take (default 60)")
    parser.add_argument("--out", default="disaggregation", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


def _sizes(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


if __name__ == "__main__":
    main()
