"""A worker as a process of its own, with its event loop beside the main thread, as in a Ray actor.

python -m tests.worker.worker_process deploy.actors.worker PoolWorker, and the configuration as one line of input
"""

import asyncio
import importlib
import sys
import threading


async def serve(module: str, name: str) -> None:
    actor = getattr(importlib.import_module(module), name)(sys.stdin.readline())
    print(await actor.start(), flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    thread = threading.Thread(target=lambda: asyncio.run(serve(sys.argv[1], sys.argv[2])))
    thread.start()
    thread.join()
