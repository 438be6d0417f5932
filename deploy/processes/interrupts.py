"""Signals that end a command before its work is done."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """A handler of SIGINT, SIGTERM and SIGHUP: the first raises KeyboardInterrupt, within `awaited` only.

    Work outside of `awaited` is never interrupted, and later signals do nothing. For the main thread; a signal that the
    command ignores from its start (nohup) stays ignored.
    """

    def __init__(self) -> None:
        self._has_come = False
        self._is_awaited = False
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._earlier[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Raises KeyboardInterrupt within the block when a signal comes, or at its start after an earlier signal.

        Raises it at the block's end if Python has lost it, as it does within a destructor.
        """
        self._is_awaited = True
        try:
            self._check()
            yield
            self._check()
        finally:
            self._is_awaited = False

    def _check(self) -> None:
        if self._has_come:
            raise KeyboardInterrupt

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        is_first, self._has_come = not self._has_come, True
        if is_first and self._is_awaited:
            raise KeyboardInterrupt
