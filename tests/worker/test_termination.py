"""SIGTERM is heard of by an event loop beside the main thread, whatever the threads of the process do."""

import asyncio
import signal
import sys

NUM_SIGNALS = 400
TIMEOUT_S = 60.0
MODULE = "tests.worker.signalled_process"


async def test_a_thread_that_just_begins_does_not_swallow_it() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", MODULE, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(NUM_SIGNALS):
                assert await process.stdout.readline() == b"ready\n"
                process.send_signal(signal.SIGTERM)
            assert await process.stdout.readline() == b"ready\n"
    finally:
        process.kill()
        await process.wait()
