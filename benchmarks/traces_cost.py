"""The cost of traces: tokens a second of the router's processor time with all, one in a hundred and no requests traced.

    python benchmarks/traces_cost.py

One router in this process, before workers that compute nothing; requests of 64 tokens follow one another. A collector
in a process of its own takes the traces. The ways take turns; time of workers is left out, the exporter's is in.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.result_file import write_result
from benchmarks.router_tokens import _CONFIG, SteppingLine, SteppingWorker, run_steps
from router.config import TraceSettings
from router.router import Router
from router.workers.controller_port import LocalController
from router.workers.local_transport import LocalTransport
from text.byte_tokenizer import ByteTokenizer
from wire.ids import AttemptId, WorkerId
from wire.pb import inference_pb2 as pb
from wire.pools import PoolSizes, Role, Worker, WorkerState

RATIOS = {"off": None, "1_percent": 0.01, "100_percent": 1.0}
MAX_TOKENS = 64
NUM_WORKERS, NUM_OPEN = 2, 32
SPANS = ("decode.queue", "decode.wait_slot", "decode.fetch", "decode.compute", "decode.generate")
COLLECTOR = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


class EndingLine(SteppingLine):
    """The worker's end of a line whose requests end at MAX_TOKENS, with a timeline."""

    def step(self) -> int:
        num_tokens = super().step()
        for update in self._news.updates:
            choice = update.choices[-1]
            if choice.first_position + len(choice.token_ids) >= MAX_TOKENS and update.id in self._positions:
                choice.finish_reason = pb.FINISH_REASON_LENGTH
                update.end.spans.extend(pb.Span(name=name, start_ms=1.0, duration_ms=1.0) for name in SPANS)
                del self._positions[AttemptId(update.id)]
        return num_tokens


class EndingWorker(SteppingWorker):
    """A worker whose lines end requests."""

    def connect(self) -> SteppingLine:
        self.lines.append(EndingLine(self))
        return self.lines[-1]


async def tokens_per_s(traces: TraceSettings, num_tokens: int) -> float:
    """Tokens that the router passes on in a second of this process' processor time, without that of workers."""
    workers = {f"d{number}": EndingWorker(f"d{number}") for number in range(NUM_WORKERS)}
    for worker in workers.values():
        await worker.learn()
    config = replace(_CONFIG, traces=traces)
    connect, port = (lambda name: LocalTransport(workers[name])), LocalController(PoolSizes(0, NUM_WORKERS))
    router = Router(config, ByteTokenizer(), connect, port)
    router.start()
    listed = [Worker(WorkerId(name), Role.DECODE, name, WorkerState.READY) for name in workers]
    assert not await router.membership.set(listed)
    clients = [asyncio.create_task(_send_requests(router)) for _ in range(NUM_OPEN)]
    lines = [line for worker in workers.values() for line in worker.lines]
    while sum(line.num_requests for line in lines) < NUM_OPEN:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    began_s = time.process_time()
    num_sent, workers_s = await run_steps(lines, num_tokens)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    await router.stop()  # waits for the exporter's thread
    return num_sent / (time.process_time() - began_s - workers_s)


async def _send_requests(router: Router) -> None:
    params = pb.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    while True:
        async for _ in router.dispatcher.open(pb.GenerateRequest(text="hello", sampling_params=params), 600.0).outbox:
            pass


def _figures(taken: dict[str, list[float]]) -> Iterator[tuple[str, float]]:
    yield "tokens_per_s_off", statistics.median(taken["off"])
    for name in ("1_percent", "100_percent"):
        ratios = [one / off for one, off in zip(taken[name], taken["off"], strict=True)]
        yield f"ratio_{name}", statistics.median(ratios)
        yield f"ratio_{name}_least", min(ratios)
        yield f"ratio_{name}_most", max(ratios)
    yield "spread_off", max(taken["off"]) / min(taken["off"]) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=60_000, help="of each round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default="traces_cost", help="name of the result in benchmarks/results")
    options = parser.parse_args()
    taken: dict[str, list[float]] = {name: [] for name in RATIOS}
    with subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True) as collector:
        assert collector.stdout is not None
        endpoint = f"http://127.0.0.1:{int(collector.stdout.readline())}"
        for _ in range(options.rounds):
            for name, ratio in RATIOS.items():
                settings = TraceSettings() if ratio is None else TraceSettings(endpoint, ratio)
                taken[name].append(asyncio.run(tokens_per_s(settings, options.tokens)))
        collector.terminate()
    write_result(options.out, dict(_figures(taken)), {"tokens_per_s": taken})


if __name__ == "__main__":
    main()
