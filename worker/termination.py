"""SIGTERM as a callback on an event loop outside the main thread."""

import asyncio
import faulthandler
import os
import signal
import threading
from collections.abc import Callable


def leave_sigterm_to_the_main_thread() -> None:
    """Blocks SIGTERM on this thread, and on all that it starts later. Does nothing on the main thread.

    Call it before the thread starts others. A thread that just begins may take the main thread's signal before Python
    knows the thread: `on_sigterm` would miss it.
    """
    if threading.current_thread() is not threading.main_thread():
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def on_sigterm(callback: Callable[[], None]) -> None:
    """Calls `callback` on the running event loop at this process's first SIGTERM, which has no other effect.

    Ray runs an actor's event loop outside the main thread, and only the main thread may set Python's signal handlers,
    which Ray has done by then. So faulthandler, which any thread may register, takes the signal: its output wakes the
    loop. Its pipe stays open as long as the process lives.
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
