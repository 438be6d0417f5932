"""Cost of the live page at 200 workers and 50 requests a second: delay of updates, the gateway's processor time.

python benchmarks/page.py [--workers 200] [--rate 50] [--seconds 30]

The gateway runs in this process before a synthetic operator's service (tests/page/synthetic.py), whose messages are
parsed from bytes as over gRPC. Phases follow one another: no page, one page in Chromium (tests/page.sh installs it), 8
streams that are read. A share is processor time of this process over time of the wall.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.page.browser import PROGRAM, served
from tests.page.synthetic import KEY, SyntheticOperator


async def read(url: str, seconds: float) -> int:
    """Reads a stream as a page does; returns its bytes."""
    host, _, port = url.removeprefix("http://").removesuffix("/ui").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /ui/events HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {KEY}\r\n\r\n".encode())
    num_bytes, ends_s = 0, time.monotonic() + seconds
    while (left_s := ends_s - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(left_s):
                num_bytes += len(await reader.read(1 << 16))
        except TimeoutError:
            break
    writer.close()
    return num_bytes


async def look(url: str, seconds: float, find: str) -> dict[str, Any]:
    venv = Path(os.environ.get("BATON_PAGE_VENV", Path.home() / ".cache" / "baton-page"))
    settings = {"url": url, "key": KEY, "axe": "", "shots": "", "find": find, "seconds": seconds}
    command = [str(venv / "bin" / "python"), str(PROGRAM), json.dumps(settings)]
    program = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await program.communicate()
    seen: dict[str, Any] = json.loads(out)
    return seen


async def share_of(work: Any) -> tuple[float, Any]:
    """Returns this process's share of a processor while something is awaited, and its result."""
    began_s, used_s = time.monotonic(), time.process_time()
    result = await work
    return (time.process_time() - used_s) / (time.monotonic() - began_s), result


async def main(args: argparse.Namespace) -> None:
    async with served(SyntheticOperator(args.workers, args.rate)) as url:
        find = f"acme/r-{60 + int(args.rate * args.seconds * 4 / 3)}"  # has ended by then, and is still kept
        idle, _ = await share_of(asyncio.sleep(args.seconds / 3))
        one, seen = await share_of(look(url, args.seconds, find))
        eight, sizes = await share_of(asyncio.gather(*(read(url, args.seconds) for _ in range(8))))
    delays = sorted(seen["delays_s"])
    median = statistics.median(delays)
    print(f"{args.workers} workers, {args.rate:g} requests/s, load average {os.getloadavg()[0]:.1f}, {cpu()}")
    print(f"first paint {seen['first_paint_s']:.2f} s; from key to picture {seen['first_data_s']:.2f} s")
    print(f"event written to drawn: median {median:.3f} s, worst {delays[-1]:.3f} s of {len(delays)}")
    print(f"gateway's share of a processor: no page {idle:.2%}, one page {one:.2%}, 8 streams {eight:.2%}")
    print(f"a stream: {statistics.mean(sizes) / args.seconds / 1024:.0f} KiB/s")


def cpu() -> str:
    """Returns the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown processor")


parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int, default=200)
parser.add_argument("--rate", type=float, default=50.0)
parser.add_argument("--seconds", type=float, default=30.0)
asyncio.run(main(parser.parse_args()))
