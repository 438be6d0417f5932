"""Pools that follow limits, on real processes: a load that doubles and falls to nothing.

    python benchmarks/scaling_cluster.py --minutes 5

A service of the demo model with at most two workers of each role. Requests of 512 tokens arrive at random, at `--rate`
for a third of the time, at twice as many for another third, then none. A request is late beyond either limit; late
requests of the minute after each rise, the dwell time, are counted apart. The time without requests is the last third,
and what pools at rest keep their reserve for at least: then come the workers that are left.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.baton_service import BatonService
from benchmarks.result_file import write_result
from cli.bench.latency import Record
from cli.bench.open_loop import LoadClient
from cli.bench.schedule import Arrival, poisson
from deploy.scaling.policy import IDLE_DWELLS

DWELL_S = 60.0
TTFT_MS, ITL_MS = 1000.0, 50.0
INPUT_LEN, OUTPUT_LEN = 512, 48
TIMEOUT_S = 60.0
DRAIN_S = 20.0
SETTINGS = f"""
[slo]
ttft_ms = {TTFT_MS}
itl_ms = {ITL_MS}
dwell_s = {DWELL_S}
max_prefill = 2
max_decode = 2

[worker]
num_threads = 1
"""


def draw(rate: float, third_s: float, seed: int) -> list[Arrival]:
    """Draws requests at the rate, then at twice the rate."""
    first = poisson(rate, third_s, INPUT_LEN, OUTPUT_LEN, seed)
    then = poisson(2 * rate, third_s, INPUT_LEN, OUTPUT_LEN, seed + 1)
    return first + [Arrival(one.at_s + third_s, one.prompt, one.output_len) for one in then]


def is_late(record: Record) -> bool:
    return 1000 * record.ttft_s > TTFT_MS or 1000 * record.tpot_s > ITL_MS


async def _load(address: str, arrivals: list[Arrival]) -> list[Record]:
    async with LoadClient(address, TIMEOUT_S) as client:
        return await client.run(arrivals)


async def _watch(service: BatonService, seen: list[dict[str, Any]], every_s: float = 5.0) -> None:
    """Notes the sizes of the pools again and again, until cancelled."""
    while True:
        status = await asyncio.to_thread(service.status)
        seen.append({role: pool["size"] for role, pool in status["sizes"].items()})
        await asyncio.sleep(every_s)


async def _run(service: BatonService, arrivals: list[Arrival], total_s: float) -> tuple[list[Record], list[Any]]:
    seen: list[dict[str, Any]] = []
    watching = asyncio.create_task(_watch(service, seen))
    async with asyncio.timeout(total_s + 2 * TIMEOUT_S):
        records, _ = await asyncio.gather(_load(service.address, arrivals), asyncio.sleep(total_s))
    watching.cancel()
    return records, seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="length of the load, its last third without requests"
    )
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second at first")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    third_s = options.minutes * 20
    arrivals = draw(options.rate, third_s, options.seed)
    # Behind the last request come the rest of the pools, a drain, and a look every 2 s.
    total_s = max(options.minutes * 60, 2 * third_s + IDLE_DWELLS * DWELL_S + DRAIN_S)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "slo.toml"
        file.write_text(SETTINGS)
        with BatonService("scaling", None, 1, 1, ["--config", str(file)]) as service:
            records, seen = asyncio.run(_run(service, arrivals, total_s))
            status = service.status()
    ended = [record for record in records if record.error is None]
    judged = [one for one in ended if third_s > one.scheduled_s > DWELL_S or one.scheduled_s > third_s + DWELL_S]
    figures = {
        "requests": len(records),
        "requests lost": len(records) - len(ended),
        "late, in all": sum(map(is_late, ended)) / max(1, len(ended)),
        "late beyond the dwell": sum(map(is_late, judged)) / max(1, len(judged)),
        "requests beyond the dwell": len(judged),
        "most workers": max((sum(sizes.values()) for sizes in seen), default=0),
        "workers left at the end": ", ".join(f"{pool['size']} {role}" for role, pool in status["sizes"].items()),
        "problems": "; ".join(status["problems"]) or "none",
    }
    events = [["seconds ago", "event"], *([f"{one['age_s']:.0f}", one["text"]] for one in status["events"])]
    write_result("scaling_cluster", figures, {"sizes": seen, "settings": SETTINGS}, events)


if __name__ == "__main__":
    main()
