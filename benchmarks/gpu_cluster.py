"""Clusters of Ray actors whose workers share one GPU, each from `baton up` to `baton down`.

    python3 benchmarks/gpu_cluster.py pools --model FOLDER       a prefill and a decode worker, half of the GPU each
    python3 benchmarks/gpu_cluster.py colocated --model FOLDER   one worker with all of it, under the same load
    python3 benchmarks/gpu_cluster.py killed --dtype float32     a decode worker of two, killed under 64 streams

Of pools and the co-located server: the time until ready over loading alone, the first ten requests, kernels and graphs
made after ready, TTFT, gaps and goodput under two loads; of pools a hand-off's parts, too, and `baton doctor`. `--gpus
0` is a rehearsal on a CPU, with the demo model and small sizes. Says so, and ends well, where Ray is not installed.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_figures import Figure, record

if TYPE_CHECKING:
    from baton import AsyncClient, Client, Completion
    from benchmarks.baton_service import BatonService

NEEDED = ("ray", "grpc", "redis", "cryptography", "httptools", "llguidance")
TOKEN_IDS = range(32, 1400)
"""Token ids of prompts, which the demo model's tokenizer has."""
NUM_FIRST = 10
NUM_REPEATS = 5
SEED = 5
CALL_TIMEOUT_S = 60.0
RECOVERY_S = 60.0
MIN_TOKENS = 8
"""Tokens of each stream before the kill."""
NUM_AT_ONCE = 4
"""Streams at once of the answers that others are compared to."""
SMALL_POOL = "32GiB"
"""KV pages of a worker with all of the device, where default sizes have not started."""
READY = re.compile(r"worker (\S+) is ready after ([\d.]+) s")
LATE = re.compile(r"(\d+) kernels or graphs were made while requests waited")


@dataclass(frozen=True)
class Load:
    """Requests that arrive at random."""

    rate: float
    duration_s: float
    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{self.rate:g}/s of {self.input_len}+{self.output_len}"


@dataclass(frozen=True)
class Sizes:
    """Lengths and numbers of a cluster's requests."""

    first_len: int
    handoff_lens: tuple[int, ...]
    loads: tuple[Load, ...]
    num_streams: int
    num_tokens: int


ON_DEVICE = Sizes(1000, (512, 2048, 8000), (Load(2, 12, 2000, 120), Load(6, 12, 1000, 120)), 64, 600)
REHEARSED = Sizes(64, (64, 256, 1000), (Load(2, 3, 100, 12),), 8, 300)


@dataclass(frozen=True)
class Handoff:
    """The parts of a prompt's way until decode has its KV, in milliseconds, from a timeline."""

    look_up: float
    compute: float
    publish: float
    network: float
    fetch: float
    computed: float
    fetched: float

    @classmethod
    def of(cls, completion: "Completion") -> "Handoff":
        """Reads a timeline. What decode waits for ends when its fetch does, or where nothing was left to fetch then."""
        spans = completion.timeline.spans

        def lasted(name: str) -> float:
            return sum(span.duration_ms for span in spans if span.name == name)

        ends = {span.name: span.start_ms + span.duration_ms for span in spans}
        generate = next(span.start_ms for span in spans if span.name == "decode.generate")
        network = sum(span.duration_ms for span in spans if span.name == "network" and span.start_ms < generate)
        return cls(
            look_up=lasted("prefill.fetch"),
            compute=lasted("prefill.compute"),
            publish=lasted("prefill.publish"),
            network=network,
            fetch=lasted("decode.fetch"),
            computed=ends["prefill.compute"],
            fetched=ends.get("decode.fetch", generate),
        )

    @property
    def share(self) -> float:
        """The time behind prefill's computing, over all of the time until decode has fetched."""
        return (self.fetched - self.computed) / self.fetched


@dataclass(frozen=True)
class Answer:
    """The tokens of a stream, and how many decode workers it had. error: how it failed, "" if it did not."""

    token_ids: tuple[int, ...]
    num_decodes: int
    error: str = ""


