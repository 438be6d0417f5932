from pathlib import Path

from deploy.processes.record import Record


def test_what_is_written_last_is_read(tmp_path: Path) -> None:
    record = Record(tmp_path / "pools.json")
    assert record.read() is None
    assert record.write("one")
    assert record.write("other")
    assert record.read() == "other"
    assert [path.name for path in tmp_path.iterdir()] == ["pools.json"]


def test_what_the_disk_does_not_take_leaves_what_was_there(tmp_path: Path) -> None:
    record = Record(tmp_path / "pools.json")
    record.write("one")
    (tmp_path / "pools.new").mkdir()
    assert not record.write("other")
    assert record.read() == "one"
