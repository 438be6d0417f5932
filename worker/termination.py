"""SIGTERM as a callback on an event loop that runs beside the main thread."""

import asyncio
import faulthandler
import os
import signal
import threading
from collections.abc import Callable


def leave_sigterm_to_the_main_thread() -> None:
    """Blocks SIGTERM on this thread, and on all that it starts later. Does nothing on the main thread.

    Comes before the thread starts any. A thread that just begins may take a signal that was meant for the main thread,
    and Python does not know it by then: `on_sigterm` would hear nothing of the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def on_sigterm(callback: Callable[[], None]) -> None:
    """Calls `callback` on the running event loop when this process first gets SIGTERM; nothing else happens then.

    Ray runs an actor's event loop beside the main thread, and only that may set Python's signal handlers, which Ray has
    done by then. So faulthandler takes the signal, which may be registered anywhere: what it writes wakes the loop.
    The pipe it writes to stays open for as long as the process lives.
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