class Asked:
    """A cluster under way, and what it is asked for."""

    def __init__(self, service: "BatonService", where: str, sizes: Sizes, ready_s: float) -> None:
        """where: what the cluster is, beside its figures. ready_s: seconds of `baton up`."""
        self.service, self.where, self.sizes, self.ready_s = service, where, sizes, ready_s
        self._random = random.Random(SEED)

    def prompt(self, num_tokens: int) -> list[int]:
        return self._random.choices(TOKEN_IDS, k=num_tokens)

    def note(self, name: str, value: float, unit: str, shape: str = "") -> None:
        record(Figure(name, f"{shape or self.where}", value, unit))

    def show(self, *command: str) -> None:
        """Prints a command's output, which no figure stands for."""
        print(f"$ baton {shlex.join(command)}\n{self.service.call(*command, timeout_s=CALL_TIMEOUT_S).stdout}")


def doctor(asked: Asked) -> None:
    asked.show("doctor")


def status(asked: Asked) -> None:
    asked.show("status", "--check")


def kill(asked: Asked) -> None:
    """Notes the streams that keep their tokens when their decode worker is killed; waits for the new worker."""
    asyncio.run(_kill(asked))
    asked.service.wait_for_rest(RECOVERY_S)


def starts(asked: Asked) -> None:
    """Notes how long each worker took until it was ready, and over loading alone."""
    status = asked.service.status()
    load_s = {one["id"]: one["load_s"] for pool in status["pools"].values() for one in pool}
    asked.note("up", asked.ready_s, "s")
    for worker, seconds in read_ready(status):
        asked.note("until ready", seconds, "s", f"{asked.where}, {worker}")
        if load_s.get(worker):
            asked.note("until ready over loading", seconds / load_s[worker], "", f"{asked.where}, {worker}")


