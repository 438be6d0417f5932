"""The log of a process: a JSON object a line on stderr, written by a thread, so that logging never waits.

    {"time": "2026-01-31T12:00:00.123Z", "level": "INFO", "process": "router", "logger": "router.requests.dispatch",
     "message": "request ended", "request_id": "...", ...}

Fields of an event come from `extra={...}`. A log has no input of a client; the encoding keeps a record on one line.
"""

import atexit
import json
import logging.handlers
import os
import queue
import sys
import time
from datetime import UTC, datetime
from typing import Any, TextIO

MAX_WAITING = 10_000
FLUSH_TIMEOUT_S = 1.0
_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def start_logging(process: str) -> None:
    """Sends this process's records at INFO and above to stderr, as lines, from now on. Call it before gRPC starts."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else each handshake of a stranger is a line of no JSON
    handler = LineHandler(process, sys.stderr)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    atexit.register(handler.flush)


class LineHandler(logging.handlers.QueueHandler):
    """A handler that never blocks: while `max_waiting` lines wait for the stream, it drops and counts further lines.

    A line with the number of dropped lines follows once the stream takes lines again.
    """

    def __init__(self, process: str, stream: TextIO, max_waiting: int = MAX_WAITING) -> None:
        self._lines: queue.Queue[logging.LogRecord] = queue.Queue(max_waiting)
        super().__init__(self._lines)
        self.num_dropped = 0
        self.setFormatter(LineFormatter(process))
        logging.handlers.QueueListener(self._lines, _StreamWriter(self, stream)).start()

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1

    def flush(self) -> None:
        """Waits until the listener has written all lines, for a second at most."""
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.001)


class LineFormatter(logging.Formatter):
    """A formatter of records as lines. A record that cannot be written becomes a line with its place in the code."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        try:
            return self._encode(record, record.levelname, record.getMessage(), self._fields(record))
        except Exception as error:  # a message that does not fit its arguments; logging itself would wait for stderr
            place = {"where": f"{record.pathname}:{record.lineno}", "error": type(error).__name__}
            return self._encode(record, "ERROR", "a line cannot be written", place)

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """Returns the caller's extra fields, and the exception. Skips names with _, which libraries such as Ray add."""
        names = [name for name in vars(record) if name not in _OF_EVERY_RECORD and name[0] != "_"]
        extras = {name: getattr(record, name) for name in names}
        return extras | ({"exception": self.formatException(record.exc_info)} if record.exc_info else {})

    def _encode(self, record: logging.LogRecord, level: str, message: str, fields: dict[str, Any]) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": at, "level": level, "process": self._process, "logger": record.name, "message": message}
        return json.dumps(line | fields, default=str)


class _StreamWriter(logging.Handler):
    """The writer of lines, in the listener's thread, and of notices about dropped lines."""

    def __init__(self, lines: LineHandler, stream: TextIO) -> None:
        super().__init__()
        self._lines = lines
        self._stream = stream
        self._num_told = 0

    def emit(self, record: logging.LogRecord) -> None:
        num_dropped = self._lines.num_dropped
        try:
            self._stream.write(f"{record.getMessage()}\n{self._notice(num_dropped - self._num_told)}")
            self._stream.flush()
        except (OSError, ValueError):  # the reader is gone, or the stream is closed
            self._lines.num_dropped += 1
        else:
            self._num_told = num_dropped

    def _notice(self, num_dropped: int) -> str:
        fields = {"name": __name__, "levelname": "WARNING", "msg": "log lines were dropped", "num_dropped": num_dropped}
        return f"{self._lines.format(logging.makeLogRecord(fields))}\n" if num_dropped else ""
