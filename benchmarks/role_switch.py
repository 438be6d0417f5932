"""A worker that changes its role, over a worker that starts: seconds from the order until the new pool's first token.

    python benchmarks/role_switch.py

Real processes of a model of SmolLM-135M's shape, two prefill workers and one decode worker at first. In turns an order
moves a worker to decode and back, and one starts a decode worker and ends it. A time ends with the first token that the
new worker of the pool gives, in a request that goes to it alone. Then the same under streams, which must all come to
their end.
"""

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from baton import Client
from benchmarks.baton_service import HANDED_OFF, BatonService
from benchmarks.handoff import make_served_model
from benchmarks.peers import default_folder, make_model
from benchmarks.result_file import write_result
from deploy.local.client import call_operator
from wire.pb import cluster_pb2
from wire.pb import inference_pb2 as pb
from wire.pools import Role

SMALL = ("--pool-bytes", "128MiB", "--arena-bytes", "256MiB", *HANDED_OFF)
CALL_S = 120.0
STREAM_TOKENS = 32
PROMPT = tuple(range(1, 33))


class Switched:
    """A service whose pools change; `seconds` of each way to a worker of another pool, by its name."""

    def __init__(self, service: BatonService) -> None:
        self._state = service.state()
        self._workers = self._list()
        self.seconds: dict[str, list[float]] = {}

    def order(self, prefill: int, decode: int, way: str, role: Role | None = None) -> None:
        """Resizes the pools; times the first token of the worker that a role's pool has won, as that way."""
        began_s = time.perf_counter()
        call_operator(self._state, "Scale", cluster_pb2.ScaleRequest(prefill=prefill, decode=decode), CALL_S)
        before, self._workers = self._workers, self._list()
        if role is not None:
            (won,) = self._workers[role] - before[role]
            probe = cluster_pb2.ProbeRequest(worker_id=won, prompt=pb.TokenIds(ids=PROMPT), max_tokens=1)
            call_operator(self._state, "Probe", probe, CALL_S)
            self.seconds.setdefault(way, []).append(time.perf_counter() - began_s)

    def _list(self) -> dict[Role, set[str]]:
        status = call_operator(self._state, "GetStatus", cluster_pb2.GetStatusRequest(), CALL_S)
        workers = [(Role(one.role), one.worker_id) for one in status.workers]
        return {role: {name for of, name in workers if of is role} for role in Role}


@contextmanager
def streams(address: str, num_streams: int, ended: list[int]) -> Iterator[None]:
    """Has clients ask one request after another, and notes the tokens of each. Raises what one failed with."""
    is_over = threading.Event()

    def ask_on() -> None:
        with Client(address, timeout_s=CALL_S) as client:
            while not is_over.is_set():
                answer = client.generate(PROMPT, temperature=0, max_tokens=STREAM_TOKENS, ignore_eos=True)
                ended.append(len(answer.choices[0].token_ids))

    with ThreadPoolExecutor(max(1, num_streams)) as threads:
        clients = [threads.submit(ask_on) for _ in range(num_streams)]
        try:
            yield
        finally:
            is_over.set()
            for client in clients:
                client.result()


def measure(service: BatonService, rounds: int, suffix: str) -> dict[str, list[float]]:
    """Changes the pools in turns, from 2 + 1 and back to it."""
    switched = Switched(service)
    for _ in range(rounds):
        switched.order(1, 2, f"prefill to decode{suffix}", Role.DECODE)
        switched.order(2, 1, f"decode to prefill{suffix}", Role.PREFILL)
        switched.order(2, 2, f"start{suffix}", Role.DECODE)
        switched.order(2, 1, "")
    return switched.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint's folder")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--loaded-rounds", type=int, default=2)
    parser.add_argument("--streams", type=int, default=2)
    options = parser.parse_args()
    ended: list[int] = []
    with TemporaryDirectory() as scratch:
        model = make_served_model(options.model or make_model(default_folder()), Path(scratch, "model"))
        with BatonService("switch", str(model), 2, 1, SMALL) as service:
            seconds = measure(service, options.rounds, "")
            with streams(service.address, options.streams, ended):
                seconds |= measure(service, options.loaded_rounds, ", under streams")
            problems = service.wait_for_rest(30.0)["problems"]
    if problems or set(ended) != {STREAM_TOKENS}:
        sys.exit(f"{problems or 'a stream was cut short'}")
    figures: dict[str, float] = {}
    for suffix in ("", ", under streams"):
        starts = statistics.median(seconds[f"start{suffix}"])
        for way in ("prefill to decode", "decode to prefill"):
            switch = statistics.median(seconds[way + suffix])
            figures[f"{way} over a start{suffix}"] = switch / starts
    figures["streams that were lost or cut"] = 0
    figures["streams that ended"] = len(ended)
    table: list[tuple[object, ...]] = [("until the first token, s", "least", "median", "most")]
    table += [(way, min(each), statistics.median(each), max(each)) for way, each in seconds.items()]
    write_result("role_switch", figures, {"seconds": seconds}, table)


if __name__ == "__main__":
    main()
