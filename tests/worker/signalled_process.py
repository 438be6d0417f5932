"""A process whose event loop runs beside its main thread, and which starts threads all the time.

It prints a line when it is ready for SIGTERM, and then one for each that it has heard of.
"""

import asyncio
import threading

from worker.termination import leave_sigterm_to_the_main_thread, on_sigterm


async def serve() -> None:
    leave_sigterm_to_the_main_thread()
    threading.Thread(target=start_threads, daemon=True).start()
    while True:
        heard = asyncio.Event()
        on_sigterm(heard.set)
        print("ready", flush=True)  # noqa: T201
        await heard.wait()


def start_threads() -> None:
    while True:
        started = threading.Thread(target=int)
        started.start()
        started.join()


if __name__ == "__main__":
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    thread.join()
