"""The namespaces that a secret has served."""

from pathlib import Path

import pytest

from deploy.local.state import MAX_SERVED, ServedFile
from wire.layout import KVLayout
from wire.served_model import ServedNamespace


def served(number: int, block_size: int = 16, model: str = "m") -> ServedNamespace:
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=block_size, dtype="float32")
    return ServedNamespace(model, bytes([number] * 32).hex(), layout.encode().hex())


@pytest.fixture
def file(tmp_path: Path) -> ServedFile:
    return ServedFile(tmp_path / "secret")


def test_others_are_listed_the_latest_first_and_never_the_one_that_is_served(file: ServedFile) -> None:
    assert file.others(served(1)) == ()
    for one in (served(1), served(2), served(1, block_size=32), served(2)):
        assert file.note(one)
    assert file.others(served(2, model="another name")) == (served(1, block_size=32), served(1))
    assert file.others(served(3)) == (served(2), served(1, block_size=32), served(1))


def test_the_file_is_private_and_has_the_latest_alone(file: ServedFile, tmp_path: Path) -> None:
    for number in range(2 * MAX_SERVED):
        file.note(served(number))
    assert file.others(served(99)) == tuple(served(number) for number in reversed(range(MAX_SERVED, 2 * MAX_SERVED)))
    assert (tmp_path / "secret.served").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [
    b"", b"\xff", b"{}}", b'{"namespaces":[{"model":"m","fingerprint_hex":"x","layout_hex":""}]}',
    b'{"namespaces":[{"model":"m","fingerprint_hex":"00","layout_hex":"00"}]}',
])  # fmt: skip
def test_a_damaged_file_is_none_and_is_replaced(content: bytes, file: ServedFile, tmp_path: Path) -> None:
    (tmp_path / "secret.served").write_bytes(content)
    assert file.others(served(1)) == ()
    assert file.note(served(1))
    assert file.others(served(2)) == (served(1),)


def test_a_folder_that_takes_no_file_hinders_nothing(tmp_path: Path) -> None:
    file = ServedFile(tmp_path / "none" / "secret")
    assert not file.note(served(1))
    assert file.others(served(2)) == ()
