"""A client of its own process, beside a flood: sends few short requests, and tells the time to each answer.

    python benchmarks/observer.py RATE SECONDS SEED ADDRESS...

A client that drives a flood measures its own haste too; this one has nothing else to do. It prints, as JSON, the
answers of each address, and leaves out the first second: a process that has just started is slow.
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cli.bench.latency import Record
from cli.bench.open_loop import LoadClient
from cli.bench.schedule import poisson

_WARM_UP_S = 1.0
_INPUT_LEN = 16
_OUTPUT_LEN = 2  # the fakes of paced_worker.py never end a stream of one
_TIMEOUT_S = 60.0
_REFUSED = "RESOURCE_EXHAUSTED"


@dataclass(frozen=True)
class Answer:
    """Milliseconds from sending to the end, and from when the request should have been sent until it was."""

    code: str
    took_ms: float
    late_ms: float


async def observe(rate: float, duration_s: float, seed: int, addresses: list[str]) -> list[list[Answer]]:
    """The answers of each address, from a process of its own. rate: requests a second to each."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, str(rate), str(duration_s), str(seed), *addresses, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), duration_s + 2 * _TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return [[Answer(*answer) for answer in answers] for answers in json.loads(output)]


def refusal_figures(name: str, answers: Sequence[Answer]) -> dict[str, object]:
    """How long refusals took, and what all answers were. Raises ValueError if none was a refusal."""
    refusals_ms = [answer.took_ms for answer in answers if answer.code == _REFUSED]
    if not refusals_ms:
        raise ValueError(f"{name}: nothing was refused")
    return {
        f"{name}_p50_ms": float(np.percentile(refusals_ms, 50)),
        f"{name}_p99_ms": float(np.percentile(refusals_ms, 99)),
        f"{name}_observed": dict(Counter(answer.code for answer in answers)),
    }


async def _ask(rate: float, duration_s: float, address: str, seed: int) -> list[Answer]:
    async with LoadClient(address, _TIMEOUT_S) as client:
        records = await client.run(poisson(rate, duration_s, _INPUT_LEN, _OUTPUT_LEN, seed))
    return [_answer(record) for record in records if record.scheduled_s >= _WARM_UP_S]


def _answer(record: Record) -> Answer:
    return Answer(record.error or "OK", (record.ended_s - record.sent_s) * 1000, record.late_s * 1000)


async def _main(rate: str, duration_s: str, seed: str, *addresses: str) -> None:
    asked = (_ask(float(rate), float(duration_s), address, int(seed) + one) for one, address in enumerate(addresses))
    print(json.dumps([[astuple(answer) for answer in answers] for answers in await asyncio.gather(*asked)]))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
