"""A hand-off's share of TTFT, on one node and between two; TTFT of a prompt whose prefix a tier holds, over a cold one.

    python benchmarks/handoff.py --threads 1

The hand-off lasts from the first token's sampling to decode's first step. A warm prompt has 4,096 tokens, 90 % of them
shared (`--shared`); the prefill worker that computed these is gone, or the whole cluster was down since. Each warm
figure is over prompts of the same lengths that no tier knows, asked in the same run.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from baton import AsyncClient, Completion
from benchmarks.baton_service import HANDED_OFF, BatonService
from benchmarks.peers import default_folder, make_model
from benchmarks.result_file import write_result
from benchmarks.tiers import own_redis
from tests.cluster.ray_nodes import RayNodes
from tests.harness.checkpoints import byte_level_tokenizer

HANDOFF_LENS = (512, 4096)
WARM_LEN = 4096
NUM_TOKENS = 8
START_S = 120.0
MEMORY = ("--arena-bytes", "2GiB", "--pool-bytes", "512MiB", *HANDED_OFF)
TWO_POOLS = "deploy/two-pools.example.toml"


@dataclass(frozen=True)
class Asked:
    """An answer's share of time between its first token and decode's first step, and its TTFT as the client saw it."""

    ttft_s: float
    handoff_share: float
    cached_tokens: dict[str, int]


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


def handoff_share(completion: Completion) -> float:
    """Returns the time from the end of prefill's computing to decode's first step, over the time up to that step."""
    spans = completion.timeline.spans
    computed = next(span.start_ms + span.duration_ms for span in spans if span.name == "prefill.compute")
    generate = next(span.start_ms for span in spans if span.name == "decode.generate")
    return (generate - computed) / generate


class Prompts:
    """Prompts of random tokens, no two alike."""

    def __init__(self, seed: int, vocab_size: int = 49152) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size

    def draw(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(num_tokens)]


async def ask(address: str, prompt: Sequence[int]) -> Asked:
    async with AsyncClient(address, timeout_s=START_S) as client:
        began_s = time.perf_counter()
        async with client.stream(list(prompt), max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True) as stream:
            first_s = 0.0
            async for _ in stream:
                first_s = first_s or time.perf_counter()
        completion = stream.completion
        return Asked(first_s - began_s, handoff_share(completion), dict(completion.usage.cached_tokens))


def ask_all(service: BatonService, prompts: Sequence[Sequence[int]]) -> list[Asked]:
    return [asyncio.run(ask(service.address, prompt)) for prompt in prompts]


def kill_prefill_worker(service: BatonService) -> int:
    """Kills the first one, and returns its process."""
    pid: int = service.status()["pools"]["prefill"][0]["pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


def wait_for_prefill_workers(service: BatonService, num_workers: int, gone: int = 0) -> None:
    """Waits until so many are ready, none of them the process that is gone."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        pids = [one["pid"] for one in service.status()["pools"]["prefill"] if one["state"] == "ready"]
        if len(pids) == num_workers and gone not in pids:
            return
        time.sleep(0.5)
    raise RuntimeError(f"there are not {num_workers} prefill workers")


def show(name: str, asked: Sequence[Asked]) -> None:
    for one in asked:
        told = f"TTFT {one.ttft_s:.3f} s, hand-off {one.handoff_share:.2%}, cached {one.cached_tokens}"
        print(f"{name}: {told}", file=sys.stderr)


class Runs:
    """The figures as they come: medians of what was asked under a name."""

    def __init__(self, num_prompts: int, prompts: Prompts, num_shared: int) -> None:
        """num_shared: the first tokens of a warm prompt, of WARM_LEN."""
        self.num_prompts = num_prompts
        self.num_shared = num_shared
        self.prompts = prompts
        self.asked: dict[str, list[Asked]] = {}

    def ask(self, name: str, service: BatonService, prompts: Sequence[Sequence[int]]) -> None:
        ask_all(service, [self.prompts.draw(64)])  # the first request of a cluster opens lines
        self.asked[name] = ask_all(service, prompts)
        show(name, self.asked[name])

    def draw(self, num_tokens: int) -> list[list[int]]:
        return [self.prompts.draw(num_tokens) for _ in range(self.num_prompts)]

    def ttft_s(self, name: str) -> float:
        return statistics.median(one.ttft_s for one in self.asked[name])

    def handoff_share(self, name: str) -> float:
        return statistics.median(one.handoff_share for one in self.asked[name])

    def measure_handoff(self, service: BatonService, where: str) -> None:
        for length in HANDOFF_LENS:
            self.ask(f"{where}, {length}", service, self.draw(length))

    def compute_prefixes(self, name: str, service: BatonService) -> list[list[int]]:
        """Asks cold prompts and returns them with other last tokens."""
        prompts = self.draw(WARM_LEN)
        self.ask(f"cold, {name}", service, prompts)
        return [prompt[: self.num_shared] + self.prompts.draw(WARM_LEN - self.num_shared) for prompt in prompts]


