import os
import time
from pathlib import Path

from deploy.local import run_dir

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
