"""The processor time per token of a worker's service side: jobs, line and gRPC, without its engine.

    python benchmarks/worker_tokens.py --requests 64 --interval 0.05 --tokens 200 --rounds 3

The worker's engine gives every request a token at each beat. Rounds alternate between a worker that a router reads, and
the same engine, in a process of its own, from which nothing is read: the difference is the service side.
"""

import argparse
import asyncio
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.result_file import write_result
from benchmarks.server_process import ServerProcess, server_process
from router.workers.grpc_transport import GrpcTransport
from tests.harness.assembled_worker import TOKEN
from tests.harness.one_worker import begin_of, greedy
from wire.pb import worker_pb2

_TIMEOUT_S = 300.0


@dataclass
class Reading:
    """The sums of what a router reads."""

    messages: int = 0
    updates: int = 0
    tokens: int = 0
    ended: int = 0

    def add(self, response: worker_pb2.ConnectResponse) -> None:
        self.messages += 1
        self.updates += len(response.updates)
        self.tokens += sum(len(choice.token_ids) for update in response.updates for choice in update.choices)
        self.ended += sum(update.HasField("end") for update in response.updates)


def main() -> None:
    options = _parse(sys.argv[1:])
    cpu_s = {"worker": 0.0, "engine": 0.0}
    readings: list[Reading] = []
    size = (str(options.interval), str(options.requests), str(options.tokens))
    for _ in range(options.rounds):
        with ExitStack() as servers:
            worker = servers.enter_context(server_process("worker", size[0]))
            before_s = _cpu_s(worker)
            readings.append(asyncio.run(_read(worker.addresses[0], options.requests, options.tokens)))
            cpu_s["worker"] += _cpu_s(worker) - before_s
        with ExitStack() as servers:
            engine = servers.enter_context(server_process("engine", *size))
            cpu_s["engine"] += float(engine.addresses[0])
    write_result(options.out, _figures(cpu_s, readings, options.before), {})


def _figures(cpu_s: dict[str, float], readings: list[Reading], before_us: float | None) -> dict[str, float]:
    tokens = sum(reading.tokens for reading in readings)
    us = {name: value / tokens * 1e6 for name, value in cpu_s.items()}
    service_us = us["worker"] - us["engine"]
    compared = {} if before_us is None else _compared(service_us, before_us - us["engine"])
    return {
        "cpu_us_per_token_service_side": service_us,
        **compared,
        **{f"cpu_us_per_token_{name}": value for name, value in us.items()},
        "tokens": tokens,
        "updates": sum(reading.updates for reading in readings),
        "messages": sum(reading.messages for reading in readings),
    }


def _compared(service_us: float, before_us: float) -> dict[str, float]:
    return {"cpu_us_per_token_service_side_before": before_us, "ratio_to_before": service_us / before_us}


async def _read(address: str, num_requests: int, num_tokens: int) -> Reading:
    reading, transport = Reading(), GrpcTransport(address, TOKEN)
    async with asyncio.timeout(_TIMEOUT_S):
        for number in range(num_requests):
            begin = begin_of(request_id=str(number), sampling=greedy(num_tokens), time_left_s=_TIMEOUT_S)
            await transport.write(worker_pb2.ConnectRequest(begins=[begin]))
        while reading.ended < num_requests:
            response = await transport.read()
            assert response is not None, "the worker has ended the line"
            reading.add(response)
        await transport.close()
    return reading


def _cpu_s(server: ServerProcess) -> float:
    times = psutil.Process(server.pid).cpu_times()
    return times.user + times.system


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64, help="open at a time")
    parser.add_argument("--interval", type=float, default=0.05, help="seconds between the tokens of a request")
    parser.add_argument("--tokens", type=int, default=200, help="of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=float, help="cpu_us_per_token_worker of earlier code, for the ratio")
    parser.add_argument("--out", default="worker_tokens", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