def one_node(runs: Runs, model: str, settings: Sequence[str]) -> None:
    with BatonService("one", model, 1, 1, [*MEMORY, "--redis-url", "off", *settings]) as service:
        runs.measure_handoff(service, "one node")
        warm = runs.compute_prefixes("host", service)
        wait_for_prefill_workers(service, 1, gone=kill_prefill_worker(service))
        runs.ask("host", service, warm)


def two_nodes(runs: Runs, model: str, settings: Sequence[str], folder: Path) -> None:
    more = [*MEMORY, "--redis-url", "off", "--config", TWO_POOLS, *settings]
    with ExitStack() as ended:
        address = join_nodes(folder, ended, "decode")
        with BatonService("two", model, 1, 1, [*more, "--ray-address", address]) as service:
            runs.measure_handoff(service, "two nodes")
    with ExitStack() as ended:
        address = join_nodes(folder, ended, "prefill", "decode")
        with BatonService("peers", model, 1, 1, [*more, "--ray-address", address]) as service:
            warm = runs.compute_prefixes("other node", service)
            service.scale(prefill=2)
            wait_for_prefill_workers(service, 2)
            kill_prefill_worker(service)
            runs.ask("other node", service, warm)


def join_nodes(folder: Path, ended: ExitStack, *roles: str) -> str:
    """Starts a Ray head for a prefill worker and a node for each role; returns the head's address."""
    nodes = RayNodes(folder, ended)
    os.environ.update(nodes.env)
    nodes.head(prefill=1)
    for role in roles:
        nodes.join(role)
    return nodes.address


def started_again(runs: Runs, model: str, settings: Sequence[str], name: str) -> None:
    """Asks for prefixes that a cluster before this one has computed."""
    with BatonService(f"{name}-a", model, 1, 1, [*MEMORY, *settings]) as service:
        warm = runs.compute_prefixes(name, service)
        time.sleep(3.0)  # what is written there is written in the background
    with BatonService(f"{name}-b", model, 1, 1, [*MEMORY, *settings]) as service:
        runs.ask(name, service, warm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder; SmolLM-135M's shape with random weights")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--prompts", type=int, default=5, help="for each figure; medians are reported")
    parser.add_argument("--shared", type=float, default=0.9, help=f"of a warm prompt's {WARM_LEN} tokens (default 0.9)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="handoff", help="name of the result in benchmarks/results")
    options = parser.parse_args()
    runs = Runs(options.prompts, Prompts(options.seed), round(options.shared * WARM_LEN))
    settings = ["--threads", str(options.threads)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = options.model or make_model(default_folder())
        model = str(make_served_model(checkpoint, folder / "model"))
        (folder / "redis").mkdir()
        one_node(runs, model, settings)
        started_again(runs, model, [*settings, "--redis-url", "off", "--files-folder", str(folder / "kv")], "files")
        with own_redis(folder / "redis") as url:
            started_again(runs, model, [*settings, "--redis-url", url], "redis")
        two_nodes(runs, model, settings, folder)
    figures = {}
    for where in ("one node", "two nodes"):
        for length in HANDOFF_LENS:
            figures[f"hand-off over TTFT, {where}, {length} tokens"] = runs.handoff_share(f"{where}, {length}")
    for tier in ("host", "other node", "redis", "files"):
        figures[f"TTFT warm over cold, {options.shared:.0%} of {WARM_LEN} tokens shared, {tier}"] = runs.ttft_s(
            tier
        ) / runs.ttft_s(f"cold, {tier}")
    write_result(options.out, figures, {name: [vars(one) for one in asked] for name, asked in runs.asked.items()})


if __name__ == "__main__":
    main()
