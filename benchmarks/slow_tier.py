"""TTFT beside a tier that is slower than computing, over TTFT without that tier.

    python benchmarks/slow_tier.py --threads 1

A first cluster writes the KV of all prompts to Redis and goes down. Two others serve the same prompts in turns: the
first reads that Redis through a proxy of 1 MB/s a connection and 50 ms a round trip, the second has no Redis. The first
20 prompts let workers learn the tier's cost; later prompts are measured.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.baton_service import BatonService
from benchmarks.handoff import MEMORY, Prompts, ask_all, make_served_model
from benchmarks.peers import default_folder, make_model
from benchmarks.result_file import write_result
from benchmarks.tiers import own_redis
from tests.faults.toxic_proxy import Line, ToxicProxy

NUM_LEARNING = 20
NUM_OTHER = 8
"""The last tokens of a prompt, which no tier knows."""


@contextmanager
def proxied(url: str, line: Line) -> Iterator[str]:
    """Yields a Redis URL that leads to the server at `url` by way of the line."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    proxy = ToxicProxy(url.removeprefix("unix://").removeprefix("redis://").partition("?")[0], line)
    try:
        yield "redis://" + asyncio.run_coroutine_threadsafe(proxy.start(), loop).result(10.0)
    finally:
        asyncio.run_coroutine_threadsafe(proxy.stop(), loop).result(10.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def ask_in_turns(services: Sequence[BatonService], prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Returns the TTFT of each prompt in seconds, service by service."""
    ttfts_s: list[list[float]] = [[] for _ in services]
    for number, prompt in enumerate(prompts):
        for service, one in list(zip(services, ttfts_s, strict=True))[:: 1 if number % 2 else -1]:
            [asked] = ask_all(service, [prompt])
            one.append(asked.ttft_s)
            print(f"{number}: {service.name}, {asked.ttft_s:.3f} s, cached {asked.cached_tokens}", file=sys.stderr)
    return ttfts_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--prompts", type=int, default=15, help="that are measured")
    parser.add_argument("--length", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--bytes-per-s", type=float, default=1e6, help="of each connection to the slow tier")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds of a round trip to it")
    parser.add_argument("--out", default="slow_tier", help="name of the result in benchmarks/results")
    options = parser.parse_args()
    prompts = Prompts(0)
    stored = [prompts.draw(options.length - NUM_OTHER) for _ in range(NUM_LEARNING + options.prompts)]
    settings = [*MEMORY, "--threads", str(options.threads)]
    line = Line(delay_s=(options.latency / 2, options.latency / 2), bytes_per_s=options.bytes_per_s)
    with tempfile.TemporaryDirectory() as name:
        model = str(make_served_model(make_model(default_folder()), Path(name) / "model"))
        (Path(name) / "redis").mkdir()
        with own_redis(Path(name) / "redis") as url:
            with BatonService("writes", model, 1, 1, [*settings, "--redis-url", url]) as service:
                ask_all(service, stored)
                time.sleep(3.0)  # Redis is written to in the background
            with (
                proxied(url, line) as slow_url,
                BatonService("slow", model, 1, 1, [*settings, "--redis-url", slow_url]) as slow,
                BatonService("none", model, 1, 1, [*settings, "--redis-url", "off"]) as none,
            ):
                asked = [prompt + prompts.draw(NUM_OTHER) for prompt in stored]
                slow_s, none_s = ask_in_turns([slow, none], asked)
    measured = [statistics.median(one[NUM_LEARNING:]) for one in (slow_s, none_s)]
    learning = [statistics.median(one[:NUM_LEARNING]) for one in (slow_s, none_s)]
    worst = max(a / b for a, b in zip(slow_s, none_s, strict=True))
    figures = {
        "TTFT with the slow tier over without, median after 20 requests": measured[0] / measured[1],
        "of the first 20 requests": learning[0] / learning[1],
        "the worst of all requests": worst,
    }
    write_result(options.out, figures, {"slow_s": slow_s, "none_s": none_s})


if __name__ == "__main__":
    main()
