"""`baton logs`: which lines of which files it shows, and that none of them drives a terminal."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cli.__main__ import main
from cli.terminal import escaped
from deploy.local import run_dir
from deploy.local.log_files import MAX_READ_BYTES, LogReader, find_logs
from deploy.local.state import ClusterPhase, ClusterState, StateFile
from deploy.processes.process import SUFFIX, ProcessRef
from wire.typed_reader import to_json

GONE = ProcessRef(pid=2**22 + 1, started=1.0, boot="none")
WAIT_S = 60.0


@pytest.fixture
def folder(run_folder: Path) -> Path:
    """The folder of a cluster that has crashed: its router and a worker have logs, a second worker has none."""
    run_dir.ray_logs(run_folder).mkdir(parents=True)
    for pid, name in ((700, "router"), (701, "decode-0"), (702, "decode-1")):
        (run_folder / f"{name}{SUFFIX}").write_text(to_json(replace(GONE, pid=pid)))
    write(run_folder, 700, "".join(f"router {number}\n" for number in range(30)))
    write(run_folder, 701, "first\nsecond\n")
    (run_folder / "ray.log").write_text("ray started\n")
    StateFile("default").write(
        ClusterState(
            name="default", phase=ClusterPhase.RUNNING, command=GONE, run_dir=str(run_folder), token="secret", head=GONE
        )
    )
    return run_folder


def write(folder: Path, pid: int, text: str | bytes) -> Path:
    """Appends to the log that Ray keeps for a process."""
    path = run_dir.ray_logs(folder) / f"worker-0a1b-01000000-{pid}.err"
    with path.open("ab") as file:
        file.write(text if isinstance(text, bytes) else text.encode())
    return path


def test_logs_are_found_by_the_names_of_processes(folder: Path) -> None:
    assert sorted(find_logs(folder)) == ["decode-0", "ray", "router"]
    write(folder, 702, "x\n")
    assert find_logs(folder)["decode-1"].name.endswith("-702.err")


def test_logs_of_living_processes_come_first(folder: Path) -> None:
    (folder / f"router{SUFFIX}").write_text(to_json(ProcessRef.of(os.getpid())))
    write(folder, os.getpid(), "x\n")
    assert list(find_logs(folder)) == ["ray", "router", "decode-0"]


def test_the_last_lines_of_each_process_with_its_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "--lines", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ray | ray started",
        "decode-0 | first",
        "decode-0 | second",
        "router | router 28",
        "router | router 29",
    ]
    assert main(["logs", "router"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"router {number}" for number in range(10, 30)]


def test_an_unknown_worker_gets_the_names_of_all_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("decode-9", "\x1b[2J", "../../etc/passwd"):
        assert main(["logs", wrong]) == 1
        told = f"baton: {wrong!r} has no log here: there are ray, decode-0, router\n"
        assert capsys.readouterr() == ("", told)
    for number in range(50):
        (folder / f"prefill-{number}{SUFFIX}").write_text(to_json(replace(GONE, pid=800 + number)))
        write(folder, 800 + number, "x\n")
    assert main(["logs", "x" * 1000]) == 1
    assert len(told := capsys.readouterr().err) < 400
    assert told.endswith(", ...\n")


def test_a_log_cannot_drive_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, 701, b"\x1b]0;title\x07 \x9b31m \xff\r\x08\x00\tend \xe2\x80\xae\xc2\x85\n")
    assert main(["logs", "decode-0", "--lines", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown == "\\x1b]0;title\\x07 \\x9b31m \\xff\\r\\x08\\x00\tend \\u202e\\x85\n"
    assert escaped("".join(map(chr, range(0x110000)))).encode().decode() != ""
    assert escaped("größer, 東京, 🙂") == "größer, 東京, 🙂"


def test_of_a_joined_ray_logs_are_found_by_a_living_process(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray's session is another folder then, to which the stderr of each process leads."""
    with (tmp_path / "worker-0a1b-01000000-700.err").open("w") as dead:
        dead.write("router ended\n")
    with (tmp_path / "living").open("w") as stderr, subprocess.Popen(["sleep", "60"], stderr=stderr) as living:
        path = (tmp_path / "living").rename(tmp_path / f"worker-0a1b-01000000-{living.pid}.err")
        path.write_text("worker lost\n")
        (run_folder / f"controller{SUFFIX}").write_text(to_json(ProcessRef.of(living.pid)))
        (run_folder / f"router{SUFFIX}").write_text(to_json(replace(GONE, pid=700)))
        cluster = ClusterState(
            name="default", phase=ClusterPhase.RUNNING, command=GONE, run_dir=str(run_folder), token="secret"
        )
        StateFile("default").write(cluster)
        assert main(["logs"]) == 0
        living.kill()
    assert capsys.readouterr().out.splitlines() == ["controller | worker lost", "router | router ended"]


def test_a_reader_goes_on_from_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthree\nunfinis")
    reader = LogReader(path, 2)
    assert reader.new() == ["two", "three"]
    assert reader.new() == []
    with path.open("ab") as file:
        file.write(b"hed\n\nlast\n")
    assert reader.new() == ["unfinished", "", "last"]
    path.write_bytes(b"anew\n")
    assert reader.new() == ["anew"]


def test_a_reader_takes_a_bounded_part_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (3 * MAX_READ_BYTES) + b"\nend\n")
    reader = LogReader(path, 1)
    assert reader.new() == ["end"]
    with path.open("ab") as file:
        file.write(b"y" * (MAX_READ_BYTES + 3) + b"\nafter\n")
    assert reader.new() == ["y" * MAX_READ_BYTES]
    assert reader.new() == ["yyy", "after"]


def test_it_follows_lines_and_new_processes_until_an_interrupt(folder: Path) -> None:
    command = [sys.executable, "-m", "cli", "logs", "--follow", "--lines", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)][-1] == "router | router 29\n"
        write(folder, 700, "new\n")
        assert process.stdout.readline() == "router | new\n"
        write(folder, 702, "hello\n")
        assert process.stdout.readline() == "decode-1 | hello\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=WAIT_S) == ("", "")
    assert process.returncode == 0


def test_following_ends_with_the_cluster(folder: Path) -> None:
    command = [sys.executable, "-m", "cli", "logs", "router", "--follow", "--lines", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "router 29\n"
        run_dir.remove(folder)
        assert process.communicate(timeout=WAIT_S) == ("", "")
    assert process.returncode == 0
    assert not os.path.lexists(folder)
