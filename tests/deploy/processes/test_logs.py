import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.processes.logs import LineFormatter, LineHandler, start_logging

WAIT_S = 10.0
LOG_A_LOT = """
import logging
from deploy.processes.logs import start_logging

start_logging("router")
for number in range(10_000):
    logging.info("line %d of many", number)
    logging.info("a line that %d does not fit", "x")
print("served", flush=True)
"""

MEET_A_STRANGER = """
import asyncio, socket
from deploy.processes.logs import start_logging

start_logging("decode-0")

import grpc.aio
from deploy.plan.authority import Authority
from wire.rpc import listen

async def meet():
    server = grpc.aio.server()
    host, port = listen(server, "127.0.0.1", 0, Authority.make().issue("decode-0", "127.0.0.1")).split(":")
    await server.start()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET / HTTP/1.1\\r\\n\\r\\n")
    await reader.read()
    writer.close()
    await server.stop(None)

asyncio.run(meet())
"""


class Gate(io.StringIO):
    """A stream that takes nothing until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.opened = threading.Event()

    def write(self, text: str) -> int:
        self.reached.set()
        assert self.opened.wait(WAIT_S)
        return super().write(text)


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """A logger that nobody else listens to."""
    logger = logging.getLogger("tests.wire.logs")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    yield logger
    logger.handlers.clear()


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_line_with_its_fields(log: logging.Logger) -> None:
    stream = io.StringIO()
    handler = LineHandler("decode-1", stream)
    log.addHandler(handler)
    log.info("worker %s is %s", "d1", "lost", extra={"request_id": "r-1", "ttft_ms": 1.5, "outcome": None})
    log.debug("not this one")
    handler.flush()
    (line,) = lines_of(stream)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "INFO",
        "process": "decode-1",
        "logger": "tests.wire.logs",
        "message": "worker d1 is lost",
        "request_id": "r-1",
        "ttft_ms": 1.5,
        "outcome": None,
    }


def test_an_exception_stays_within_its_line(log: logging.Logger) -> None:
    stream = io.StringIO()
    handler = LineHandler("router", stream)
    log.addHandler(handler)
    try:
        raise RuntimeError("out of\nmemory")
    except RuntimeError:
        log.exception("a step failed")
    handler.flush()
    (line,) = lines_of(stream)
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("RuntimeError: out of\nmemory")


def test_a_line_that_cannot_be_written_is_told_of() -> None:
    stream = io.StringIO()
    handler = LineHandler("router", stream)
    handler.handle(logging.LogRecord("some", logging.INFO, "place.py", 7, "%d tokens", ("no number",), None))
    handler.flush()
    (line,) = lines_of(stream)
    assert (line["level"], line["message"]) == ("ERROR", "a line cannot be written")
    assert (line["where"], line["error"]) == ("place.py:7", "TypeError")


@given(st.text(), st.text())
def test_nothing_that_is_logged_can_look_like_another_line(message: str, value: str) -> None:
    record = logging.LogRecord("some", logging.INFO, "", 0, message, (), None)
    record.__dict__.update(request_id=value)
    line = LineFormatter("router").format(record)
    assert len(line.splitlines()) == 1
    assert line.isascii()
    decoded = json.loads(line)
    assert (decoded["message"], decoded["request_id"]) == (message, value)


def test_logging_never_waits_and_dropped_lines_are_counted(log: logging.Logger) -> None:
    stream = Gate()
    handler = LineHandler("router", stream, max_waiting=5)
    log.addHandler(handler)
    log.info("first")
    assert stream.reached.wait(WAIT_S)
    for number in range(12):
        log.info("line %d", number)
    assert handler.num_dropped == 7
    stream.opened.set()
    handler.flush()
    lines = lines_of(stream)
    assert [line["message"] for line in lines if line["level"] == "INFO"] == ["first", *(f"line {n}" for n in range(5))]
    assert [line["num_dropped"] for line in lines if line["level"] == "WARNING"] == [7]


def test_a_stream_that_is_gone_is_no_error_of_the_logging_thread(log: logging.Logger) -> None:
    stream = io.StringIO()
    handler = LineHandler("router", stream)
    log.addHandler(handler)
    stream.close()
    log.info("nobody hears")
    handler.flush()
    assert handler.num_dropped == 1


def test_flushing_into_a_stream_that_takes_nothing_ends(log: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.processes.logs.FLUSH_TIMEOUT_S", 0.02)
    stream = Gate()
    handler = LineHandler("router", stream)
    log.addHandler(handler)
    log.info("stuck")
    handler.flush()
    assert stream.getvalue() == ""
    stream.opened.set()


def test_a_process_whose_pipe_is_not_read_goes_on() -> None:
    """A pipe takes 64 KiB; the process logs many times as much."""
    command = [sys.executable, "-c", LOG_A_LOT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "served\n"
        finally:
            process.kill()


def test_a_process_whose_disk_is_full_goes_on() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", LOG_A_LOT], stdout=subprocess.PIPE, stderr=full, timeout=60)
    assert done.stdout == b"served\n"


def test_a_stranger_at_a_tls_port_writes_no_line() -> None:
    done = subprocess.run([sys.executable, "-c", MEET_A_STRANGER], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_everything_a_process_logs_goes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, root = io.StringIO(), logging.getLogger()
    monkeypatch.setattr("sys.stderr", stream)
    before = list(root.handlers), root.level
    try:
        start_logging("node")
        logging.getLogger("kv_store.anything").warning("a tier is away")
        root.handlers[0].flush()
    finally:
        root.handlers[:], level = before
        root.setLevel(level)
    (line,) = lines_of(stream)
    assert (line["process"], line["message"]) == ("node", "a tier is away")
