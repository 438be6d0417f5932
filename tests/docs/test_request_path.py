"""The way of a request in docs/request-path.md and docs/architecture.md, against a request that is traced."""

import json
import re
import subprocess
import sys

from tests.docs import generated
from tests.docs.request_path import ALWAYS, COMMAND, ROOT, Way, from_table, to_table

TIMEOUT_S = 120.0


def traced() -> list[Way]:
    """Traces requests in a process of their own, where no other test has called anything."""
    command = [sys.executable, "-m", "tests.docs.request_path", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return [Way(**way) for way in json.loads(done.stdout)]


def test_the_page_has_every_file_that_a_request_enters() -> None:
    """In the step in which it enters them, whatever their order there."""
    told, ways = from_table(generated.read(generated.REQUEST_PATH, COMMAND)), traced()
    files = {file for step in told.values() for file in step}
    assert files == ways[0].files, f"run: {COMMAND}"
    for step in set(told) - {ALWAYS}:
        entered = {file for way in ways for file in (*way.steps.get(step, ()), *way.always)}
        assert set(told[step]) <= entered, f"run: {COMMAND}"


def test_the_stations_are_files_of_the_way() -> None:
    """Thirteen, of which port, line and KV have two files each."""
    told = from_table(generated.read(generated.REQUEST_PATH, COMMAND))
    rows = re.findall(r"^\| \d+ \| [^|]+ \|([^|]+)\|", generated.ARCHITECTURE.read_text(), re.MULTILINE)
    stations = [file for row in rows for file in re.findall(r"`([^`]+)`", row)]
    assert (len(rows), len(stations)) == (13, 16)
    assert set(stations) <= {file for step in told.values() for file in step}


def test_a_table_is_read_as_it_was_written() -> None:
    steps = {"in": ["gateway/app.py", "gateway/chat.py", "wire/ids.py", "gateway/app.py"], ALWAYS: ["wire/rpc.py"]}
    assert from_table(to_table(steps)) == steps


def test_a_return_is_counted_for_the_file_that_was_left_before() -> None:
    way = Way(("a.py", "a.py", "b.py", "a.py", "c.py", "b.py"), ())
    assert way.returns == {"a.py": {"b.py": 1}, "b.py": {"c.py": 1}}
    assert way.num_returns == 2
