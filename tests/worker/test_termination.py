"""SIGTERM is heard of by an event loop beside the main thread, whatever the threads of the process do."""

import asyncio
import signal
import sys

import pytest

NUM_SIGNALS = 100
"""Of each process, which keeps two files open for each; one in sixty would be lost."""
NUM_PROCESSES = 4
TIMEOUT_S = 10.0
MODULE = "tests.worker.signalled_process"


async def test_a_thread_that_just_begins_does_not_swallow_it() -> None:
    for _ in range(NUM_PROCESSES):
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", MODULE, stdout=asyncio.subprocess.PIPE)
        try:
            await heard_all(process)
        finally:
            process.kill()
            await process.wait()


async def heard_all(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    for number in range(NUM_SIGNALS + 1):
        try:
            line = await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S)
        except TimeoutError:
            pytest.fail(f"signal {number} was lost")
        assert line == b"ready\n"
        process.send_signal(signal.SIGTERM)