def read_ready(status: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields each worker that became ready, and after how many seconds."""
    for found in filter(None, (READY.search(event["text"]) for event in status["events"])):
        yield found[1], float(found[2])


def late(asked: Asked) -> None:
    """Notes the kernels and graphs that were made after the workers were ready."""
    asked.note("made after ready", num_late(asked.service.status()["problems"]), "")


def num_late(problems: Sequence[str]) -> int:
    return sum(int(found[1]) for found in map(LATE.search, problems) if found)


def first_tokens(asked: Asked) -> None:
    """Notes the TTFT of the first requests, one after another, and the longest gap behind it."""
    with _client(asked) as client:
        for place in range(1, NUM_FIRST + 1):
            begun_s, times_s = time.perf_counter(), []
            prompt = asked.prompt(asked.sizes.first_len)
            with client.stream(prompt, max_tokens=16, temperature=0, ignore_eos=True) as stream:
                times_s = [time.perf_counter() for _ in stream]
            gaps_s = [after - before for before, after in pairwise(times_s)]
            asked.note("TTFT", (times_s[0] - begun_s) * 1e3, "ms", f"{asked.where}, request {place}")
            print(f"  longest gap behind it: {max(gaps_s, default=0.0) * 1e3:.0f} ms", flush=True)


def handoffs(asked: Asked) -> None:
    """Notes the parts of hand-offs, medians of prompts of one length."""
    with _client(asked) as client:
        for length in asked.sizes.handoff_lens:
            parts = list[Handoff]()
            shape = f"{length} tokens"
            for _ in range(NUM_REPEATS + 1):
                whole = client.generate(asked.prompt(length), max_tokens=16, temperature=0, ignore_eos=True)
                if whole.timeline.prefill_worker is None:
                    print(f"  {shape}: no hand-off, {whole.timeline.prefill_reason}", flush=True)
                else:
                    parts.append(Handoff.of(whole))
            told = (f"{one.name} {one.start_ms:.1f}+{one.duration_ms:.1f}" for one in whole.timeline.spans)
            print(f"  {shape}: {', '.join(told)}", flush=True)
            if len(parts) < 2:
                continue
            for name in ("look_up", "compute", "publish", "network", "fetch", "fetched"):
                asked.note(name.replace("_", "-"), median(getattr(one, name) for one in parts[1:]), "ms", shape)
            asked.note("hand-off share", median(one.share for one in parts[1:]), "", shape)


def loads(asked: Asked) -> None:
    """Notes TTFT, gaps and goodput under each load."""
    for load in asked.sizes.loads:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            flags = {"--rate": load.rate, "--duration": load.duration_s, "--seed": SEED, "--slo": "ttft=1000,tpot=30"}
            flags |= {"--input-len": load.input_len, "--output-len": load.output_len, "--json": file.name}
            words = [str(word) for pair in flags.items() for word in pair]
            done = asked.service.call("bench", *words, timeout_s=load.duration_s + CALL_TIMEOUT_S)
            if not (text := Path(file.name).read_text()):
                raise RuntimeError(f"no figures of {load}: {done.stdout[-1000:]}")
            summary = json.loads(text)["summary"]
        shape = f"{asked.where}, {load}"
        for name, key in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("TPOT", "tpot_ms")):
            for percentile in ("p50", "p90", "p99"):
                asked.note(f"{name} {percentile}", summary[key][percentile] or 0.0, "ms", shape)
        asked.note("goodput", summary["goodput_rps"], "1/s", shape)
        print(f"  {summary['num_ended']} of {summary['num_sent']} ended, errors {summary['errors']}", flush=True)


async def _kill(asked: Asked) -> None:
    from baton import AsyncClient

    service, num_streams = asked.service, asked.sizes.num_streams
    prompts = [asked.prompt(20 + 7 * (place % 9)) for place in range(num_streams)]
    async with AsyncClient(service.address, timeout_s=CALL_TIMEOUT_S) as client:
        few = await _ask_all(client, prompts, asked.sizes.num_tokens, NUM_AT_ONCE)
        together = await _ask_all(client, prompts, asked.sizes.num_tokens, num_streams)
        asked.note("same among all as few", num_equal(together, few), f"/ {num_streams}")
        victim = service.status()["pools"]["decode"][0]["pid"]
        barrier = Barrier(num_streams, lambda: os.kill(victim, signal.SIGKILL))
        under_fire = await _ask_all(client, prompts, asked.sizes.num_tokens, num_streams, barrier)
    barrier.require_open()
    print(f"  decode killed once all streams had {MIN_TOKENS} tokens; {barrier.num_ended} had ended", flush=True)
    for answer in under_fire:
        if answer.error:
            print(f"  FAILED {answer.error}", flush=True)
    asked.note("killed: went on elsewhere", sum(one.num_decodes > 1 for one in under_fire), f"/ {num_streams}")
    asked.note("killed: identical", num_equal(under_fire, few), f"/ {num_streams}")


def num_equal(answers: Sequence[Answer], others: Sequence[Answer]) -> int:
    """Counts answers without errors that have the tokens of others."""
    return sum(
        one.token_ids == other.token_ids and not one.error and not other.error
        for one, other in zip(answers, others, strict=True)
    )


class Barrier:
    """Does something once, when all of some streams have begun."""

    def __init__(self, num_streams: int, act: Callable[[], None]) -> None:
        self._num_left, self._act = num_streams, act
        self.num_ended = 0

    def begin(self) -> None:
        """Counts a stream that has its first tokens."""
        self._num_left -= 1
        if not self._num_left:
            self._act()

    def end(self) -> None:
        """Counts a stream that ended before all had begun."""
        self.num_ended += self._num_left > 0

    def require_open(self) -> None:
        """Raises RuntimeError unless all streams have begun."""
        if self._num_left:
            raise RuntimeError(f"nothing was killed: {self._num_left} streams never had {MIN_TOKENS} tokens")


async def _ask_all(
    client: "AsyncClient", prompts: Sequence[list[int]], num_tokens: int, at_once: int, barrier: Barrier | None = None
) -> list[Answer]:
    """Streams an answer to each prompt, drawn by the prompt's place as seed."""
    room = asyncio.Semaphore(at_once)

    async def ask(seed: int, prompt: list[int]) -> Answer:
        async with room:
            try:
                return await _ask(client, prompt, seed, num_tokens, barrier)
            except BatonError as error:
                return Answer((), 0, f"stream {seed}: {type(error).__name__}: {error}")

    from wire.errors import BatonError

    return await asyncio.gather(*(ask(seed, prompt) for seed, prompt in enumerate(prompts)))


async def _ask(client: "AsyncClient", prompt: list[int], seed: int, num_tokens: int, barrier: Barrier | None) -> Answer:
    sampling: Any = {"temperature": 0.8, "seed": seed, "max_tokens": num_tokens, "ignore_eos": True}
    num_read, has_begun = 0, False
    async with client.stream(prompt, **sampling) as stream:
        async for chunk in stream:
            num_read += len(chunk.token_ids)
            if barrier and not has_begun and num_read >= MIN_TOKENS:
                has_begun = True
                barrier.begin()
        completion = stream.completion
    if barrier:
        barrier.end()
    num_decodes = sum(span.name == "router.wait_decode" for span in completion.timeline.spans)
    return Answer(completion.choices[0].token_ids, num_decodes)


def _client(asked: Asked) -> "Client":
    from baton import Client

    return Client(asked.service.address, timeout_s=CALL_TIMEOUT_S)


def settings_of(options: argparse.Namespace) -> list[str]:
    """Lists the flags of `baton up`, the caller's last, for they win."""
    own = [] if options.gpus is None else ["--gpus", f"{options.gpus:g}"]
    if options.what == "killed":
        own += ["--dtype", options.dtype, "--exact", "on", "--pool-bytes", "2GiB", "--arena-bytes", "1GiB"]
    elif options.gpus != 0:
        own += ["--arena-bytes", "16GiB"]
    if options.gpus == 0:
        own += ["--threads", "1", "--pool-bytes", "256MiB", "--arena-bytes", "256MiB"]
    return [*own, "--http-port", "0", *shlex.split(options.flags)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WORKERS)
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: the demo model)")
    parser.add_argument("--dtype", default="float32", help="of killed (default: float32)")
    parser.add_argument("--gpus", type=float, help="share of a GPU for each worker (default: `baton up`'s own choice)")
    parser.add_argument("--kernels", type=Path, help="an empty folder for compiled kernels, for a cold start")
    parser.add_argument("--flags", default="", help="more flags for `baton up`")
    options = parser.parse_args()
    if missing := [one for one in NEEDED if importlib.util.find_spec(one) is None]:
        print(f"SKIPPED, for it is not installed: {', '.join(missing)}", flush=True)
        return 0
    signal.signal(signal.SIGTERM, _leave)
    if options.kernels is not None:
        os.environ["TRITON_CACHE_DIR"] = str(options.kernels)
    tries = [settings_of(options)]
    if options.what == "colocated":
        tries.append([*tries[0], "--pool-bytes", SMALL_POOL])
    for settings in tries:
        try:
            return serve(options, settings)
        except subprocess.CalledProcessError as error:
            print(f"FAILED: {shlex.join(error.cmd)}\n{error.stdout}", flush=True)
    return 1


