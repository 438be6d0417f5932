from pathlib import Path

from deploy.controller.controller import authority_of


def test_a_controller_that_takes_over_certifies_under_the_same_authority(tmp_path: Path) -> None:
    first = authority_of(tmp_path)
    assert authority_of(tmp_path) == first
    [kept] = tmp_path.iterdir()
    assert kept.stat().st_mode & 0o077 == 0
