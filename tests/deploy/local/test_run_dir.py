import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.local import run_dir
from worker.progress import Progress

LONG_AGO = (1.0, 1.0)


def test_all_of_a_run_folder_and_of_folders_of_its_nodes_beside_it_is_renewed(run_folder: Path) -> None:
    """Cleaners of /tmp go by these times."""
    beside, stranger = Path(f"{run_folder}.n1"), Path(f"{run_folder}x")
    for folder in (run_folder / "r" / "session_1" / "logs", beside, stranger):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    (run_folder / "link").symlink_to("/nowhere")
    paths = [run_folder, *run_folder.rglob("*"), beside, beside / "file"]
    try:
        for path in (*paths, stranger):
            os.utime(path, LONG_AGO, follow_symlinks=False)
        now_s = time.time()
        run_dir.renew(run_folder)
        times = [time_s for path in paths for time_s in (path.lstat().st_mtime, path.lstat().st_atime)]
        assert min(times) > now_s - 5
        assert stranger.stat().st_mtime == LONG_AGO[1]
    finally:
        (stranger / "file").unlink()
        stranger.rmdir()


def test_a_run_folder_that_is_gone_is_not_made_again(run_folder: Path) -> None:
    run_folder.rmdir()
    run_dir.renew(run_folder)
    assert not run_folder.exists()


def test_only_files_of_this_users_living_workers_tell_of_warming(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/tmp is open to all: a pipe would block its reader."""
    node, foreign = Path(f"{run_folder}.n1"), Path(f"{run_folder}.n2")
    node.mkdir()
    with Progress.beside(node / "directory.sock", "decode-0") as progress:
        progress.note("graphs", 3, 15)
        (written,) = node.iterdir()
        os.mkfifo(node / written.name.replace("decode-0", "pipe-0"))
        (node / written.name.replace("decode-0", "link-0")).symlink_to(written)
        foreign.symlink_to(node)
        assert run_dir.warming(run_folder) == {"decode-0": "graphs 3 of 15"}
        monkeypatch.setattr(os, "getuid", lambda: written.stat().st_uid + 1)
        assert run_dir.warming(run_folder) == {}
        monkeypatch.undo()
    foreign.unlink()


def test_a_worker_that_was_killed_while_it_warmed_warms_no_more(run_folder: Path) -> None:
    node = Path(f"{run_folder}.n1")
    node.mkdir()
    code = f"""
import os, pathlib, worker.progress
progress = worker.progress.Progress.beside(pathlib.Path({str(node)!r}, "directory.sock"), "decode-0")
progress.note("graphs", 3, 15)
os._exit(1)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1
    assert len(list(node.iterdir())) == 1
    assert run_dir.warming(run_folder) == {}