def serve(options: argparse.Namespace, settings: Sequence[str]) -> int:
    """Starts a cluster, asks it, and ends it; returns 1 if a question failed, which keeps no other from being asked.

    Raises CalledProcessError, with the command's output, if the cluster does not start.
    """
    from benchmarks.baton_service import HANDED_OFF, BatonService

    asks, num_prefill, num_decode = WORKERS[options.what]
    where = f"{options.what} {options.dtype}" if options.what == "killed" else options.what
    model = None if options.model is None else str(options.model)
    begun_s, num_failed = time.perf_counter(), 0
    with BatonService(where.replace(" ", "-"), model, num_prefill, num_decode, [*HANDED_OFF, *settings]) as service:
        ready_s = time.perf_counter() - begun_s
        print(service.told, flush=True)
        asked = Asked(service, where, REHEARSED if options.gpus == 0 else ON_DEVICE, ready_s)
        for ask in asks:
            try:
                ask(asked)
            except Exception:
                num_failed += 1
                print(f"FAILED {ask.__name__}\n{traceback.format_exc(limit=-3)}", flush=True)
    return int(num_failed > 0)


def _leave(*_: object) -> None:
    """Ends the process by way of `baton down`."""
    raise SystemExit(1)


WORKERS: dict[str, tuple[Sequence[Callable[[Asked], None]], int, int]] = {
    "pools": ((starts, first_tokens, handoffs, loads, late, doctor, status), 1, 1),
    "colocated": ((starts, first_tokens, loads, late, status), 0, 1),
    "killed": ((kill, starts, late, doctor, status), 1, 2),
}
"""Questions to a cluster, with its prefill and decode workers, by name."""

if __name__ == "__main__":
    sys.exit(main())
