import os
from pathlib import Path

import pytest

from deploy.processes.atomic_file import AtomicFile


@pytest.fixture
def file(tmp_path: Path) -> AtomicFile:
    return AtomicFile(tmp_path / "pools.json")


def test_the_last_content_written_is_read(file: AtomicFile) -> None:
    assert file.read() is None
    file.write(b"one")
    assert file.try_write(b"other")
    assert file.read() == b"other"
    assert [path.name for path in file.path.parent.iterdir()] == ["pools.json"]


def test_only_the_owner_can_read_it(file: AtomicFile) -> None:
    file.write(b"one")
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_a_pipe_is_refused(file: AtomicFile) -> None:
    os.mkfifo(file.path)
    with pytest.raises(OSError, match="not a regular file"):
        file.read()


def test_a_file_is_created_once(file: AtomicFile) -> None:
    assert file.create(b"one")
    assert not file.create(b"other")
    assert file.read() == b"one"
    assert [path.name for path in file.path.parent.iterdir()] == ["pools.json"]


@pytest.mark.parametrize("content", [b"no number", b"\xff", b""])
def test_a_damaged_record_is_none_and_that_is_logged(
    file: AtomicFile, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    assert file.recall(int) is None
    assert caplog.records == []
    file.write(content)
    assert file.recall(int) is None
    assert "pools.json is damaged" in caplog.text
    file.write(b"7")
    assert file.recall(int) == 7
    file.path.unlink()
    file.path.mkdir()
    assert file.recall(int) is None


def test_a_disk_that_takes_nothing_leaves_the_content_as_it_was(
    file: AtomicFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path, _target: Path) -> None:
        raise OSError("no space left")

    file.write(b"one")
    monkeypatch.setattr(Path, "replace", refuse)
    assert not file.try_write(b"other")
    with pytest.raises(OSError, match="no space left"):
        file.write(b"other")
    assert file.read() == b"one"
    assert [path.name for path in file.path.parent.iterdir()] == ["pools.json"]
