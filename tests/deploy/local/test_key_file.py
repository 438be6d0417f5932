"""The keys that a controller goes by while its file, or its record of them, cannot be used."""

from pathlib import Path

import pytest

from deploy.local.key_file import KeyFile, LastKeys
from deploy.processes.atomic_file import AtomicFile
from wire.errors import ConfigError
from wire.trust.key_ring import NO_CALLER, NO_KEYS, Allowance, KeyList, Scope, make_key

KEYS = KeyList((make_key("acme", [Scope.GENERATE], Allowance())[0],))


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "default.keys.json")


@pytest.fixture
def last(file: KeyFile, tmp_path: Path) -> LastKeys:
    return LastKeys(file, AtomicFile(tmp_path / "keys.json"))


@pytest.mark.parametrize(
    "content",
    ["", "{", "\0" * 40, "{}", '{"keys": []}', '{"keys": [], "keys": []}', '{"keys": [{}]}', '{"keys": 1e999}'],
)
def test_a_file_that_is_there_and_has_no_keys_is_never_taken_for_none(file: KeyFile, content: str) -> None:
    file.path.write_text(content)
    file.path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"default\.keys\.json"):
        file.read()


def test_a_name_that_stands_twice_is_refused(file: KeyFile) -> None:
    file.write(KEYS)
    content = file.path.read_text()
    file.path.write_text(content.removesuffix("}") + ', "keys": []}')
    with pytest.raises(ConfigError, match="keys: twice"):
        file.read()


def test_the_keys_read_last_are_recalled_by_the_next_controller(file: KeyFile, last: LastKeys) -> None:
    file.write(KEYS)
    assert last.read() == KEYS
    file.path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        last.read()
    assert last.recall() == KEYS


def test_a_cluster_without_keys_has_none_to_recall(last: LastKeys) -> None:
    assert last.read() == NO_KEYS
    assert last.recall() == NO_KEYS


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff", b'{"keys": [], "keys": []}'])
def test_without_a_record_that_can_be_read_no_caller_comes_in(
    last: LastKeys, tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "keys.json").write_bytes(content)
    assert last.recall() == NO_CALLER


def test_keys_that_cannot_be_recorded_leave_no_earlier_ones(
    file: KeyFile, last: LastKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write(KEYS)
    last.read()
    revoked = KeyList((*KEYS.keys, make_key("beta", [Scope.GENERATE], Allowance())[0]))
    file.write(revoked)
    monkeypatch.setattr(AtomicFile, "try_write", lambda *_: False)
    assert last.read() == revoked
    assert last.recall() == NO_CALLER
