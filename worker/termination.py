"""SIGTERM as a callback on an event loop."""

import asyncio
import faulthandler
import os
import signal
from collections.abc import Callable


def on_sigterm(callback: Callable[[], None]) -> None:
    """Calls `callback` on the running event loop when this process first gets SIGTERM; nothing else happens then.

    Ray runs an actor's event loop beside the main thread, and only that may set Python's signal handlers, which Ray has
    done by then. So faulthandler takes the signal, which may be registered anywhere: what it writes wakes the loop.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)

    loop = asyncio.get_running_loop()

    def arrived() -> None:
        loop.remove_reader(reader)
        callback()

    loop.add_reader(reader, arrived)
    faulthandler.register(signal.SIGTERM, writer, all_threads=False, chain=False)
