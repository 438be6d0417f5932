"""How every process of a cluster logs: one JSON object a line on stderr, written by a thread that nobody waits for.

    {"time": "2026-01-31T12:00:00.123Z", "level": "INFO", "process": "router", "logger": "router.requests.session",
     "message": "request ended", "request_id": "...", ...}

Fields of an event's own come from `extra={...}`. What is logged is never a client's input; that nothing in a line
can look like another line is the encoding's doing.
"""

import atexit
import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

MAX_WAITING = 10_000
FLUSH_TIMEOUT_S = 1.0
_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def start_logging(process: str) -> None:
    """From now on everything that is logged at INFO and above leaves this process as lines on its stderr."""
    handler = LineHandler(process, sys.stderr)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    atexit.register(handler.flush)


class LineHandler(logging.Handler):
    """Never blocks whoever logs: when `max_waiting` lines wait for the stream, further ones are dropped and counted.

    The number of those dropped is told in a line of its own as soon as the stream takes lines again.
    """

    def __init__(self, process: str, stream: TextIO, max_waiting: int = MAX_WAITING) -> None:
        super().__init__()
        self.num_dropped = 0
        self._process = process
        self._stream = stream
        self._lines: queue.Queue[str] = queue.Queue(max_waiting)
        self._num_told = 0
        threading.Thread(target=self._write_for_ever, name="log-writer", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = render(record, self._process)
        except Exception as error:  # a message that does not fit its arguments; logging itself would wait for stderr
            line = _render_misfit(record, self._process, error)
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.num_dropped += 1

    def flush(self) -> None:
        """Waits until what was logged is written, but not for long."""
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.001)

    def _write_for_ever(self) -> None:
        while True:
            line = self._lines.get()
            try:
                self._write(line)
            except (OSError, ValueError):  # nobody reads, or the stream is closed
                self.num_dropped += 1
            self._lines.task_done()

    def _write(self, line: str) -> None:
        num_dropped = self.num_dropped
        if num_dropped > self._num_told:
            line += _encode(
                _stamp(time.time(), "WARNING", self._process, __name__, "log lines were dropped")
                | {"num_dropped": num_dropped - self._num_told}
            )
        self._stream.write(line)
        self._stream.flush()
        self._num_told = num_dropped


def render(record: logging.LogRecord, process: str) -> str:
    """A record as a line."""
    line = _stamp(record.created, record.levelname, process, record.name, record.getMessage())
    line |= {name: value for name, value in vars(record).items() if _is_extra(name)}
    if record.exc_info:
        line["exception"] = logging.Formatter().formatException(record.exc_info)
    return _encode(line)


def _is_extra(name: str) -> bool:
    """Whether a record has this of its caller; libraries add theirs, as Ray does, under names of their own."""
    return name not in _OF_EVERY_RECORD and not name.startswith("_")


def _render_misfit(record: logging.LogRecord, process: str, error: Exception) -> str:
    """A line that says where one was that cannot be written."""
    line = _stamp(record.created, "ERROR", process, record.name, "a line cannot be written")
    return _encode(line | {"where": f"{record.pathname}:{record.lineno}", "error": type(error).__name__})


def _stamp(at_s: float, level: str, process: str, logger: str, message: str) -> dict[str, Any]:
    at = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"time": at, "level": level, "process": process, "logger": logger, "message": message}


def _encode(line: Mapping[str, Any]) -> str:
    return json.dumps(line, default=str) + "\n"
