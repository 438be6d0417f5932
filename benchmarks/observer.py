"""One of the crowd, in a process of its own: sends few short requests, and tells how long each took to be answered.

    python benchmarks/observer.py RATE SECONDS ADDRESS...

What a client that drives a flood measures is its own haste too; this one has nothing else to do. It prints, as JSON,
for each address a list of [code, milliseconds from sending to the end, milliseconds that it was sent too late]. What is
sent in the first second is not told: a process that has just started is slow.
"""

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.latency import Record
from benchmarks.load_client import LoadClient
from benchmarks.schedule import poisson

_WARM_UP_S = 1.0
_INPUT_LEN = 16
_OUTPUT_LEN = 2
_TIMEOUT_S = 60.0
Answer = tuple[str, float, float]


async def observe(rate: float, duration_s: float, addresses: list[str]) -> list[list[Answer]]:
    """The answers of each address, from a process of its own. rate: requests a second to each."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, str(rate), str(duration_s), *addresses, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), duration_s + 2 * _TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    answers: list[list[Answer]] = json.loads(output)
    return answers


async def _ask(rate: float, duration_s: float, address: str, seed: int) -> list[Answer]:
    async with LoadClient(address, _TIMEOUT_S) as client:
        records = await client.run(poisson(rate, duration_s, _INPUT_LEN, _OUTPUT_LEN, seed))
    return [_answer(record) for record in records if record.scheduled_s >= _WARM_UP_S]


def _answer(record: Record) -> Answer:
    return record.error or "OK", (record.ended_s - record.sent_s) * 1000, (record.sent_s - record.scheduled_s) * 1000


async def _main(rate: str, duration_s: str, *addresses: str) -> None:
    asked = (_ask(float(rate), float(duration_s), address, seed) for seed, address in enumerate(addresses))
    print(json.dumps(await asyncio.gather(*asked)))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
